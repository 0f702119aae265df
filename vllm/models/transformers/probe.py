"""The attention calls of transformers' module of a model, found by running it once without data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Registered with transformers: the first for the run without data, the second for real ones. No mask is built for it.
PROBED, PAGED = "vllm_probed", "vllm"

_PROBE_TOKENS = 8
# Arguments of an attention call that change nothing here: the step's metadata, and requests for outputs.
_IGNORED = frozenset(
    "cache_position cu_seq_lens_k cu_seq_lens_q dropout is_causal layer_idx logits_to_keep max_length_k max_length_q "
    "num_items_in_batch output_attentions output_hidden_states output_router_logits position_embeddings position_ids "
    "return_dict target_dtype token_type_ids use_cache use_top_left_mask".split()
)


@dataclass(frozen=True)
class AttentionCall:
    """One attention layer.

    Attributes:
        name: of its module.
        num_heads, num_kv_heads: heads of the whole model's queries, and of its keys and values.
        key_dim, value_dim: width of a head's query and key, and of its value.
        scale: factor on the scores; None: key_dim ** -0.5.
        window: tokens that a query sees, its own included; None = all.
        softcap: c of c * tanh(score / c); None = none.
        has_sinks: a learned logit for each head joins the softmax's denominator.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float | None
    window: int | None
    softcap: float | None
    has_sinks: bool


class _Masks:
    """The masks that were built in a run, by their windows."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._windows: list[tuple[Tensor, int | None]] = []

    def __call__(self, mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **_: Any) -> Tensor:
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        with torch.device("cpu"):
            self._windows.append((mask, window_of(mask_function, self._longest)))
        return mask

    def window(self, mask: Tensor) -> int | None:
        """The window of a mask or of a view of it. ValueError: it was made otherwise."""
        for own, window in self._windows:
            if mask is own or mask._base is own:
                return window
        raise ValueError("its mask is not made by transformers' mask functions")


def window_of(mask_function: Callable[..., Tensor], longest: int) -> int | None:
    """The window of a causal mask, given as transformers does by (batch, head, query, key) -> visible, within the
    `longest` context; None: it is not limited. ValueError: the mask is of another kind."""
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(longest)

    def visible(query: int) -> Tensor:
        return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(longest)

    try:
        window = int(visible(longest - 1).sum())
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError("its mask depends on more than positions (as chunked attention's does)") from error
    for query in sorted({0, 1, longest // 3, longest // 2, longest - 2, longest - 1} & set(range(longest))):
        if not visible(query).equal((keys <= query) & (keys > query - window)):
            raise ValueError("its mask is neither causal nor a sliding window")
    return None if window >= longest else window


class _Recorder:
    """The attention function of a run without data."""

    def __init__(self, names: dict[nn.Module, str], masks: _Masks) -> None:
        self.calls: list[AttentionCall] = []
        self._names = names
        self._masks = masks

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        name = self._names.get(module, type(module).__name__)
        unknown = sorted(name for name, value in others.items() if value is not None and name not in _IGNORED)
        if unknown:
            raise ValueError(f"{name} gives its attention {', '.join(unknown)}, which is not implemented")
        if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
            raise ValueError(f"{name} is not causal")
        if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1] or isinstance(scaling, Tensor):
            raise ValueError(f"{name} is not self-attention over this step's tokens with a fixed scale")
        window = sliding_window if attention_mask is None else self._masks.window(attention_mask)
        heads = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        self.calls.append(AttentionCall(name, *heads, scaling, window, softcap, s_aux is not None))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


class _Current(threading.local):
    """The run of this thread: transformers' tables of functions are the process's."""

    recorder: _Recorder | None = None
    masks: _Masks | None = None


_current = _Current()
_unchecked = threading.Lock()


def _record(*args: Any, **kwargs: Any) -> Any:
    assert _current.recorder is not None
    return _current.recorder(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    assert _current.masks is not None
    return _current.masks(*args, **kwargs)


def register_probe() -> None:
    """Make PROBED known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBED, _record)
    AttentionMaskInterface.register(PROBED, _mask)


@contextmanager
def _recording(recorder: _Recorder, masks: _Masks) -> Iterator[None]:
    from torch.distributions import Distribution

    _current.recorder, _current.masks = recorder, masks
    with _unchecked:
        checks = Distribution._validate_args
        # Checks of arguments look at their values, of which there are none.
        Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            Distribution.set_default_validate_args(checks)
            _current.recorder = _current.masks = None


def probe(model: nn.Module, longest: int) -> tuple[tuple[AttentionCall, ...], int]:
    """Run a causal language model's base on the meta device; returns its attention calls in their order, and the width
    of its final hidden states. Windows of `longest` tokens or more are none.

    Raises:
        ValueError: what the model does cannot be done over a paged cache, with the reason.
    """
    masks = _Masks(longest)
    recorder = _Recorder({module: name for name, module in model.named_modules()}, masks)
    with torch.device("meta"), torch.no_grad(), _recording(recorder, masks):
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long)
        # With a mask of tokens transformers does not look into the positions, which have no values here.
        inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.ones_like(ids)}
        output = model(**inputs, use_cache=False)
    hidden = output[0]
    if not recorder.calls:
        raise ValueError("no layer calls transformers' attention interface")
    return tuple(recorder.calls), hidden.shape[-1]
