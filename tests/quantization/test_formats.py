"""Every format of checkpoints: the values that it means, and readings with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_packing as packing
import torch
from quantized_models import Pack, Stored, assert_reads, generate, make_llm, make_quantized
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from vllm.config.quantization import ALIASES, QUANTIZATIONS, REFUSED, STORED, canonical_quantization
from vllm.ops.quantized_linear import pack_quantized
from vllm.quantization import get_quantization_config, stored_formats
from vllm.quantization.stored import read_quantized


@dataclass(frozen=True)
class Row:
    """A way to store a weight, and the settings that say so."""

    pack: Any
    settings: dict[str, Any]
    where: str = "config.json"


def gptq(
    bits: int = 4, group_size: int = 128, sym: bool = True, order: Any = None, version: int = 1, **more: Any
) -> Row:
    """`order`: from a weight's width to its g_idx."""

    def pack(weight: torch.Tensor) -> Stored:
        own = None if order is None else order(weight.shape[1])
        return packing.gptq(weight, bits, group_size, sym, own, version)

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": order is not None,
    }
    return Row(pack, settings | more)


def shuffled(width: int) -> np.ndarray:
    """Groups of 32 inputs anywhere."""
    return np.random.default_rng(width).permutation(np.arange(width) // 32)


def uneven(width: int) -> np.ndarray:
    """Groups of different sizes."""
    order = np.random.default_rng(width).integers(0, width // 32, width)
    order[: width // 32] = np.arange(width // 32)
    return order


def compressed(pack: Any, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> Row:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return Row(pack, settings | more)


def packed(bits: int = 4, group_size: int | None = 32, sym: bool = True, order: Any = None) -> Row:
    def pack(weight: torch.Tensor) -> Stored:
        own = None if order is None else order(weight.shape[1])
        return packing.pack_quantized(weight, bits, group_size, sym, own)

    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "group_size": group_size}
    weights["strategy"] = "channel" if group_size is None else "group"
    weights["actorder"] = None if order is None else "group"
    return compressed(pack, weights, format="pack-quantized")


def with_plain_zeros(bits: int) -> Row:
    """As early versions of compressed-tensors stored zero points: int8, from the middle of the codes."""
    row = packed(bits, sym=False)

    def pack(weight: torch.Tensor) -> Stored:
        stored = row.pack(weight)
        words = stored.tensors["weight_zero_point"]
        codes = (words[:, None] >> (torch.arange(32 // bits) * bits)[None, :, None]) & (2**bits - 1)
        zeros = codes.flatten(0, 1)[: len(weight)] - 2 ** (bits - 1)
        return Stored(stored.tensors | {"weight_zero_point": zeros.to(torch.int8)}, stored.value)

    return Row(pack, row.settings)


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def float8_blocks(weight: torch.Tensor) -> Stored:
    stored = packing.fp8(weight, block=(64, 32))
    stored.tensors["weight_scale"] = stored.tensors.pop("weight_scale_inv")
    return stored


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """The content of Model Optimizer's own file."""
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **more}
    return {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": settings}


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data, "_version": 2}}}


def auto_round(data_type: str, bits: int) -> dict[str, Any]:
    """Settings of weights that are stored as compressed-tensors has them."""
    settings = {"bits": bits, "data_type": data_type, "act_bits": 16, "extra_config": {"lm_head": {"bits": 16}}}
    return {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", **settings}


ROWS = {
    **{f"gptq-{bits}": gptq(bits, 32) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}-asym": gptq(bits, 64, sym=False) for bits in (2, 3, 4, 8)},
    "gptq-128": gptq(),
    "gptq-rows": gptq(group_size=-1, sym=False),
    "gptq-shorter-last-group": gptq(group_size=96, sym=False),
    "gptq-v2": gptq(group_size=32, sym=False, version=2, checkpoint_format="gptq_v2"),
    "gptq-desc-act": gptq(group_size=32, order=shuffled),
    "gptq-desc-act-uneven": gptq(group_size=32, sym=False, order=uneven),
    **{
        f"awq-{size}": Row(
            partial(packing.awq, group_size=size),
            {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"},
        )
        for size in (32, 64, 128)
    },
    "awq-no-zeros": Row(
        partial(packing.awq, group_size=64, zero_point=False),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
    ),
    "awq-own-file": Row(
        packing.awq, {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "quant_config.json"
    ),
    "auto-round": Row(
        partial(packing.gptq, group_size=64),
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 64,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"lm_head": {"bits": 16}},
        },
    ),
    "auto-round-plain": Row(
        partial(packing.gptq, group_size=64, sym=False, version=2),
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:exllamav2"},
    ),
    "auto-round-early": Row(
        partial(packing.gptq, group_size=64, sym=False, version=2),
        {"quant_method": "intel/auto-round", "bits": 4, "group_size": 64, "backend": "autoround:exllamav2"},
    ),
    "auto-round-awq": Row(
        partial(packing.awq, group_size=64),
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 64,
            "sym": False,
            "packing_format": "auto_round:auto_awq",
        },
    ),
    **{
        f"auto-round-awq-{key}-{name}": Row(
            partial(packing.awq, group_size=64), {"quant_method": "auto-round", "bits": 4, "group_size": 64, key: name}
        )
        for key, name in (
            ("backend", "auto_round:awq"),
            ("backend", "auto_round:auto_awq:gemm"),
            ("packing_format", "auto_round:awq:gemm"),
            ("packing_format", "auto_awq:gemm"),
        )
    },
    "squeezellm": Row(packing.squeezellm, {"quant_method": "squeezellm", "wbits": 4}),
    "squeezellm-3": Row(partial(packing.squeezellm, bits=3), {"wbits": 3}, "quant_config.json"),
    "squeezellm-sparse": Row(partial(packing.squeezellm, sparse=True), {"quant_method": "squeezellm", "wbits": 4}),
    "squeezellm-full-rows": Row(
        partial(packing.squeezellm, sparse=True, full_rows=3), {"quant_method": "squeezellm", "wbits": 4}
    ),
    "packed-4": packed(),
    "packed-4-asym": packed(sym=False, group_size=128),
    "packed-4-channel": packed(group_size=None),
    "packed-3": packed(3),
    "packed-8": packed(8, group_size=None),
    "packed-8-asym": packed(8, sym=False),
    "packed-4-plain-zeros": with_plain_zeros(4),
    "packed-8-plain-zeros": with_plain_zeros(8),
    "packed-actorder": packed(order=shuffled),
    "int8": compressed(packing.int_quantized, INT8, format="int-quantized"),
    "int8-asym": compressed(
        partial(packing.int_quantized, sym=False), INT8 | {"symmetric": False}, format="int-quantized"
    ),
    "int8-tensor": compressed(
        partial(packing.int_quantized, per="tensor"), INT8 | {"strategy": "tensor"}, format="naive-quantized"
    ),
    "float8": compressed(packing.float_quantized, FLOAT8, format="float-quantized"),
    "float8-tensor": compressed(
        partial(packing.float_quantized, per="tensor"), FLOAT8 | {"strategy": "tensor"}, format="float-quantized"
    ),
    "float8-block": compressed(
        float8_blocks, FLOAT8 | {"strategy": "block", "block_structure": "64x32"}, format="float-quantized"
    ),
    "nvfp4": compressed(
        packing.nvfp4, FLOAT4 | {"strategy": "tensor_group", "group_size": 16}, format="nvfp4-pack-quantized"
    ),
    "mxfp4": compressed(packing.mxfp4, FLOAT4 | MX, FLOAT4 | MX | {"dynamic": True}, format="mxfp4-pack-quantized"),
    "mxfp8": compressed(packing.mxfp8, FLOAT8 | MX, FLOAT8 | MX | {"dynamic": True}, format="mxfp8-quantized"),
    "fp8": Row(packing.fp8, FP8),
    "fp8-static": Row(partial(packing.fp8, static=True), FP8 | {"activation_scheme": "static"}),
    "fp8-block": Row(partial(packing.fp8, block=(128, 128)), FP8 | {"weight_block_size": [128, 128]}),
    "fp8-default-block": Row(partial(packing.fp8, block=(128, 128)), FP8),
    "fp8-one-scale-inv": Row(partial(packing.fp8, name="weight_scale_inv"), FP8),
    "fp8-odd-block": Row(partial(packing.fp8, block=(48, 80)), FP8 | {"weight_block_size": [48, 80]}),
    "fbgemm-fp8": Row(
        packing.fp8_by_row, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}
    ),
    "modelopt-fp8": Row(
        partial(packing.fp8, static=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ),
    "modelopt-nvfp4": Row(packing.modelopt_nvfp4, modelopt("NVFP4", group_size=16), "hf_quant_config.json"),
    "modelopt-nvfp4-awq": Row(
        partial(packing.with_input_scale, packing.modelopt_nvfp4), modelopt("NVFP4_AWQ"), "hf_quant_config.json"
    ),
    "modelopt-int4-awq": Row(
        partial(packing.with_input_scale, packing.modelopt_int4),
        modelopt("W4A16_AWQ", group_size=32, has_zero_point=False, pre_quant_scale=True),
        "hf_quant_config.json",
    ),
    "modelopt-w4a8-awq": Row(
        partial(packing.modelopt_int4, two_stages=True), modelopt("W4A8_AWQ", group_size=32), "hf_quant_config.json"
    ),
    "modelopt-int8-smooth": Row(
        partial(packing.with_input_scale, packing.modelopt_int8),
        modelopt("W8A8_SQ_PER_CHANNEL"),
        "hf_quant_config.json",
    ),
    "modelopt-blocks": Row(packing.modelopt_blocks, modelopt("FP8_PB_WO"), "hf_quant_config.json"),
    "modelopt-mxfp8": Row(packing.mxfp8, modelopt("MXFP8"), "hf_quant_config.json"),
    "torchao": Row(packing.torchao, torchao("IntxWeightOnlyConfig")),
    "torchao-asym": Row(
        partial(packing.torchao, sym=False, group_size=64),
        torchao("FqnToConfig", fqn_to_config={"_default": {"_type": "Int8WeightOnlyConfig"}, "lm_head": None}),
    ),
    "torchao-float8": Row(packing.torchao_float8, torchao("Float8WeightOnlyConfig")),
    "auto-round-fp8": Row(
        packing.float_quantized,
        {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "data_type": "fp", "bits": 8},
    ),
    "auto-round-nvfp4": Row(packing.nvfp4, auto_round("nv_fp", 4)),
    "auto-round-mxfp4": Row(packing.mxfp4, auto_round("mx_fp", 4)),
    "auto-round-mxfp8": Row(packing.mxfp8, auto_round("mx_fp", 8)),
    "nf4": Row(packing.bitsandbytes_4bit, BNB),
    "nf4-plain": Row(partial(packing.bitsandbytes_4bit, nested=False), BNB),
    "fp4": Row(partial(packing.bitsandbytes_4bit, kind="fp4"), BNB),
    "bitsandbytes-8": Row(packing.bitsandbytes_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def method_of(name: str) -> str:
    """The format of a row, as it is called here."""
    return canonical_quantization(ROWS[name].settings.get("quant_method", name.split("-")[0]))


def only_blocks(pack: Any) -> Pack:
    """Pack the linears of blocks, not the head."""
    return lambda name, weight: pack(weight) if "proj" in name else None


def test_formats_are_found_by_their_files():
    formats = stored_formats()
    assert [form.name for form in formats] == list(STORED)
    assert set(ALIASES) <= set(STORED)
    aliases = [alias for each in ALIASES.values() for alias in each]
    assert len(set(aliases)) == len(aliases) > 10
    assert set(aliases).isdisjoint({*QUANTIZATIONS, *REFUSED})


def test_settings_without_a_method_are_of_one_format():
    found = {}
    for name, row in ROWS.items():
        settings = row.settings.get("quantization", row.settings)
        if "quant_method" not in settings:
            found[name] = [form.name for form in stored_formats() if form.wrote(settings)]
    assert len(found) > 5 and all(names == [method_of(name)] for name, names in found.items()), found


@pytest.mark.parametrize("name", ROWS)
def test_values_are_those_of_the_definition(name):
    row = ROWS[name]
    # Blocks of 128 are not filled by 160 inputs.
    width = 160 if "block" in name or "nf4" in name or "fp4" in name else 256
    weight = torch.randn(96, width, generator=torch.Generator().manual_seed(1))
    stored = row.pack(weight)
    tensors = [(f"model.q_proj.{own}", tensor) for own, tensor in stored.tensors.items()]
    settings = row.settings.get("quantization", row.settings)
    config = get_quantization_config(method_of(name)).from_config(settings)
    ((given, value),) = read_quantized(tensors, {own: "file" for own, _ in tensors}, config)
    assert given == "model.q_proj.weight"
    # Products of three factors in another order.
    torch.testing.assert_close(value.dequantize(), stored.value, rtol=1e-6, atol=1e-7)
    assert (value.dequantize() - weight).abs().max() < (2.5 if "2" in name or "3" in name else 1.0)


@pytest.mark.parametrize("name", ROWS)
def test_readings_are_those_of_the_dequantised_weights(name, tmp_path: Path):
    row = ROWS[name]
    quantized = make_quantized(tmp_path, only_blocks(row.pack), row.settings, where=row.where)
    llm = make_llm(quantized.folder)
    assert llm.llm_engine.vllm_config.model_config.quantization == method_of(name)
    assert_reads(generate(llm), quantized.model)


def test_fp8_with_weights_that_blocks_do_not_fill(tmp_path: Path):
    """transformers leaves them as they are, with a scale that is not initialised."""

    def pack(name: str, weight: torch.Tensor) -> Stored | None:
        if "proj" not in name:
            return None
        if name.endswith(("k_proj", "v_proj")):
            return Stored({"weight": weight, "weight_scale_inv": torch.tensor([[float("nan")]])}, weight)
        return packing.fp8(weight, block=(128, 128))

    quantized = make_quantized(tmp_path, pack, FP8 | {"weight_block_size": [128, 128]})
    assert_reads(generate(make_llm(tmp_path)), quantized.model)


def test_only_the_cache_is_quantised(tmp_path: Path):
    """LLM Compressor's recipe of a kv_cache_scheme alone, and Model Optimizer's."""
    model = make_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.{x}_scale": torch.ones(1) for layer in range(2) for x in "kv"}
    save_file(load_file(path) | scales, path)
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    plain = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": cache, "format": "dense"}
    (tmp_path / "config.json").write_text(json.dumps(plain | {"quantization_config": settings}))
    assert_reads(generate(make_llm(tmp_path)), model)
    (tmp_path / "config.json").write_text(json.dumps(plain))
    settings = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    assert_reads(generate(make_llm(tmp_path)), model)


@pytest.mark.parametrize("name", ["gptq-3", "gptq-4-asym", "awq-32", "squeezellm", "int8", "fp8-block", "nvfp4", "nf4"])
def test_memory_is_that_of_the_file(name):
    stored = ROWS[name].pack(torch.randn(256, 512, generator=torch.Generator().manual_seed(1)))
    tensors = [(f"model.q_proj.{own}", tensor) for own, tensor in stored.tensors.items()]
    config = get_quantization_config(ROWS[name].settings["quant_method"]).from_config(ROWS[name].settings)
    ((_, value),) = read_quantized(tensors, {own: "file" for own, _ in tensors}, config)
    assert pack_quantized(value.tensor, None).nbytes <= 1.1 * sum(tensor.nbytes for _, tensor in tensors)
