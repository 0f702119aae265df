"""FP8 checkpoints, as AutoFP8, DeepSeek, FBGEMM and transformers write them.

A module with weight [N, K] has
- weight: float8_e4m3fn [N, K];
- weight_scale (or weight_scale_inv, which weights are multiplied by, too): one value, or one for each output; or, in
  blocks of [b, c] values, float [ceil(N / b), ceil(K / c)];
- input_scale or activation_scale, with activation_scheme "static": a scale for activations; FBGEMM's input_scale_ub
  bounds such scales.
Activations are not rounded to 8 bits here, whatever the scheme: as transformers does where it has no FP8 product.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.scales import block_scales, row_scales
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_BLOCK = (128, 128)
_INPUT_NAMES = ("input_scale", "input_scale_ub", "activation_scale")


class Fp8Config(StoredConfig):
    """See the module."""

    name = "fp8"
    settings = """
        activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers scale_fmt dequantize
        is_checkpoint_fp8_serialized kv_cache_scheme weight_per_tensor act_per_tensor activation_scale_ub
    """
    names = ("weight_scale", "weight_scale_inv", *_INPUT_NAMES)
    shared_names = ("weight",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ValueError(f"activation_scheme must be dynamic or static, got {scheme!r}")
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"fmt must be e4m3, got {config['fmt']!r}")
        block = config.get("weight_block_size")
        if block is not None and (
            not isinstance(block, list | tuple)
            or len(block) != 2
            or not all(isinstance(size, int) and size > 0 for size in block)
        ):
            raise ValueError(f"weight_block_size must be two sizes, got {block!r}")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        # Names of scales for blocks of half the height.
        self._halved: set[str] = set()

    def unstacked(
        self, tensors: Iterable[tuple[str, Tensor]], files: Mapping[str, str]
    ) -> tuple[Iterable[tuple[str, Tensor]], Mapping[str, str]]:
        return split_scales(tensors, files, self._halved)

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        scale = "weight_scale_inv" if "weight_scale_inv" in stored else "weight_scale"
        return WeightFormat(("weight", scale), _INPUT_NAMES, partial(self._read, scale=scale))

    def _read(self, stored: StoredTensors, scale: str) -> QuantizedWeight | Tensor:
        plain = stored.tensors["weight"]
        if plain.dtype in FLOATS and plain.dim() == 2 and self._leaves_plain(scale, plain.shape):
            # And writes scales that mean nothing.
            return plain
        codes = stored.take("weight", torch.float8_e4m3fn, None, None)
        rows, width = codes.shape
        scales, group_size = stored.tensors[scale], width
        # Blocks of both names have two dimensions; transformers calls the one scale of a tensor weight_scale_inv, too.
        if self._block is not None or (scale == "weight_scale_inv" and scales.numel() > 1):
            height, columns = self._block or _BLOCK
            if stored.name_of(scale) in self._halved:
                height = max(height // 2, 1)
            scales, group_size = block_scales(stored, scale, (rows, width), (height, columns))
        else:
            scales = row_scales(stored, scale, rows)
        return QuantizedWeight(QuantizedTensor(codes, 8, scales, group_size), f"{stored.module}.weight")

    def _leaves_plain(self, scale: str, shape: tuple[int, ...]) -> bool:
        """Whether transformers leaves a weight as it is, because blocks do not fill it."""
        has_blocks = self._block is not None or scale == "weight_scale_inv"
        return has_blocks and any(size % block for size, block in zip(shape, self._block or _BLOCK, strict=True))


_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)_scale_inv")
_WEIGHT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# The names of the matrices that a stack is of, in order.
_PARTS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}

_Named = tuple[str, Tensor]


def split_scales(
    tensors: Iterable[_Named], files: Mapping[str, str], halved: set[str]
) -> tuple[Iterable[_Named], Mapping[str, str]]:
    """A checkpoint's tensors and their files, with scales of single experts in place of stacks. `halved` takes the
    names of those that are for blocks of half the height. ValueError: a stack is of another number of experts."""
    stacks = {name: match for name in files if (match := _STACK.fullmatch(name))}
    if not stacks:
        return tensors, files
    experts: dict[tuple[str, str], dict[int, str]] = {}
    for match in filter(None, map(_WEIGHT.fullmatch, files)):
        experts.setdefault((match[1], match[3]), {})[int(match[2])] = f"{match[1]}.{match[2]}.{match[3]}"
    targets = {name: _targets(match[1], match[2], experts) for name, match in stacks.items()}
    known = {name: file for name, file in files.items() if name not in stacks}
    known |= {own: files[name] for name, parts in targets.items() for part in parts for own in part}
    return _split(tensors, targets, files, halved), known


def _targets(stem: str, kind: str, experts: dict[tuple[str, str], dict[int, str]]) -> list[list[str]]:
    """By part, the names of the experts' scales."""
    found = [next((experts[stem, name] for name in names if (stem, name) in experts), {}) for names in _PARTS[kind]]
    return [[f"{modules[index]}.weight_scale_inv" for index in sorted(modules)] for modules in found]


def _check(problem: str, tensor: Tensor, parts: list[list[str]]) -> None:
    counts = sorted({len(part) for part in parts})
    if len(counts) > 1:
        raise ValueError(f"{problem}, but its experts have {' and '.join(map(str, counts))} weights of its matrices")
    if tensor.dim() != 3 or len(tensor) != counts[0]:
        raise ValueError(f"{problem}, expected three dimensions, of which the first is the {counts[0]} experts")


def _split(
    tensors: Iterable[_Named], targets: dict[str, list[list[str]]], files: Mapping[str, str], halved: set[str]
) -> Iterator[_Named]:
    for name, tensor in tensors:
        if name not in targets:
            yield name, tensor
            continue
        parts = targets[name]
        _check(f"{files[name]}: {name} has shape {tuple(tensor.shape)}", tensor, parts)
        is_shared = tensor.shape[1] == 1
        if not is_shared and tensor.shape[1] % len(parts):
            tensor = tensor.repeat_interleave(2, 1)
            halved.update(own for part in parts for own in part)
        pieces = [tensor] * len(parts) if is_shared else tensor.chunk(len(parts), dim=1)
        for part, scales in zip(parts, pieces, strict=True):
            yield from zip(part, scales, strict=True)
