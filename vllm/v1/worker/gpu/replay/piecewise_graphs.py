"""Steps with prompts on CUDA: what lies between attention calls is captured, in pieces, for some numbers of tokens.

Attention runs between the pieces' replays, since its launches depend on the requests. A layer is one replay and one to
three launches then, instead of some ten; with more tokens the device takes longer than the launches.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm.attention.backend import AttentionBackend, KVCache
from vllm.attention.options import AttentionOptions
from vllm.layers.attention import use_backend
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cuda import Cut, GraphRecorder
from vllm.v1.worker.gpu.input_batch import InputBatch, ModelInputs
from vllm.v1.worker.gpu.states import KVCaches

logger = init_logger(__name__)

_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_SKIPPED = -1  # the KV cache slot of padding


def sizes_up_to(max_tokens: int) -> list[int]:
    """Numbers of tokens to capture, ascending, up to `max_tokens` or the largest that gains by it."""
    most = min(max_tokens, _SIZES[-1])
    return sorted({size for size in _SIZES if size < most} | {most})


class _Call(NamedTuple):
    """An attention call of a captured step."""

    q: Tensor  # [T, Hq, D]
    kv_cache: KVCache
    options: AttentionOptions
    group: int  # the KV group's number
    out: Tensor  # [T, Hq, D]


class _DependsOnRequests(AttributeError):
    """A layer asks for what differs by step."""


class _CapturedMetadata:
    """In place of AttentionMetadata: what is the same in every step. Layers that ask for more cannot be captured."""

    shared = None

    def __init__(self, slot_mapping: Tensor, groups: Sequence[_CapturedMetadata] = ()) -> None:
        self.slot_mapping, self.groups = slot_mapping, tuple(groups)

    def __getattr__(self, name: str) -> Any:
        raise _DependsOnRequests(f"a layer reads {name} of the step's requests")


class _CuttingBackend(AttentionBackend):
    """Another backend whose attention is left for the replay."""

    name = "cutting"

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._of_operations = backend._of_operations  # type: ignore[method-assign]
        self._outs: dict[tuple[int, ...], Tensor] = {}  # by the sizes of heads; a piece reads one before the next call
        self.cut: Cut
        self.step: _CapturedMetadata
        self.calls: list[_Call] = []

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return self._backend.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim)

    def attend(
        self, q: Tensor, kv_cache: KVCache, attn: Any, options: AttentionOptions, out: Tensor | None = None
    ) -> Tensor:
        return self._attend(q, kv_cache, attn, options, out)

    def _attend(self, q: Tensor, kv_cache: KVCache, attn: Any, options: AttentionOptions, out: Tensor | None) -> Tensor:
        group = (self.step, *self.step.groups).index(attn)
        if q.shape[1:] not in self._outs:
            # Made in the first call of the largest step, outside of any capture.
            self._outs[q.shape[1:]] = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        out = self._outs[q.shape[1:]][: len(q)]
        self.calls.append(_Call(q, kv_cache, options, group, out))
        self.cut()
        return out


class _Step(NamedTuple):
    hidden: Tensor  # [T, H]
    replays: list[Callable[[], None]]  # one more than calls
    calls: list[_Call]


class PiecewiseGraphs:
    """The model's forward pass for steps of up to 512 tokens that are no decode steps. A step is padded to the next
    size; padding has no place in the KV cache."""

    def __init__(
        self, model: Any, backend: AttentionBackend, kv_caches: KVCaches, device: torch.device, max_tokens: int
    ) -> None:
        """Graphs keep the addresses of `kv_caches`; `max_tokens` is the most that a step can have."""
        self._model, self._backend, self._kv_caches = model, backend, kv_caches
        self._sizes = sizes_up_to(max_tokens)
        most = self._sizes[-1]
        self._ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slot_mappings: list[Tensor] = []
        self._steps: dict[int, _Step] = {}

    def record(self, recorder: GraphRecorder, num_groups: int) -> None:
        """Capture the pieces of every size; none of a model with other layers than attention that look at requests."""
        start = time.monotonic()
        shape, device = (num_groups, len(self._ids)), self._ids.device
        self._slot_mappings = list(torch.full(shape, _SKIPPED, dtype=torch.int64, device=device))
        cutting = _CuttingBackend(self._backend)
        use_backend(self._model, cutting)
        try:
            for size in reversed(self._sizes):
                hidden, replays = recorder.record_pieces(partial(self._run, size, cutting))
                self._steps[size] = _Step(hidden, replays, cutting.calls)
        except _DependsOnRequests as error:
            self._steps.clear()
            logger.debug("Steps with prompts are not captured: %s", error)
        finally:
            use_backend(self._model, self._backend)
        logger.info("Pieces of steps of %d sizes recorded in %.1f s", len(self._steps), time.monotonic() - start)

    def _run(self, size: int, cutting: _CuttingBackend, cut: Cut) -> Tensor:
        first, *others = (_CapturedMetadata(slots[:size]) for slots in self._slot_mappings)
        first.groups = tuple(others)
        cutting.cut, cutting.step, cutting.calls = cut, first, []
        return self._model(self._ids[:size], self._positions[:size], self._kv_caches, first)

    def takes(self, batch: InputBatch) -> bool:
        """Whether a captured graph fits `batch`."""
        return bool(self._steps) and batch.shared_np is None and len(batch.input_ids_np) <= self._sizes[-1]

    def __call__(self, inputs: ModelInputs) -> Tensor:
        """Final hidden states, [M, H]."""
        num_tokens = len(inputs.input_ids)
        step = self._steps[self._sizes[bisect.bisect_left(self._sizes, num_tokens)]]
        own = [inputs.attn, *inputs.attn.groups]
        self._ids[:num_tokens].copy_(inputs.input_ids)
        self._positions[:num_tokens].copy_(inputs.positions)
        for mapping, attn in zip(self._slot_mappings, own, strict=True):
            mapping[:num_tokens].copy_(attn.slot_mapping)
            mapping[num_tokens : len(step.hidden)].fill_(_SKIPPED)
        for replay, call in zip(step.replays, step.calls, strict=False):
            replay()
            q, out = call.q[:num_tokens], call.out[:num_tokens]
            self._backend.attend(q, call.kv_cache, own[call.group], call.options, out)
        step.replays[-1]()
        return step.hidden.index_select(0, inputs.hidden_rows)
