"""Scales of experts in one tensor, beside weights of single experts: how transformers saves FP8 mixtures.

experts.gate_up_proj_scale_inv [E, 2 n, k] has the scales of each expert's gate, then of its up, or [E, 1, 1] one of
both; experts.down_proj_scale_inv [E, n, k] those of its down. Where 2 n is odd, a block goes over the end of the gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

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
