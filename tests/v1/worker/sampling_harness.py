"""A sampler with slots and requests in it, without a model: tests hand it logits."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.distributed.communicator import ALONE, Communicator, split_vocab
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of
from vllm.v1.worker.gpu.states import RequestStates

VOCAB = 199
EOS = (2, 7)
MAX_NUM_REQS = 24
CPU = torch.device("cpu")


class Harness:
    """Requests live in slots that the caller may choose; a step samples any of them, in any order. With a group, this
    is one of its ranks: it is handed whole rows of logits like the others, and gives its sampler the rank's slice.

    Logits and sampled tokens are on the CPU, the sampler is where `device` says.
    """

    device = CPU

    def __init__(
        self,
        vocab_size: int = VOCAB,
        seed: int = 0,
        max_model_len: int = 64,
        logits_processors: tuple[type, ...] = (),
        group: Communicator = ALONE,
        max_num_reqs: int = MAX_NUM_REQS,
    ) -> None:
        self.vocab_size = vocab_size
        self.own_ids = split_vocab(vocab_size, group.world_size)[group.rank]
        self._numbers = itertools.count()
        model_config = SimpleNamespace(
            vocab_size=vocab_size,
            seed=seed,
            hf_config=SimpleNamespace(eos_token_ids=EOS),
            logits_processors=logits_processors,
        )
        config = SimpleNamespace(model_config=model_config, scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs))
        self.states = RequestStates(max_num_reqs, max_model_len, self.device)
        self.sampler = Sampler(config, self.device, vocab_of(vocab_size, group))

    def add(
        self,
        params: SamplingParams,
        prompt: list[int] | tuple[int, ...] = (3, 4, 5),
        generated: list[int] | tuple[int, ...] = (),
        request_id: str | None = None,
    ) -> int:
        name = request_id or f"request-{next(self._numbers)}"
        slot = self.states.add_request(name, [*prompt, *generated], len(prompt), 0)
        self.sampler.add_request(slot, params, name)
        return slot

    def remove(self, slot: int) -> None:
        name = next(name for name, owned in self.states.req_id_to_slot.items() if owned == slot)
        self.states.remove_request(name)
        self.sampler.remove_request(slot)

    def step(self, logits: torch.Tensor, slots: list[int]) -> SamplerOutput:
        self.sampler.apply_staged_writes()
        own = logits.to(self.device)[:, self.own_ids.start : self.own_ids.stop]
        output = self.sampler(own, np.array(slots, dtype=np.int64), self.states)
        output.sampled_token_ids = output.sampled_token_ids.cpu()
        return output

    def processed(self, logits: torch.Tensor, slot: int) -> np.ndarray:
        """float32 [V]: the processed logits of a request that asked for all of them (`everything`)."""
        output = self.step(logits[None], [slot])
        return dense_logits(output, 0, self.vocab_size)


def everything(**params: object) -> SamplingParams:
    """Parameters that return every processed logit."""
    return SamplingParams(logprobs=-1, logprobs_mode="processed_logits", **params)  # type: ignore[arg-type]


def dense_logits(output: SamplerOutput, row: int, vocab_size: int) -> np.ndarray:
    """float32 [V] from the readings of a row that holds the whole vocabulary."""
    for rows, tensors in output.logprobs:
        if row in rows:
            lists, index = tensors.tolists(), rows.index(row)
            dense = np.full(vocab_size, np.nan, dtype=np.float32)
            dense[lists.token_ids[index, 1 : 1 + vocab_size]] = lists.logits[index, 1 : 1 + vocab_size]
            return dense
    raise AssertionError(f"row {row} has no readings")


def reading(output: SamplerOutput, row: int, num_topk: int, num_ids: int) -> dict[str, np.ndarray] | None:
    """The columns that belong to one row: the sampled token, its own top-k, its own ids; None without
    readings."""
    for rows, tensors in output.logprobs:
        if row in rows:
            lists, index = tensors.tolists(), rows.index(row)
            columns = [*range(1 + num_topk), *range(1 + lists.num_topk, 1 + lists.num_topk + num_ids)]
            names = ("token_ids", "logprobs", "logits", "ranks")
            return {name: getattr(lists, name)[index, columns] for name in names} | {
                "lse": lists.lse[index : index + 1]
            }
    return None


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """float32 [rows, vocab_size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * scale


class Custom(LogitsProcessor):
    """Adds each request's `extra_args["shift"]` to its odd tokens and halves the rest; keeps what it was given."""

    invariant = False
    seen: list[torch.Tensor]

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert (device.type, is_pin_memory) == ("cpu", False)
        assert vllm_config.model_config.vocab_size == VOCAB
        self.shifts: dict[int, float] = {}
        type(self).seen = []

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.shifts, batch_update, lambda params, *_: (params.extra_args or {}).get("shift"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(logits.clone())
        for index, shift in self.shifts.items():
            logits[index, 1::2] += shift
            logits[index, ::2] *= 0.5
        return logits
