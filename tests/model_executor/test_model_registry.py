"""ModelRegistry tells what is served, and takes no models of callers."""

from __future__ import annotations

import pytest

from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM


def test_what_is_served():
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= ModelRegistry.get_supported_archs()
    assert ModelRegistry.resolve_model_cls(["Unknown", "MistralForCausalLM"]) == (
        LlamaForCausalLM,
        "MistralForCausalLM",
    )
    assert ModelRegistry.is_text_generation_model("LlamaForCausalLM")
    assert not ModelRegistry.is_text_generation_model(["BertModel"])
    assert not ModelRegistry.is_pooling_model("LlamaForCausalLM")
    assert not ModelRegistry.is_multimodal_model("LlamaForCausalLM")


def test_models_of_callers_are_refused():
    ModelRegistry.register_model("LlamaForCausalLM", "somewhere:LlamaForCausalLM")
    with pytest.raises(NotImplementedError, match="TheirsForCausalLM.*served are Llama"):
        ModelRegistry.register_model("TheirsForCausalLM", "somewhere:Theirs")
