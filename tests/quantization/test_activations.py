"""Formats that round activations: transformers' model with the rounding written out gives the same readings."""

from __future__ import annotations

import pytest
import quantized_packing as packing
import torch
from quantized_models import assert_reads, generate, make_llm, make_quantized
from thread_ranks import ThreadRanks
from torch import Tensor

from vllm.ops import fp8_linear
from vllm.ops._dispatch import force
from vllm.quantization.compressed_schemes import parse_activations

DYNAMIC = {"dynamic": True, "strategy": "token", "symmetric": True}
STATIC_SCALE, ZERO = 0.03, -7


def tokens_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def tokens_int8_asym(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


def static_int8(x: Tensor) -> Tensor:
    return ((x / STATIC_SCALE + ZERO).round().clamp(-128, 127) - ZERO) * STATIC_SCALE


def tokens_fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def groups_fp8(x: Tensor) -> Tensor:
    return tokens_fp8(x.unflatten(-1, (-1, 64))).flatten(-2)


def static_fp8(x: Tensor) -> Tensor:
    return (x / STATIC_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * STATIC_SCALE


def groups_fp4(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6 / STATIC_SCALE).to(torch.float8_e4m3fn).float() * STATIC_SCALE
    # Half-way values do not occur.
    codes = ((groups / scale)[..., None] - packing.E2M1).abs().argmin(-1)
    return (packing.E2M1[codes] * scale).flatten(-2)


ROWS = {
    "int8-dynamic": ({"num_bits": 8, "type": "int", **DYNAMIC}, tokens_int8, {}),
    "int8-dynamic-asym": ({"num_bits": 8, "type": "int", **DYNAMIC, "symmetric": False}, tokens_int8_asym, {}),
    "int8-static": (
        {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False},
        static_int8,
        {"input_scale": torch.tensor([STATIC_SCALE]), "input_zero_point": torch.tensor([ZERO], dtype=torch.int8)},
    ),
    "fp8-dynamic": ({"num_bits": 8, "type": "float", **DYNAMIC}, tokens_fp8, {}),
    "fp8-groups": (
        {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 64},
        groups_fp8,
        {},
    ),
    "fp8-static": (
        {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        static_fp8,
        {"input_scale": torch.tensor([STATIC_SCALE])},
    ),
    "fp4": (
        {"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group", "group_size": 16},
        groups_fp4,
        {"input_global_scale": torch.tensor([1 / STATIC_SCALE])},
    ),
}


@pytest.fixture
def rounded(monkeypatch):
    """Engines that round activations."""
    monkeypatch.setenv("VLLM_QUANTIZED_ACTIVATIONS", "1")


def make(name: str, folder, rounds: bool = True):
    inputs, rounding, more = ROWS[name]
    if name == "fp4":
        pack, settings = packing.nvfp4, {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        form = "nvfp4-pack-quantized"
    elif name.startswith("int8"):
        pack, settings, form = (
            packing.int_quantized,
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            "int-quantized",
        )
    else:
        pack, settings = packing.float_quantized, {"num_bits": 8, "type": "float", "strategy": "channel"}
        form = "float-quantized"
    group = {"targets": ["Linear"], "weights": settings, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"all": group},
        "ignore": ["lm_head"],
    }

    def stored(module: str, weight: Tensor):
        if "proj" not in module:
            return None
        own = pack(weight)
        own.tensors.update(more)
        return own

    quantized = make_quantized(folder, stored, config)
    for module in quantized.names if rounds else ():
        quantized.model.get_submodule(module).register_forward_pre_hook(lambda _, args: (rounding(args[0]),))
    return quantized


@pytest.mark.parametrize("name", ROWS)
def test_activations_are_rounded_as_the_format_says(name, tmp_path, rounded):
    quantized = make(name, tmp_path)
    model = make_llm(tmp_path).llm_engine.engine_core.executor.worker.model_runner.model
    layer, x = model.model.layers[0].mlp.down_proj, values(256)
    # The same values in, so that none is rounded otherwise: in a whole model, sums in another order move the greatest
    # value of a token, which is half-way between two codes, to either.
    torch.testing.assert_close(layer(x), quantized.model.model.layers[0].mlp.down_proj(x), rtol=1e-4, atol=1e-4)
    plain = x @ quantized.model.model.layers[0].mlp.down_proj.weight.T
    assert (layer(x) - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-static"])
def test_devices_that_multiply_fp8_take_the_codes(name, tmp_path, rounded, monkeypatch):
    """A CPU without our kernels stands in for one."""
    quantized = make(name, tmp_path)
    taken = []
    monkeypatch.setattr(fp8_linear, "_multiplies_fp8", lambda device: True)
    multiply = fp8_linear._scaled_mm
    monkeypatch.setattr(fp8_linear, "_scaled_mm", lambda *args: taken.append(args[0].dtype) or multiply(*args))
    with force("reference"):
        model = make_llm(tmp_path).llm_engine.engine_core.executor.worker.model_runner.model
        layer, x = model.model.layers[0].mlp.down_proj, values(256)
        got = layer(x)
    assert torch.float8_e4m3fn in taken
    torch.testing.assert_close(got, quantized.model.model.layers[0].mlp.down_proj(x), rtol=1e-4, atol=1e-4)


def values(width: int) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ROWS)
def test_activations_keep_the_models_dtype_otherwise(name, tmp_path):
    quantized = make(name, tmp_path, rounds=False)
    assert_reads(generate(make_llm(quantized.folder)), quantized.model)


@pytest.mark.parametrize("name", ROWS)
def test_rounding_is_the_definition(name):
    inputs, rounding, more = ROWS[name]
    own, is_static = parse_activations(inputs)
    if is_static:
        own = own.with_scale(float(more["input_scale"]), float(more.get("input_zero_point", 0)))
    elif more:
        own = own.with_global_scale(float(more["input_global_scale"]))
    x = values(128)
    x[1], x[2, 64:] = 0, 0
    expected = rounding(x).nan_to_num(0)
    # A product with the scale in another order of factors.
    torch.testing.assert_close(own(x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(own(x[3:4]), own(x)[3:4])


@pytest.mark.parametrize("name", ["int8-dynamic", "int8-dynamic-asym", "fp8-dynamic", "fp8-groups"])
def test_ranks_round_with_the_range_of_the_whole_token(name):
    own, _ = parse_activations(ROWS[name][0])
    x = values(128)
    ranks = ThreadRanks(2)
    try:
        parts = ranks.run(lambda rank: own.over(ranks.groups[rank])(x.chunk(2, dim=1)[rank]))
    finally:
        ranks.close()
    assert torch.equal(torch.cat(parts, dim=1), own(x))


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"num_bits": 4, "type": "int", "dynamic": True, "strategy": "token"}, "input_activations must be 8-bit"),
        ({"num_bits": 4, "type": "float", "dynamic": True, "strategy": "group", "group_size": 32}, "input_activations"),
    ],
)
def test_other_roundings_are_refused(inputs, problem):
    with pytest.raises(ValueError, match=problem):
        parse_activations(inputs)
