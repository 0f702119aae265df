"""The Triton backend's noise alone: a kernel around its device function."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from vllm.ops.triton.gumbel_sample import _gumbel


def gumbel_noise(bits: np.ndarray) -> np.ndarray:
    """float32 noise of uint64 [N] holding 32 bits each; N is a power of two."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = torch.from_numpy(bits.astype(np.int64)).to(device)
    out = torch.empty(len(bits), device=device)
    _noise_kernel[(1,)](words, out, N=len(bits))
    return out.cpu().numpy()


@triton.jit
def _noise_kernel(bits_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, _gumbel(tl.load(bits_ptr + at).to(tl.uint32)))
