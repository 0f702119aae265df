"""Names that trainers import: each says that it does nothing, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from vllm.distributed.weight_transfer import ModuleSource, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer


def test_each_says_so_when_used() -> None:
    with pytest.raises(NotImplementedError, match="trainer_init: .*the trainer's own process"):
        trainer_init({"master_address": "127.0.0.1", "master_port": 1, "world_size": 2})
    with pytest.raises(NotImplementedError, match="packed_nccl_broadcast_producer: "):
        packed_nccl_broadcast_producer(iter([]), group=None, src=0, post_iter_func=lambda item: item[1])


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
    with pytest.raises(NotImplementedError, match="the transport 'nccl'"):
        WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo("127.0.0.1", 1, world_size=2, rank=0), client=client, source=source
        )
