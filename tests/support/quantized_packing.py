"""Packing of weights as the definitions of formats have it, written for tests: slow, and one number after another."""

from __future__ import annotations

import numpy as np
import torch
from quantized_models import Stored
from torch import Tensor


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [K, N] as int32 words [K bits / 32, N]: each column a stream of bits, low ones first."""
    rows, columns = codes.shape
    words = np.zeros((rows * bits // 32, columns), dtype=np.uint64)
    for row in range(rows):
        word, shift = divmod(row * bits, 32)
        value = codes[row].astype(np.uint64) << np.uint64(shift)
        words[word] |= value & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            words[word + 1] |= value >> np.uint64(32)
    return words.astype(np.uint32).view(np.int32)


def round_to_groups(
    weight: Tensor, group_of: np.ndarray, bits: int, sym: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [K, N], float16 scales [G, N] and zeros [G, N] of a weight [N, K]."""
    plain = weight.numpy().T.astype(np.float32)
    top = 2**bits - 1
    num_groups = int(group_of.max()) + 1
    codes = np.zeros(plain.shape, dtype=np.int64)
    scales = np.zeros((num_groups, plain.shape[1]), dtype=np.float16)
    zeros = np.zeros((num_groups, plain.shape[1]), dtype=np.int64)
    for group in range(num_groups):
        part = plain[group_of == group]
        if sym:
            scale = 2 * np.abs(part).max(0) / top
            zero = np.full(plain.shape[1], (top + 1) // 2)
        else:
            low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
            scale = (high - low) / top
            zero = None
        scales[group] = scale.astype(np.float16)
        exact = scales[group].astype(np.float32)
        # 0 as a zero cannot be stored less one.
        zeros[group] = zero if sym else np.clip(np.round(-low / exact), 1, top)
        codes[group_of == group] = np.clip(np.round(part / exact) + zeros[group], 0, top)
    return codes, scales, zeros


def value_of(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> Tensor:
    """float32 [N, K] of what round_to_groups gives."""
    values = (codes - zeros[group_of]) * scales[group_of].astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values.T.astype(np.float32)))


def gptq(
    weight: Tensor,
    bits: int = 4,
    group_size: int = 128,
    sym: bool = True,
    order: np.ndarray | None = None,
    version: int = 1,
) -> Stored:
    """`order`: g_idx; None: groups of consecutive inputs. `version`: 1 stores zeros less one, 2 does not."""
    width = weight.shape[1]
    size = width if group_size == -1 else group_size
    group_of = np.arange(width) // size if order is None else order
    codes, scales, zeros = round_to_groups(weight, group_of, bits, sym)
    stored_zeros = zeros - 1 if version == 1 else zeros
    tensors = {
        "qweight": torch.from_numpy(pack_words(codes, bits)),
        "qzeros": torch.from_numpy(np.ascontiguousarray(pack_words(stored_zeros.T, bits).T)),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return Stored(tensors, value_of(codes, scales, zeros, group_of))
