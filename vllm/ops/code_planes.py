"""Codes of a few bits, several in a byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Bits of the planes that codes are cut into, low bits first.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


def split_planes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """uint8 [N, K] to [N, ceil(K b / 8)] for each plane's b bits; code i of a byte has its bits from i b on. Codes of 8
    bits or more are one plane."""
    if bits >= 8:
        return (codes.contiguous(),)
    planes = []
    below = 0
    for width in PLANES[bits]:
        count = 8 // width
        # Codes of one plane have no other bits.
        part = codes if width == bits else (codes >> below) & (2**width - 1)
        if part.shape[1] % count:
            part = torch.nn.functional.pad(part, (0, -part.shape[1] % count))
        part = part.unflatten(1, (-1, count))
        plane = part[:, :, 0].clone()
        for i in range(1, count):
            plane |= part[:, :, i] << (i * width)
        planes.append(plane)
        below += width
    return tuple(planes)


def join_planes(planes: Sequence[Tensor], bits: int, inner: int) -> Tensor:
    """split_planes undone: [N, inner]."""
    if bits >= 8:
        return planes[0]
    codes = torch.zeros(len(planes[0]), inner, dtype=torch.uint8, device=planes[0].device)
    below = 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
        codes |= ((plane[:, :, None] >> shifts) & (2**width - 1)).flatten(1)[:, :inner] << below
        below += width
    return codes
