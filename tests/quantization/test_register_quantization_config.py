"""A user's own quantisation: its class is registered, and its methods hold the weights and multiply."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import assert_reads, generate, make_llm
from safetensors.torch import load_file, save_file
from thread_ranks import make_thread_llm
from tiny_models import make_tiny

from vllm import quantization
from vllm.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.parameter import ModelWeightParameter, PackedvLLMParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.quantization import (
    QUANTIZATION_METHODS,
    QuantizationMethods,
    get_quantization_config,
    register_quantization_config,
)
from vllm.quantization.base_config import QuantizationConfig

FIELDS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


class RoundedInputs(UnquantizedLinearMethod):
    """Overrides the product alone."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear((x * self.steps).round() / self.steps, layer.weight, bias)


class BytesWithScales(LinearMethodBase):
    """Has weights of its own: bytes, and a scale for each part of a layer."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=torch.int8)
        layer.register_parameter("data8", torch.nn.Parameter(data, requires_grad=False))
        layer.data8.output_dim, layer.data8.input_dim = 0, 1
        scales = torch.empty(len(output_partition_sizes), dtype=params_dtype)
        layer.register_parameter("scale8", torch.nn.Parameter(scales, requires_grad=False))
        self.sizes = output_partition_sizes

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.weight = layer.data8.float() * layer.scale8.repeat_interleave(torch.tensor(self.sizes))[:, None]

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), bias)


class BytesInParameters(BytesWithScales):
    """The same with upstream's classes of parameters."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = extra_weight_attrs.pop("weight_loader")
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=torch.int8)
        layer.register_parameter("data8", ModelWeightParameter(data, input_dim=1, output_dim=0, weight_loader=loader))
        scales = torch.empty(len(output_partition_sizes), dtype=params_dtype)
        layer.register_parameter("scale8", PerTensorScaleParameter(data=scales, weight_loader=loader))
        set_weight_attrs(layer.scale8, {**extra_weight_attrs, "ignore_warning": True})
        with pytest.raises(ValueError, match="has the attribute 'ignore_warning' already"):
            set_weight_attrs(layer.scale8, {"ignore_warning": False})
        self.sizes = output_partition_sizes


class BytesWithLoader(BytesInParameters):
    """With a loader of weights that nothing would call."""

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **fields: Any) -> None:
        super().create_weights(layer, *sizes, **fields)
        del layer.scale8.weight_loader
        set_weight_attrs(layer.scale8, {"weight_loader": print})


METHODS = {"bytes": BytesWithScales, "parameters": BytesInParameters}


class OwnConfig(QuantizationConfig):
    def __init__(self, steps: int, kind: str) -> None:
        super().__init__()
        self.steps, self.kind = steps, kind

    def get_name(self) -> QuantizationMethods:
        return "mine"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["mine.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OwnConfig:
        return cls(config.get("steps", 4), config.get("kind", "inputs"))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        if self.kind in METHODS:
            return METHODS[self.kind]()
        return None if prefix == "model.layers.0.mlp.down_proj" else RoundedInputs(self.steps)


@pytest.fixture(autouse=True)
def registered():
    register_quantization_config("mine")(OwnConfig)


def test_registering(caplog):
    assert get_quantization_config("mine") is OwnConfig
    assert QUANTIZATION_METHODS.count("mine") == 1 and "gptq" in QUANTIZATION_METHODS
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, logger="vllm"):
            register_quantization_config("mine")(OwnConfig)
    finally:
        logger.removeHandler(caplog.handler)
    assert "The quantization method 'mine' already exists" in caplog.text
    with pytest.raises(ValueError, match="int must be a subclass of QuantizationConfig"):
        register_quantization_config("other")(int)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="Invalid quantization method: 'unheard'"):
        get_quantization_config("unheard")


