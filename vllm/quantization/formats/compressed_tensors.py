"""Checkpoints of the compressed-tensors library, as LLM Compressor writes them.

Of a module with weight [N, K], `weight_scale` is [1], [N, 1], [N, K / g] or one for each block, and there are
- pack-quantized: weight_packed, int32 [N, words of a row's codes, low bits first], the codes 2 ** (b - 1) more than the
  numbers they are; weight_shape; weight_zero_point, packed down its columns, where it is not symmetric; weight_g_idx,
  int32 [K], the group of each input, where these were reordered;
- int-quantized: weight, int8 [N, K], and weight_zero_point, int8, where it is not symmetric;
- float-quantized: weight, float8_e4m3fn [N, K];
- nvfp4-pack-quantized: weight_packed, uint8 [N, K / 2], two E2M1 codes a byte, the first in the low half; a float8
  scale for each 16 inputs, divided by weight_global_scale;
- mxfp4-pack-quantized: the same with a power of two (E8M0, uint8) for each 32 inputs, and no global scale;
- mxfp8-quantized: weight, float8_e4m3fn [N, K], with such powers of two.
"naive-quantized" is one of the second and third. Activations are rounded as `input_activations` says only with
VLLM_QUANTIZED_ACTIVATIONS=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm import envs
from vllm.logger import init_logger, warn_once
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.bits import fp4_values, unpack_nibbles, unpack_rows, unsigned_bytes
from vllm.quantization.compressed_schemes import Scheme, parse_schemes
from vllm.quantization.groups import as_zero_points, group_reason, sort_groups
from vllm.quantization.scales import MX_GROUP, block_scales, powers_of_two, row_scales
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

logger = init_logger(__name__)

_NVFP4_GROUP = 16


class CompressedTensorsConfig(StoredConfig):
    """See the module."""

    name = "compressed-tensors"
    settings = """
        config_groups format ignore quantization_status global_compression_ratio kv_cache_scheme sparsity_config
        version
    """
    names = (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
        "input_scale", "input_zero_point", "input_global_scale",
    )  # fmt: skip
    shared_names = ("weight",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._rounds = envs.quantized_activations()
        self._schemes = parse_schemes(config, self._rounds)
        groups = config.get("config_groups") or {}
        # At most the KV cache is quantised.
        self.may_be_plain = not groups
        if not self._rounds and any(group.get("input_activations") for group in groups.values()):
            warn_once(
                logger,
                "the checkpoint's input_activations are not applied: activations keep the model's dtype, which is more "
                "exact (VLLM_QUANTIZED_ACTIVATIONS=1 rounds them)",
            )

    @staticmethod
    def wrote(settings: dict[str, Any]) -> bool:
        return "config_groups" in settings and "quant_algo" not in settings

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        scheme = self._schemes.of(module)
        if scheme is None:
            raise ValueError("quantization_config ignores it or has no group for it, but it is quantised")

        def read(tensors: StoredTensors) -> QuantizedWeight:
            tensor = _READERS[scheme.format](tensors, scheme)
            return QuantizedWeight(tensor, f"{module}.{codes}", scheme.inputs(tensors))

        codes = "weight_packed" if scheme.format.endswith("pack-quantized") else "weight"
        required = [codes, "weight_scale", *scheme.input_names]
        if scheme.format == "pack-quantized":
            required.append("weight_shape")
        if scheme.format == "nvfp4-pack-quantized":
            required.append("weight_global_scale")
        if not scheme.symmetric:
            required.append("weight_zero_point")
        if scheme.format == "pack-quantized" and scheme.reorders and scheme.group_size is not None:
            required.append("weight_g_idx")
        # Zero points of symmetric weights are 0; scales for activations may be unused.
        unused = ("weight_zero_point", "weight_g_idx", "weight_shape", "input_scale", "input_zero_point")
        optional = tuple(name for name in (*unused, "input_global_scale") if name not in required)
        return WeightFormat(tuple(required), optional, read)


def _read_packed(stored: StoredTensors, scheme: Scheme) -> QuantizedTensor:
    words = stored.take("weight_packed", torch.int32, None, None)
    shape = stored.take("weight_shape", (torch.int64, torch.int32), 2).tolist()
    rows, width = words.shape[0], int(shape[1])
    if shape[0] != rows:
        raise stored.error("weight_shape", f"is {shape}, expected {rows} rows, those of weight_packed")
    bits = scheme.bits
    middle = 1 << (bits - 1)
    try:
        codes = unpack_rows(words, bits, width)
    except ValueError as error:
        raise stored.error("weight_packed", str(error)) from None
    scales, size = _scales(stored, scheme, (rows, width))
    zeros: int | Tensor = middle
    if not scheme.symmetric:
        zeros = _packed_zeros(stored, bits, rows, scales.shape[1])
    order = None
    group_of = None
    if "weight_g_idx" in stored and scheme.reorders:
        group_of = stored.take("weight_g_idx", torch.int32, width)
    # The library sets all to -1 before a calibration, which alone reorders them.
    if group_of is not None and not (group_of == -1).all():
        if not 0 <= int(group_of.min()) <= int(group_of.max()) < scales.shape[1]:
            raise stored.error("weight_g_idx", f"has values outside of [0, {scales.shape[1]}), the groups of scales")
        order, size, used = sort_groups(group_of, size, scales.shape[1])
        if order is not None:
            codes = codes[:, order]
        if used is not None:
            scales = scales[:, used]
            zeros = zeros[:, used] if isinstance(zeros, Tensor) else zeros
    return QuantizedTensor(codes, bits, scales.contiguous(), size, zeros, input_order=order)


def _packed_zeros(stored: StoredTensors, bits: int, rows: int, groups: int) -> int | Tensor:
    if stored.tensors["weight_zero_point"].dtype == torch.int8:
        # Early versions of the library did not pack them.
        own = stored.take("weight_zero_point", torch.int8, rows, groups)
        codes = own.int() + (1 << (bits - 1))
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << bits:
            raise stored.error("weight_zero_point", f"has values outside of those of {bits} bits")
        return as_zero_points(codes.to(torch.uint8))
    packed = stored.take("weight_zero_point", torch.int32, None, groups)
    try:
        return as_zero_points(unpack_rows(packed.t(), bits, rows).t())
    except ValueError as error:
        raise stored.error("weight_zero_point", str(error)) from None


def _read_ints(stored: StoredTensors, scheme: Scheme) -> QuantizedTensor:
    weight = stored.take("weight", torch.int8, None, None)
    rows, width = weight.shape
    scales, size = _scales(stored, scheme, (rows, width))
    zeros: int | Tensor = 128
    if not scheme.symmetric:
        plain = stored.tensors["weight_zero_point"]
        own = stored.take("weight_zero_point", torch.int8, *plain.shape)
        if own.numel() != stored.tensors["weight_scale"].numel():
            raise stored.error("weight_zero_point", f"has shape {tuple(plain.shape)}, expected that of weight_scale")
        zeros = as_zero_points(unsigned_bytes(own).reshape(-1, scales.shape[1]).expand(rows, scales.shape[1]))
    return QuantizedTensor(unsigned_bytes(weight), 8, scales, size, zeros)


def _read_floats(stored: StoredTensors, scheme: Scheme) -> QuantizedTensor:
    weight = stored.take("weight", torch.float8_e4m3fn, None, None)
    scales, size = _scales(stored, scheme, (weight.shape[0], weight.shape[1]))
    return QuantizedTensor(weight, 8, scales, size)


def _read_nvfp4(stored: StoredTensors, scheme: Scheme) -> QuantizedTensor:
    data = stored.take("weight_packed", torch.uint8, None, None)
    rows, width = data.shape[0], 2 * data.shape[1]
    scales = stored.take("weight_scale", torch.float8_e4m3fn, rows, width // _NVFP4_GROUP)
    whole = 1 / stored.scalar("weight_global_scale")
    return QuantizedTensor(
        unpack_nibbles(data), 4, scales, _NVFP4_GROUP, values=fp4_values(), super_scales=whole.expand(rows, 1)
    )


def _read_mxfp4(stored: StoredTensors, scheme: Scheme) -> QuantizedTensor:
    data = stored.take("weight_packed", torch.uint8, None, None)
    scales = powers_of_two(stored, data.shape[0], 2 * data.shape[1])
    return QuantizedTensor(unpack_nibbles(data), 4, scales, MX_GROUP, values=fp4_values())


def _read_mxfp8(stored: StoredTensors, scheme: Scheme) -> QuantizedTensor:
    weight = stored.take("weight", torch.float8_e4m3fn, None, None)
    return QuantizedTensor(weight, 8, powers_of_two(stored, *weight.shape), MX_GROUP)


_READERS: dict[str, Callable[[StoredTensors, Scheme], QuantizedTensor]] = {
    "pack-quantized": _read_packed,
    "int-quantized": _read_ints,
    "float-quantized": _read_floats,
    "nvfp4-pack-quantized": _read_nvfp4,
    "mxfp4-pack-quantized": _read_mxfp4,
    "mxfp8-quantized": _read_mxfp8,
}


def _scales(stored: StoredTensors, scheme: Scheme, shape: tuple[int, int]) -> tuple[Tensor, int]:
    """[N, G], and the columns of a group."""
    rows, width = shape
    if scheme.block is not None:
        return block_scales(stored, "weight_scale", shape, scheme.block)
    if scheme.group_size is None:
        return row_scales(stored, "weight_scale", rows), width
    if width % scheme.group_size:
        raise stored.error("weight_scale", f"cannot fit: group_size={scheme.group_size} does not divide {width} inputs")
    why = group_reason(scheme.group_size)
    return stored.take("weight_scale", FLOATS, rows, width // scheme.group_size, reason=why), scheme.group_size
