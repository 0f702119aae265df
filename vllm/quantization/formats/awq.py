"""AWQ checkpoints, as AutoAWQ writes them (its layout "gemm").

A module with weight [N, K] in groups of g inputs has, each word with 8 outputs in the order 0, 2, 4, 6, 1, 3, 5, 7,
- qweight: int32 [K, N / 8], the codes;
- qzeros: int32 [K / g, N / 8], the code that means 0; without zero_point it is 8 everywhere;
- scales: [K / g, N].
W[n, k] = scale * (code - zero).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.bits import unpack
from vllm.quantization.groups import as_zero_points, check_group_size, group_reason, num_groups
from vllm.quantization.setting_values import read_flag, read_one
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_BITS, _PER_WORD = 4, 8
# The place in a word of the outputs 0 to 7.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_MIDDLE = 8
# Others name kernels for this layout.
_VERSIONS = ("gemm", "exllama", "ipex")


class AWQConfig(StoredConfig):
    """See the module."""

    name = "awq"
    files = ("quantize_config.json", "quant_config.json")
    settings = """
        bits w_bit group_size q_group_size zero_point version format checkpoint_format modules_to_not_convert backend
        do_fuse modules_to_fuse fuse_max_seq_len exllama_config desc_act sym lm_head pack_dtype meta
    """
    names = ("qweight", "qzeros", "scales")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        bits = read_one(config, ("bits", "w_bit"), _BITS)
        if bits != _BITS:
            raise ValueError(f"bits must be {_BITS}, got {bits!r}")
        for name in ("version", "checkpoint_format", "format"):
            version = str(config.get(name) or "gemm").lower()
            if version not in _VERSIONS:
                raise ValueError(f"{name} must be gemm, got {version!r}: quantise the model with version='GEMM'")
        self._group_size = check_group_size(read_one(config, ("group_size", "q_group_size"), 128))
        self._has_zeros = read_flag(config, "zero_point", True)

    @staticmethod
    def wrote(settings: dict[str, Any]) -> bool:
        return "zero_point" in settings or "w_bit" in settings

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        required = ("qweight", "scales")
        if self._has_zeros:
            return WeightFormat((*required, "qzeros"), (), self._read)
        return WeightFormat(required, ("qzeros",), self._read)

    def _read(self, stored: StoredTensors) -> QuantizedWeight:
        words = stored.take("qweight", torch.int32, None, None)
        width, rows = words.shape[0], words.shape[1] * _PER_WORD
        try:
            groups = num_groups(width, self._group_size)
        except ValueError as error:
            raise stored.error("qweight", f"does not fit quantization_config: {error}") from None
        why = group_reason(self._group_size)
        scales = stored.take("scales", FLOATS, groups, rows, reason=why)
        zeros: Tensor | int = _MIDDLE
        if "qzeros" in stored:
            zeros = _in_order(stored.take("qzeros", torch.int32, groups, rows // _PER_WORD, reason=why))
            if not self._has_zeros and (zeros != _MIDDLE).any() and zeros.any():
                raise stored.error("qzeros", f"has other values than {_MIDDLE}, but zero_point is False")
            zeros = as_zero_points(zeros.t()) if self._has_zeros else _MIDDLE
        tensor = QuantizedTensor(
            codes=_in_order(words).t().contiguous(),
            bits=_BITS,
            scales=scales.t().contiguous(),
            group_size=width // groups,
            zero_points=zeros,
        )
        return QuantizedWeight(tensor, f"{stored.module}.qweight")


def _in_order(words: Tensor) -> Tensor:
    """int32 [R, N / 8] as uint8 [R, N]."""
    codes = unpack(words, _BITS).unflatten(-1, (-1, _PER_WORD))
    return codes[..., torch.tensor(_PLACES)].flatten(-2)