def round_inputs(model: Any, steps: int) -> None:
    for name, module in model.named_modules():
        if name.endswith("_proj") and name != "model.layers.0.mlp.down_proj":
            module.register_forward_pre_hook(lambda _, args: ((args[0] * steps).round() / steps,))


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_names_of_what_is_done_on_load(name, tmp_path, monkeypatch):
    monkeypatch.setitem(quantization._registered, name, OwnConfig)
    model = make_tiny("llama", tmp_path, **FIELDS)
    path = tmp_path / "config.json"
    settings = {"quant_method": name, "steps": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    llm = make_llm(tmp_path)
    round_inputs(model, 2)
    assert_reads(generate(llm), model)


@pytest.mark.parametrize("where", ["argument", "config.json", "mine.json"])
def test_a_method_that_overrides_the_product(where, tmp_path):
    model = make_tiny("llama", tmp_path, **FIELDS)
    settings = {"quant_method": "mine", "steps": 2}
    if where == "config.json":
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    elif where == "mine.json":
        (tmp_path / where).write_text(json.dumps(settings))
    llm = make_llm(tmp_path, quantization="mine" if where == "argument" else None)
    layer = llm.llm_engine.engine_core.executor.worker.model_runner.model.model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj.quant_method, RoundedInputs)
    assert layer.self_attn.qkv_proj.weight.shape == (128, 64)
    round_inputs(model, 4 if where == "argument" else 2)
    outputs = generate(llm)
    assert_reads(outputs, model)
    tensors = load_file(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="RoundedInputs, which holds its weights itself"):
        llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(tensors.items()))


def test_layers_of_transformers_modules(tmp_path):
    """All but the experts, which are no linear layers."""
    model = make_tiny("mixtral", tmp_path, num_hidden_layers=2)
    round_inputs(model, 4)
    assert_reads(generate(make_llm(tmp_path, quantization="mine")), model)


@pytest.mark.parametrize(("ranks", "kind"), [(1, "bytes"), (2, "bytes"), (2, "parameters")])
def test_a_method_with_weights_of_its_own(ranks, kind, tmp_path):
    model = make_tiny("llama", tmp_path, **FIELDS)
    tensors, values = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.abs().max() / 127
        module = name.removesuffix(".weight")
        tensors[f"{module}.data8"], tensors[f"{module}.scale8"] = (tensor / scale).round().to(torch.int8), scale
        values[name] = tensors[f"{module}.data8"] * scale
    save_file(tensors, tmp_path / "model.safetensors")
    model.load_state_dict(values, strict=False)
    (tmp_path / "mine.json").write_text(json.dumps({"quant_method": "mine", "kind": kind}))
    fields = {"max_model_len": 64, "skip_tokenizer_init": True}
    llm = make_llm(tmp_path) if ranks == 1 else make_thread_llm(tmp_path, ranks, **fields)
    assert_reads(generate(llm), model)


def test_what_cannot_be_honoured_is_refused(tmp_path, monkeypatch):
    make_tiny("llama", tmp_path, **FIELDS)
    with pytest.raises(ValueError, match="quantization='mine' has dtype float32, got 'bfloat16'"):
        make_llm(tmp_path, quantization="mine", dtype="bfloat16")
    monkeypatch.setattr(OwnConfig, "get_quant_method", lambda self, layer, prefix: RoundedInputs(2))
    with pytest.raises(ValueError, match="method RoundedInputs for model.embed_tokens, a VocabParallelEmbedding"):
        make_llm(tmp_path, quantization="mine")
    own = BytesWithLoader()
    monkeypatch.setattr(
        OwnConfig, "get_quant_method", lambda self, layer, prefix: own if isinstance(layer, LinearBase) else None
    )
    with pytest.raises(ValueError, match="BytesWithLoader: weight_loader of parameter scale8 is not called"):
        make_llm(tmp_path, quantization="mine")
    packed = {"data": torch.zeros(2, 2), "packed_dim": 1, "packed_factor": 2, "input_dim": 1, "output_dim": 0}
    assert PackedvLLMParameter(**packed, marlin_tile_size=None).packed_factor == 2
    with pytest.raises(ValueError, match="bitblas_tile_size=8 is not supported"):
        PackedvLLMParameter(**packed, bitblas_tile_size=8)
    with pytest.raises(TypeError, match="other"):
        PackedvLLMParameter(**packed, other=1)
