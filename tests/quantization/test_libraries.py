"""Where the formats' own libraries are installed, what they pack is read as what they unpack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm.quantization import get_quantization_config
from vllm.quantization.stored import read_quantized


def value(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """The value of one module's tensors."""
    named = [(f"model.q_proj.{name}", tensor) for name, tensor in tensors.items()]
    config = get_quantization_config(settings["quant_method"]).from_config(settings)
    ((_, read),) = read_quantized(named, {name: "file" for name, _ in named}, config)
    return read.tensor.dequantize()


def weight(rows: int = 64, width: int = 256) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3))


SCHEMES = {
    "pack-quantized": [
        {"num_bits": bits, "type": "int", "symmetric": sym, **strategy}
        for bits in (2, 3, 4, 5, 6, 8)
        for sym in (True, False)
        for strategy in ({"strategy": "group", "group_size": 64}, {"strategy": "channel"})
    ],
    "int-quantized": [
        {"num_bits": 8, "type": "int", "symmetric": sym, "strategy": strategy}
        for sym in (True, False)
        for strategy in ("channel", "tensor")
    ],
    "float-quantized": [{"num_bits": 8, "type": "float", "strategy": strategy} for strategy in ("channel", "tensor")],
    "nvfp4-pack-quantized": [{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}],
    "mxfp4-pack-quantized": [
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    ],
    "mxfp8-quantized": [
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    ],
}


@pytest.mark.parametrize(("form", "weights"), [(form, each) for form, all_ in SCHEMES.items() for each in all_])
def test_compressed_tensors(form, weights):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    plain = weight()
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    size = weights.get("group_size") or (plain.numel() if weights["strategy"] == "tensor" else plain.shape[1])
    groups = plain.reshape(-1, size)
    state = {"weight": plain}
    whole = None
    if form.startswith("nvfp4"):
        whole = generate_gparam(plain.min(), plain.max())
        state["weight_global_scale"] = whole.reshape(1)
    scale, zero = calculate_qparams(groups.amin(1), groups.amax(1), args, global_scale=whole)
    shape = (1,) if weights["strategy"] == "tensor" else (len(plain), -1)
    state["weight_scale"] = scale.reshape(shape)
    if not args.symmetric:
        state["weight_zero_point"] = zero.reshape(shape).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"all": scheme.model_dump()}}
    ours = value({name: each.contiguous() for name, each in packed.items()}, settings)
    theirs = compressor.decompress(packed, scheme)["weight"]
    # The library de-quantises 4-bit floats in bfloat16.
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-2 if "fp4" in form else 1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("width", [256, 96])
def test_bitsandbytes_4bit(kind, nested, width):
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(weight(64, width), quant_type=kind, compress_statistics=nested, blocksize=64)
    tensors = {"weight": data, **{f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}}
    ours = value(tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    # The library's own product for CPUs is wrong where blocks go over the ends of rows: rows are made that they fill.
    state.shape = torch.Size((64 * width // 64, 64))
    theirs = functional.dequantize_4bit(data, state).view(64, width)
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)


def test_bitsandbytes_8bit():
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, greatest, _ = functional.int8_vectorwise_quant(weight().half())
    tensors = {"weight": codes, "SCB": greatest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    ours = value(tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    torch.testing.assert_close(ours, functional.int8_vectorwise_dequant(codes, greatest), rtol=1e-5, atol=1e-6)
