"""How trainers send weights, by upstream's names: transports of callers, and those that are built in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer import ModuleSource, ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port


class Kept:
    """A client that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


@dataclass
class ByHandInfo(TrainerInitInfo):
    backend: ClassVar[str] = "by_hand"

    place: str


class ByHand(TrainerWeightTransferEngine[ByHandInfo]):
    @classmethod
    def trainer_init(
        cls, init_info: ByHandInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> ByHand:
        client.init_weight_transfer_engine({"place": init_info.place})
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        assert self.source is not None
        self.client.start_weight_update()
        self.client.update_weights({name: tensor.tolist() for name, tensor in self.source.iter_full()})
        self.client.finish_weight_update()


def test_a_callers_own_transport_is_used() -> None:
    WeightTransferTrainerFactory.register_engine("by_hand", __name__, "ByHand")
    with pytest.raises(ValueError, match="'by_hand' already"):
        WeightTransferTrainerFactory.register_engine("by_hand", ByHand)
    model = torch.nn.Linear(2, 1)
    client, source = Kept(), ModuleSource(model)
    assert isinstance(client, VLLMWeightSyncClient)
    engine = WeightTransferTrainerFactory.trainer_init(ByHandInfo(rank=0, place="here"), client=client, source=source)
    engine.send_weights()
    values = {"weight": model.weight.tolist(), "bias": model.bias.tolist()}
    assert client.calls == [{"place": "here"}, "start", values, "finish"] and engine.is_sender
    assert [meta.shape for meta in source.metadata] == [(1, 2), (1,)]
    assert source.owned_names(3) == ["weight", "bias"] and source.implements_iter_full()
    with pytest.raises(NotImplementedError, match="the transport 'nccl_m2n': weights are sent by NCCLTrainerInitInfo"):
        WeightTransferTrainerFactory.trainer_init(
            M2NTrainerInitInfo("127.0.0.1", 1, world_size=2, num_trainer_ranks=1, rank=0), client=client, source=source
        )


PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)


def read(llm: LLM) -> Any:
    (output,) = llm.generate([{"prompt_token_ids": list(range(5, 40))}], PARAMS, use_tqdm=False)
    (choice,) = output.outputs
    return list(choice.token_ids), choice.cumulative_logprob, choice.weight_versions


class Checkpoint(WeightSource):
    """Weights of a folder, shifted."""

    def __init__(self, folder: Path, shift: float) -> None:
        self.weights = {name: each + shift for name, each in load_file(folder / "model.safetensors").items()}

    @property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def iter_full(self) -> Any:
        yield from self.weights.items()


class Direct:
    """A client of an engine in this process: in another thread than the trainer's."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights(WeightTransferUpdateRequest(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


@pytest.mark.parametrize(
    ("transport", "ranks"), [("ipc", 1), ("nccl", 1), ("nccl", 2)], ids=["files", "group", "group and two ranks"]
)
def test_built_in_transports(tmp_path: Path, transport: str, ranks: int) -> None:
    folder = make_tiny_model(tmp_path, max_position_embeddings=256)
    llm = make_tiny_llm(folder, tensor_parallel_size=ranks)
    before, source = read(llm), Checkpoint(folder, 0.05)
    llm.update_weights({"update_info": {"weights": source.weights}})
    expected = read(llm)
    llm.update_weights({"update_info": {"weights": Checkpoint(folder, 0).weights}})
    assert read(llm)[:2] == before[:2] != expected[:2]
    if transport == "ipc":
        info: TrainerInitInfo = IPCTrainerInitInfo(rank=0, packed_buffer_size_bytes=50_000)
    else:
        info = NCCLTrainerInitInfo(
            "127.0.0.1", get_open_port(), world_size=1 + ranks, rank=0, packed_buffer_size_bytes=50_000
        )
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Direct(llm), source=source)
    trainer.send_weights("step-1")
    assert read(llm) == (*expected[:2], ["step-1"])

    # One that does not fit: an error, nothing changes, and the next update goes on.
    changed, weights = read(llm), source.weights
    source.weights = {**weights, "zzz.weight": torch.zeros(3)}
    with pytest.raises((ValueError, RuntimeError), match=r"has no weight zzz\.weight"):
        trainer.send_weights("step-2")
    assert read(llm) == changed
    source.weights = weights
    trainer.send_weights("step-3")
    assert read(llm) == (*changed[:2], ["step-3"])
    trainer.shutdown()
