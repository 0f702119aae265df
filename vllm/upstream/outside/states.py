"""Layers with states of upstream's models: the engine's, which compute by metadata of the requests' states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm.layers.state import StateLayer, StateShape
from vllm.upstream.outside.step import ForwardContext, forward_context, get_forward_context


class MambaBase(StateLayer):
    """A layer that keeps a state of each request; `kv_cache[0]` has a pool of rows for each of its parts.

    Attributes:
        prefix: the layer's name in its model, by which the forward context has it.
    """

    prefix: str

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(())

    @abstractmethod
    def get_state_shape(self) -> Sequence[tuple[int, ...]]:
        """Shapes of the parts of a request's state."""

    @abstractmethod
    def get_state_dtype(self) -> Sequence[torch.dtype]:
        """Their dtypes."""

    def use_states(self) -> None:
        """Let the engine know what is kept."""
        parts = zip(self.get_state_shape(), self.get_state_dtype(), strict=True)
        self.state_shapes = tuple(StateShape(tuple(shape), dtype) for shape, dtype in parts)


class MambaStateShapeCalculator:
    """Shapes of states by a layer's sizes."""

    @classmethod
    def short_conv_state_shape(
        cls, tp_world_size: int, intermediate_size: int, conv_kernel: int
    ) -> tuple[tuple[int, int], ...]:
        """The tail of a short convolution's inputs."""
        return ((conv_kernel - 1, intermediate_size // tp_world_size),)


class MambaStateDtypeCalculator:
    """Dtypes of states."""

    @classmethod
    def short_conv_state_dtype(cls, model_dtype: torch.dtype, mamba_cache_dtype: str) -> tuple[torch.dtype, ...]:
        """The model's. ValueError: another is asked for."""
        if mamba_cache_dtype != "auto":
            raise ValueError(f"mamba_cache_dtype={mamba_cache_dtype!r} is not served: leave it 'auto'")
        return (model_dtype,)


@dataclass
class StateMetadata:
    """The requests of a call: first those that continue, by a token each, then those that begin.

    Attributes:
        state_indices_tensor: int32 [requests], their rows of the pools.
        query_start_loc_p: int32 [beginning requests + 1], where each one's tokens begin among theirs.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    query_start_loc_p: Tensor | None
    state_indices_tensor: Tensor
    has_initial_states_p: Tensor | None = None

    @property
    def state_indices_tensor_d(self) -> Tensor:
        """States of requests that continue."""
        return self.state_indices_tensor[: self.num_decodes]

    @property
    def state_indices_tensor_p(self) -> Tensor:
        """States of requests that begin."""
        return self.state_indices_tensor[self.num_decodes :]


class StatefulCalls:
    """In the place of a layer with states in the forward context: it computes a step by one call for the requests that
    begin and a token of each that continues, and one for each further token of these. So a layer needs no more than the
    two cases, and what it gives does not depend on where a prompt was cut."""

    forwarded: ClassVar[tuple[str, ...]] = ("forward_cuda", "forward_cpu", "forward_native", "forward_impl")

    def __init__(self, layer: MambaBase) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        return self._in_calls(found) if name in self.forwarded else found

    def _in_calls(self, compute: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            context = get_forward_context()
            # Upstream's layers find their pools here.
            self._layer.kv_cache = (self._layer.state,)  # type: ignore[assignment]
            for rows, metadata in _calls(context.attn_metadata):
                own = ForwardContext({self._layer.prefix: metadata}, context.no_compile_layers)
                taken = [_taken(value, rows) for value in args]
                named = {name: _taken(value, rows) for name, value in kwargs.items()}
                with forward_context(own):
                    compute(*taken, **named)
                for whole, part in (*zip(args, taken, strict=True), *((kwargs[name], named[name]) for name in named)):
                    if isinstance(whole, Tensor):
                        whole[rows] = part

        return run


def _taken(value: Any, rows: Tensor) -> Any:
    return value[rows] if isinstance(value, Tensor) else value


def _calls(attn: Any) -> Iterator[tuple[Tensor, StateMetadata]]:
    """The rows of each call of a step, and who they are."""
    starts, lengths, slots = attn.query_start_loc.tolist(), attn.seq_lens.tolist(), attn.state_slots.tolist()
    device = attn.query_start_loc.device
    begins: list[tuple[int, int, int]] = []
    continues: list[tuple[int, int, int]] = []
    for start, stop, length, slot in zip(starts, starts[1:], lengths, slots, strict=False):
        (begins if stop - start == length else continues).append((start, stop, slot))
    turn = 0
    while begins or continues:
        rows = [start + turn for start, _, _ in continues] + [
            row for start, stop, _ in begins for row in range(start, stop)
        ]
        sizes = [stop - start for start, stop, _ in begins]
        ends = torch.tensor([0, *sizes], device=device).cumsum(0).int() if begins else None
        indices = torch.tensor([slot for *_, slot in (*continues, *begins)], dtype=torch.int32, device=device)
        initial = torch.zeros(len(begins), dtype=torch.bool, device=device) if begins else None
        counts = len(begins), sum(sizes), len(continues), len(continues)
        yield torch.tensor(rows, device=device), StateMetadata(*counts, ends, indices, initial)
        turn += 1
        begins, continues = [], [each for each in continues if each[0] + turn < each[1]]
