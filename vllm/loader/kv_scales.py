"""A checkpoint's scales for an 8-bit KV cache.

They are one value a layer: `k_scale` and `v_scale`, or `kv_scale` for both, of the attention module or of its
projections; or the `output_scale` of `k_proj` and `v_proj`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from vllm.layers.attention import Attention

_NAME = re.compile(r"(?:k_proj\.output_|v_proj\.output_|k_|v_|kv_)scale$")
_LAYER = re.compile(r"\.(\d+)\.")


class KVScales:
    """Scales of the KV cache, by attention layer."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, Attention] = {}
        for name, module in model.named_modules():
            number = _LAYER.search(f".{name}.")
            if isinstance(module, Attention) and number:
                self._layers[number[1]] = module
        self._found: dict[tuple[str, str], float] = {}

    def taken_from(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are none.

        Raises:
            ValueError: a scale that is not positive and finite.
        """
        for name, tensor in tensors:
            kind, layer = _NAME.search(name), _LAYER.search(name)
            if kind is None or layer is None or layer[1] not in self._layers or tensor.numel() != 1:
                yield name, tensor
                continue
            value = float(tensor)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive, got {value}")
            for letter in kind[0].partition("_")[0]:
                self._found[layer[1], letter] = value

    def give(self) -> None:
        """Set the layers' scales to what was found."""
        for (number, letter), value in self._found.items():
            setattr(self._layers[number], f"{letter}_scale", value)
