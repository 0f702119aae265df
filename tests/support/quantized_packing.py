"""Packing of weights as the definitions of formats have it, written for tests: slow, and one number after another."""

from __future__ import annotations

import json
from collections.abc import Callable

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


def awq(weight: Tensor, group_size: int = 128, zero_point: bool = True) -> Stored:
    width = weight.shape[1]
    group_of = np.arange(width) // group_size
    codes, scales, zeros = round_to_groups(weight, group_of, 4, sym=not zero_point)
    tensors = {
        "qweight": torch.from_numpy(_pack_awq(codes)),
        "qzeros": torch.from_numpy(_pack_awq(zeros)),
        "scales": torch.from_numpy(scales),
    }
    if not zero_point:
        del tensors["qzeros"]
    return Stored(tensors, value_of(codes, scales, zeros, group_of))


def _pack_awq(codes: np.ndarray) -> np.ndarray:
    """[R, N] as int32 [R, N / 8]: nibble i of a word is of its output order[i]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint64)
    for place, output in enumerate(order):
        words |= codes[:, output::8].astype(np.uint64) << np.uint64(4 * place)
    return words.astype(np.uint32).view(np.int32)


def squeezellm(weight: Tensor, bits: int = 4, sparse: bool = False, full_rows: int = 0) -> Stored:
    """Values at equal distances from the least to the greatest; outliers are what is beyond two deviations."""
    plain = weight.clone()
    outliers = torch.zeros_like(plain)
    if sparse:
        far = plain.abs() > 2 * plain.std()
        outliers[far], plain[far] = plain[far], 0.0
    steps = torch.linspace(0, 1, 2**bits)
    low, high = plain.amin(1, keepdim=True), plain.amax(1, keepdim=True)
    table = low + (high - low) * steps
    codes = (plain[:, :, None] - table[:, None, :]).abs().argmin(-1)
    tensors = {
        "qweight": torch.from_numpy(pack_words(np.ascontiguousarray(codes.numpy().T), bits)),
        "lookup_table": table,
    }
    value = table.gather(1, codes)
    if sparse:
        value = value + outliers
        if full_rows:
            which = outliers.count_nonzero(1).topk(full_rows).indices.sort().values
            tensors["full_rows"] = outliers[which].T.contiguous()
            tensors["full_row_indices"] = which.int()
            outliers[which] = 0
        rows, columns = outliers.nonzero(as_tuple=True)
        tensors["rows"] = torch.bincount(rows, minlength=len(outliers)).cumsum(0).int()
        tensors["rows"] = torch.nn.functional.pad(tensors["rows"], (1, 0))
        tensors["cols"], tensors["vals"] = columns.int(), outliers[rows, columns]
    return Stored(tensors, value)


def fp8(
    weight: Tensor, block: tuple[int, int] | None = None, static: bool = False, name: str = "weight_scale"
) -> Stored:
    rows, width = weight.shape
    height, columns = block or (rows, width)
    value, codes = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // height), -(-width // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = (slice(i * height, (i + 1) * height), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[own].abs().max() / 448
            codes[own] = (weight[own] / scales[i, j]).to(torch.float8_e4m3fn)
            value[own] = codes[own].float() * scales[i, j]
    tensors = {"weight": codes}
    tensors |= {"weight_scale_inv": scales} if block else {name: scales.reshape(())}
    if static:
        tensors["input_scale"] = torch.tensor(0.02)
    return Stored(tensors, value)


NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0]
)  # fmt: skip
FP4 = torch.tensor(
    [0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25, 0, -0.0052, -0.6667, -1, -0.3333, -0.5, -0.1667, -0.25]
)


def fp8_by_row(weight: Tensor) -> Stored:
    """As FBGEMM: a scale for each output, and a bound of those for activations."""
    stored = float_quantized(weight)
    return Stored(stored.tensors | {"input_scale_ub": torch.tensor([1200.0])}, stored.value)


def bitsandbytes_4bit(weight: Tensor, kind: str = "nf4", block: int = 64, nested: bool = True) -> Stored:
    table = NF4 if kind == "nf4" else FP4
    flat = weight.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": table}
    if nested:
        offset = float(absmax.mean())
        size = 256
        parts = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % size)).view(-1, size)
        greatest = parts.abs().amax(1)
        values = torch.linspace(-1, 1, 256)
        codes = (parts / greatest[:, None])[:, :, None].sub(values).abs().argmin(-1).to(torch.uint8)
        absmax = (values[codes.long()] * greatest[:, None]).flatten()[: len(absmax)] + offset
        tensors["weight.absmax"] = codes.flatten()[: len(absmax)]
        tensors |= {"weight.nested_absmax": greatest, "weight.nested_quant_map": values}
        state |= {"nested_blocksize": size, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        tensors["weight.absmax"] = absmax
    codes = (blocks / absmax[:, None])[:, :, None].sub(table).abs().argmin(-1).to(torch.uint8).flatten()[: len(flat)]
    tensors["weight"] = ((codes[0::2] << 4) | codes[1::2])[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return Stored(tensors, (table[codes.long()] * absmax.repeat_interleave(block)[: len(flat)]).view(weight.shape))


def bitsandbytes_8bit(weight: Tensor) -> Stored:
    greatest = weight.abs().amax(1)
    codes = (weight / greatest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": greatest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Stored(tensors, codes * (greatest / 127)[:, None])


def pack_quantized(
    weight: Tensor, bits: int = 4, group_size: int | None = 32, sym: bool = True, order: np.ndarray | None = None
) -> Stored:
    """compressed-tensors' format of that name; `group_size` None: a scale for each output; `order`: weight_g_idx."""
    width = weight.shape[1]
    group_of = np.arange(width) // (group_size or width) if order is None else order
    codes, scales, zeros = round_to_groups(weight, group_of, bits, sym)
    rows = np.ascontiguousarray(_pack_filled(codes, bits).T)
    tensors = {
        "weight_packed": torch.from_numpy(rows),
        "weight_scale": torch.from_numpy(np.ascontiguousarray(scales.T)),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = torch.from_numpy(_pack_filled(zeros.T, bits))
    if order is not None:
        tensors["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
    return Stored(tensors, value_of(codes, scales, zeros, group_of))


def _pack_filled(codes: np.ndarray, bits: int) -> np.ndarray:
    """pack_words, where the last word of a column may be filled up."""
    whole = np.pad(codes, ((0, -codes.shape[0] % 32), (0, 0)))
    return pack_words(whole, bits)[: -(-codes.shape[0] * bits // 32)]


def int_quantized(weight: Tensor, per: str = "channel", sym: bool = True) -> Stored:
    plain = weight if per == "channel" else weight.reshape(1, -1)
    if sym:
        scale, zero = plain.abs().amax(1, keepdim=True) / 127.5, torch.zeros(len(plain), 1)
    else:
        low, high = plain.amin(1, keepdim=True).clamp(max=0), plain.amax(1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255
        zero = (-128 - low / scale).round()
    codes = (plain / scale + zero).round().clamp(-128, 127)
    tensors = {"weight": codes.to(torch.int8).view(weight.shape), "weight_scale": scale}
    if not sym:
        tensors["weight_zero_point"] = zero.to(torch.int8)
    return Stored(tensors, ((codes - zero) * scale).view(weight.shape))


def float_quantized(weight: Tensor, per: str = "channel") -> Stored:
    plain = weight if per == "channel" else weight.reshape(1, -1)
    scale = plain.abs().amax(1, keepdim=True) / 448
    codes = (plain / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes.view(weight.shape), "weight_scale": scale if per == "channel" else scale.view(1)}
    return Stored(tensors, (codes.float() * scale).view(weight.shape))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _pack_e2m1(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] as uint8 [R, K / 2] of the nearest codes, and their values."""
    codes = (scaled[:, :, None] - E2M1).abs().argmin(-1)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8), E2M1[codes]


def nvfp4(weight: Tensor) -> Stored:
    whole = 448 * 6 / weight.abs().max()
    groups = weight.view(len(weight), -1, 16)
    scales = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    exact = (scales.float() / whole).repeat_interleave(16, 1)
    packed, values = _pack_e2m1(weight / exact)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole.view(1)}
    return Stored(tensors, values * exact)


def modelopt_nvfp4(weight: Tensor) -> Stored:
    stored = nvfp4(weight)
    own = stored.tensors
    tensors = {"weight": own["weight_packed"], "weight_scale": own["weight_scale"]}
    tensors |= {"weight_scale_2": 1 / own["weight_global_scale"].view(()), "input_scale": torch.tensor(0.01)}
    return Stored(tensors, stored.value)


def modelopt_int4(weight: Tensor, two_stages: bool = False) -> Stored:
    """Signed codes of 4 bits, of two rows a byte."""
    groups = weight.view(len(weight), -1, 32)
    scales = groups.abs().amax(-1) / 7
    codes = (groups / scales[:, :, None]).round().clamp(-8, 7).view(weight.shape)
    halves = codes.to(torch.int64) & 15
    tensors = {"weight": (halves[0::2] | (halves[1::2] << 4)).to(torch.uint8), "weight_scale": scales}
    if two_stages:
        tensors |= {"weight_scale_2": torch.tensor(0.001), "input_scale": torch.tensor(0.01)}
    return Stored(tensors, codes * scales.repeat_interleave(32, 1))


def modelopt_int8(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round()
    return Stored({"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales[:, None])


def with_input_scale(pack: Callable[[Tensor], Stored], weight: Tensor) -> Stored:
    """Smoothed: inputs are multiplied by what the weight's columns were divided by."""
    scale = torch.linspace(0.5, 2.0, weight.shape[1])
    stored = pack(weight / scale)
    return Stored(stored.tensors | {"pre_quant_scale": scale}, stored.value * scale)


def modelopt_blocks(weight: Tensor) -> Stored:
    stored = fp8(weight, block=(128, 128))
    scales = stored.tensors["weight_scale_inv"][:, None, :, None]
    return Stored({"weight": stored.tensors["weight"], "weight_scale": scales}, stored.value)


def torchao(weight: Tensor, sym: bool = True, group_size: int = 32) -> Stored:
    """Int8Tensor and IntxUnpackedToInt8Tensor: numbers of a byte each."""
    codes, scales, zeros = round_to_groups(weight, np.arange(weight.shape[1]) // group_size, 4, sym)
    value = value_of(codes, scales, zeros, np.arange(weight.shape[1]) // group_size)
    parts = {"qdata": codes - 8, "scale": scales, "zero_point": zeros - 8}
    kinds = {"qdata": np.int8, "scale": np.float32, "zero_point": np.int8}
    tensors = {
        f"_weight_{name}": torch.from_numpy(np.ascontiguousarray(part.T.astype(kinds[name])))
        for name, part in parts.items()
    }
    return Stored(tensors, value)


def torchao_float8(weight: Tensor) -> Stored:
    stored = float_quantized(weight)
    tensors = {"_weight_qdata": stored.tensors["weight"], "_weight_scale": stored.tensors["weight_scale"]}
    return Stored(tensors, stored.value)


def mxfp4(weight: Tensor) -> Stored:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    exact = (2.0**exponents).repeat_interleave(32, 1)
    packed, values = _pack_e2m1(weight / exact)
    return Stored({"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, values * exact)


def mxfp8(weight: Tensor) -> Stored:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(-1).log2().floor() - 8).clamp(-127, 127)
    exact = (2.0**exponents).repeat_interleave(32, 1)
    codes = (weight / exact).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Stored({"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, codes.float() * exact)


def mxfp4_experts(weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """gpt-oss's experts [E, K, N]: tensors by the ends of their names, and the values, of the same shape."""
    stored = [mxfp4(weight.T.contiguous()) for weight in weights]
    blocks = torch.stack([each.tensors["weight_packed"].unflatten(1, (-1, 16)) for each in stored])
    scales = torch.stack([each.tensors["weight_scale"] for each in stored])
    return {"_blocks": blocks, "_scales": scales}, torch.stack([each.value.T for each in stored]).contiguous()
