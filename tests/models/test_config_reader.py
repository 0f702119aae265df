"""Options of config.json: what a family reads, and what it refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vllm.models
from vllm.config.checkpoint.config import RopeConfig, parse_hf_config
from vllm.models.dense.gemma import Gemma3ForCausalLM, GemmaForCausalLM
from vllm.models.dense.gpt_neox import GPTNeoXForCausalLM
from vllm.models.dense.llama import LlamaForCausalLM
from vllm.models.dense.mistral import MistralForCausalLM
from vllm.models.dense.phi import PhiForCausalLM
from vllm.models.dense.qwen import Qwen2ForCausalLM
from vllm.models.options_without_effect import IN_FAMILIES, has_no_effect
from vllm.models.spec import DecoderSpec

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def spec_of(family: Any = LlamaForCausalLM, /, **fields: Any) -> DecoderSpec:
    return family.spec_of(parse_hf_config(MINIMAL | fields, {}, "some-model/config.json"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rms_norm_eps", "x", "rms_norm_eps must be a number, got 'x'"),
        ("max_position_embeddings", 0, "max_position_embeddings must be a positive integer, got 0"),
        ("rope_scaling", {"rope_type": "spiral"}, "rope_type must be one of .* got 'spiral'"),
        ("rope_scaling", {"rope_type": "linear"}, "rope_parameters of type linear has no factor"),
        ("rope_scaling", {"rope_type": "longrope"}, "rope_parameters of type longrope has no short_factor"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 2.0, "mrope_section": [8, 8]},
            "rope_parameters of type linear has no parameter mrope_section",
        ),
        ("rope_scaling", [1], r"rope_parameters must be an object, got \[1\]"),
        ("partial_rotary_factor", 1.5, "partial_rotary_factor must be a number above 0 and at most 1, got 1.5"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor=0.5 is not supported: the whole of a head rotates"),
        ("rotary_pct", 0.5, "LlamaForCausalLM has no option rotary_pct, got 0.5"),
        ("rope_theta", 0, "rope_theta must be a positive number, got 0"),
        ("use_mla", True, r"LlamaForCausalLM has no option use_mla, got True; .*hf_overrides={\"use_mla\": None}"),
        ("residual_multiplier", 0.22, "LlamaForCausalLM has no option residual_multiplier, got 0.22"),
        ("sliding_window", 32, "LlamaForCausalLM has no option sliding_window, got 32"),
        # Neighbours of names without effect.
        *(
            (name, 0.5, f"LlamaForCausalLM has no option {name}, got 0.5")
            for name in (
                "norm_std",
                "output_multiplier",
                "_scale",
                "init_scale",
                "fp32_scale",
                "logit_drop",
                "loss_scale",
            )
        ),
        ("token_dropout", True, "LlamaForCausalLM has no option token_dropout, got True"),
        ("output_gate_type", "swish", "LlamaForCausalLM has no option output_gate_type, got 'swish'"),
        ("fused_dropout_add_ln", True, "LlamaForCausalLM has no option fused_dropout_add_ln, got True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="some-model/config.json: " + message):
        spec_of(**{field: value})


def test_families_without_effect_are_modules_of_models() -> None:
    models = Path(vllm.models.__file__).parent
    modules = {
        path.stem for room in ("dense", "mixtures", "hybrids", "encoders") for path in (models / room).glob("*.py")
    }
    assert {name for families in IN_FAMILIES.values() for name in families.split()} <= modules


def test_an_option_without_effect_is_its_familys() -> None:
    assert has_no_effect("qa_dropout", "distilbert") and not has_no_effect("qa_dropout", "bert")
    assert has_no_effect("initializer_range", "llama") and not has_no_effect("initializer_ranges", "llama")


def test_an_unknown_activation_is_refused_by_name() -> None:
    config = parse_hf_config(MINIMAL | {"hidden_act": "sine"}, {})
    with pytest.raises(ValueError, match=r"activation \(hidden_act\) must be one of .*silu.*, got 'sine'"):
        LlamaForCausalLM.spec_of(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_mla": False, "residual_multiplier": 1.0, "n_group": 0, "extra": None, "list": [], "object": {}},
        {"attention_dropout": 0.1, "torch_dtype": "bfloat16", "n_ctx": 128, "use_cache": True, "auto_map": {"A": "b"}},
        {"layer_types": ["full_attention"] * 2},
        {"_model_name_or_path": "a name that a GGUF file gave"},
    ],
)
def test_what_is_neutral_or_irrelevant_is_accepted(fields: dict[str, Any]) -> None:
    assert spec_of(**fields) == spec_of()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig("default", 5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig("linear", 5e5, {"factor": 2.0}),
        ),
        ({"rope_scaling": None, "rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}}, RopeConfig("default", 1e6)),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2, "alpha": None}},
            RopeConfig("dynamic", 1e4, {"factor": 2}),
        ),
    ],
)
def test_rope_in_its_older_and_newer_forms(fields: dict[str, Any], expected: RopeConfig) -> None:
    rotary = spec_of(**fields).layers[0].rotary
    assert rotary is not None and rotary.rope == expected and rotary.dim == 16


def test_the_share_of_a_head_that_rotates() -> None:
    for fields in ({"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}):
        rotary = spec_of(PhiForCausalLM, hidden_act="gelu", **fields).layers[0].rotary
        assert rotary is not None and rotary.dim == 4


def test_a_file_whose_older_option_says_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_theta=5000.0 is not supported: rotary_emb_base says 10000.0"):
        spec_of(GPTNeoXForCausalLM, rotary_emb_base=10000, rope_theta=5000.0)
    assert (
        spec_of(GPTNeoXForCausalLM, rotary_emb_base=500, rope_theta=500.0, rotary_pct=0.5).layers[0].rotary is not None
    )


def test_options_that_contradict_each_other_are_refused() -> None:
    window = {"sliding_window": 8, "use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ValueError, match="use_sliding_window=False is not supported: layer_types names sliding_att"):
        spec_of(Qwen2ForCausalLM, **window)
    with pytest.raises(ValueError, match="rope_parameters must have parameters of each kind of layer"):
        spec_of(Gemma3ForCausalLM, rope_parameters={"rope_type": "linear", "factor": 8.0})
    with pytest.raises(
        ValueError, match="hidden_activation='relu' is not supported: hidden_act says gelu_pytorch_tanh"
    ):
        spec_of(GemmaForCausalLM, hidden_act="gelu", hidden_activation="relu")


def windows(family: Any, **fields: Any) -> list[int | None]:
    return [layer.window for layer in spec_of(family, **fields).layers]


def test_windows() -> None:
    assert windows(MistralForCausalLM, sliding_window=32) == [32, 32]
    assert windows(MistralForCausalLM, sliding_window=None) == [None, None]
    assert windows(MistralForCausalLM) == [4096, 4096]
    kinds = ["full_attention", "sliding_attention"]
    assert windows(MistralForCausalLM, sliding_window=32, layer_types=kinds) == [None, 32]
    qwen = {"sliding_window": 32, "use_sliding_window": True}
    assert windows(Qwen2ForCausalLM, **qwen) == [None, None]
    assert windows(Qwen2ForCausalLM, **qwen, max_window_layers=1) == [None, 32]
    assert windows(Qwen2ForCausalLM, sliding_window=32, max_window_layers=0) == [None, None]
    with pytest.raises(ValueError, match="layer_types must name full_attention or sliding_attention for each of 2"):
        windows(MistralForCausalLM, layer_types=["linear_attention", "full_attention"])
