"""quantization="int4" and "fp8": weights of any plain checkpoint, rounded when they are loaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantized_models import assert_reads, generate, make_llm
from thread_ranks import make_thread_llm
from tiny_models import make_tiny

from vllm.layers.linear_method import linear_method


def int4(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 32: 16 levels, evenly from the least value to the greatest; step and least value in bfloat16."""
    value = np.empty(weight.shape, np.float32)
    for start in range(0, weight.shape[1], 32):
        group = weight[:, start : start + 32]
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        step, low = ((high - low) / 15).bfloat16().float().numpy(), low.bfloat16().float().numpy()
        level = np.clip(np.rint((group.numpy() - low) / step), 0, 15)
        value[:, start : start + 32] = level * step + low
    return torch.from_numpy(value)


def fp8(weight: torch.Tensor) -> torch.Tensor:
    """Rows over the least power of two that brings them below 448, rounded to E4M3."""
    power = np.exp2(np.floor(np.log2(weight.abs().amax(1, keepdim=True).numpy() / 448)) + 1)
    return (weight / torch.from_numpy(power)).to(torch.float8_e4m3fn).float() * torch.from_numpy(power)


ROUNDED = {"int4": int4, "fp8": fp8}


@torch.no_grad()
def make_rounded(name, folder, family="llama", **fields):
    """The folder gets a plain model; returned is transformers' with rounded linears, head and experts."""
    usual = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 4 if family == "qwen2" else 2}
    model = make_tiny(family, folder, tie_word_embeddings=False, **(usual | fields))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(ROUNDED[name](module.weight))
    for each, weight in model.named_parameters():
        if ".experts." in each:
            weight.copy_(torch.stack([ROUNDED[name](expert) for expert in weight]))
    return model


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize(
    ("family", "fields"),
    # Fused gates, biases, fused query, key and value; experts, and a model of transformers'. One layer's width is no
    # whole number of groups.
    [
        ("llama", {"intermediate_size": 200}),
        ("gpt_neox", {}),
        ("mixtral", {"model_impl": "transformers"}),
        ("qwen2", {"model_impl": "transformers"}),
    ],
)
def test_readings_are_those_of_the_rounded_weights(name, family, fields, tmp_path):
    own = {key: value for key, value in fields.items() if key != "model_impl"}
    model = make_rounded(name, tmp_path, family, **own)
    llm = make_llm(tmp_path, quantization=name, model_impl=fields.get("model_impl", "auto"))
    assert llm.llm_engine.vllm_config.model_config.quantization == name
    assert_reads(generate(llm), model)


@pytest.mark.parametrize("name", ROUNDED)
def test_two_ranks(name, tmp_path):
    model = make_rounded(name, tmp_path, intermediate_size=192)
    fields = {"max_model_len": 64, "max_logprobs": -1, "skip_tokenizer_init": True, "quantization": name}
    assert_reads(generate(make_thread_llm(tmp_path, 2, **fields)), model)


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_odd_weights(name):
    """Constants, zeros, the greatest and the least numbers; of one value a row."""
    pack = linear_method(name).pack
    apply = linear_method(name).apply
    rows = [[0.0] * 40, [1.5] * 40, [1e38, -1e38] * 20, [1e-38] * 40, [-0.25] * 39 + [3.5]]
    weight = torch.tensor(rows)
    found = apply(torch.eye(40), pack(weight, None), float_out=True).T
    assert torch.equal(found[:2], weight[:2]) and torch.equal(found[4], weight[4])
    torch.testing.assert_close(found[2], weight[2], rtol=2**-4, atol=0)
    assert found[3].abs().max() < 2e-38
    one = apply(torch.ones(1, 1), pack(weight[:, :1], None), float_out=True)
    torch.testing.assert_close(one[0], weight[:, 0], rtol=2**-4, atol=2e-38)
    with pytest.raises(ValueError, match=f"quantization='{name}' needs finite weights"):
        pack(torch.tensor([[1.0, float("nan")]]), None)


def test_new_weights_are_rounded_too(tmp_path):
    reference = make_rounded("int4", tmp_path, num_hidden_layers=1)
    llm = make_llm(tmp_path, quantization="int4")
    model = llm.llm_engine.engine_core.executor.worker.model_runner.model
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)) / 16
    with torch.no_grad():
        reference.model.layers[0].self_attn.o_proj.weight.copy_(int4(weight))
    model.load_weights([("model.layers.0.self_attn.o_proj.weight", weight)])
    llm.reset_prefix_cache()
    assert_reads(generate(llm), reference)
