"""ModelRegistry: what is served, models of callers, and plug-ins that register them."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from tiny_llm import make_tiny_llm, make_tiny_model
from torch import Tensor, nn

from vllm import ModelRegistry, SamplingParams
from vllm.loader import resolve_model
from vllm.models.dense.llama import LlamaForCausalLM
from vllm.models.registry import resolve_model_class
from vllm.utils import plugins


class DoubledLogits(LlamaForCausalLM):
    """A model of a caller."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return 2 * super().compute_logits(hidden)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    monkeypatch.setattr(plugins, "_has_loaded_general", False)


def rename_architecture(folder: Path, name: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [name]}))


def readings(folder: Path) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=[5, 6], logprobs_mode="raw_logits")
    (output,) = make_tiny_llm(folder).generate([[1, 2, 3]], params, use_tqdm=False)
    return [output.outputs[0].logprobs[0][token_id].logit for token_id in (5, 6)]


def test_what_is_served():
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= ModelRegistry.get_supported_archs()
    assert ModelRegistry.resolve_model_cls(["Unknown", "MistralForCausalLM"])[1] == "MistralForCausalLM"
    assert ModelRegistry.is_text_generation_model("LlamaForCausalLM")
    assert not ModelRegistry.is_text_generation_model(["BertModel"])
    assert not ModelRegistry.is_pooling_model("LlamaForCausalLM")
    assert not ModelRegistry.is_multimodal_model("LlamaForCausalLM")
    assert ModelRegistry.is_multimodal_model(["Unknown", "LlavaForConditionalGeneration"])


def test_every_architecture_of_the_table_has_a_class():
    for name in ModelRegistry.get_supported_archs():
        assert issubclass(resolve_model_class([name]), nn.Module)


@pytest.mark.parametrize("model_cls", [DoubledLogits, f"{__name__}:DoubledLogits"], ids=["class", "name"])
def test_a_callers_model_runs(tmp_path, model_cls):
    folder = make_tiny_model(tmp_path / "model")
    expected = [2 * logit for logit in readings(folder)]
    rename_architecture(folder, "TheirsForCausalLM")
    with pytest.raises(ValueError, match="TheirsForCausalLM"):
        resolve_model(str(folder), needs_weights=False)
    ModelRegistry.register_model("TheirsForCausalLM", model_cls)
    assert "TheirsForCausalLM" in ModelRegistry.get_supported_archs()
    assert readings(folder) == expected


def test_a_replaced_architecture_is_a_warning(vllm_log):
    ModelRegistry.register_model("LlamaForCausalLM", DoubledLogits)
    assert "LlamaForCausalLM was registered already" in vllm_log.text
    assert resolve_model_class(["LlamaForCausalLM"]) is DoubledLogits


def test_bad_registrations_are_refused():
    with pytest.raises(TypeError, match="model_arch must be a str, got int"):
        ModelRegistry.register_model(1, DoubledLogits)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be 'module:Class' or a subclass of torch.nn.Module, got .*dict"):
        ModelRegistry.register_model("TheirsForCausalLM", dict)  # type: ignore[type-var]
    for name in ("json", "json:", ":Theirs", "json:loads:dumps"):
        with pytest.raises(ValueError, match="model_cls must be 'module:Class', got"):
            ModelRegistry.register_model("TheirsForCausalLM", name)


def test_a_class_that_is_not_there_is_named_when_it_is_needed():
    ModelRegistry.register_model("TheirsForCausalLM", "no_such_module:Theirs")
    with pytest.raises(ValueError, match="'no_such_module:Theirs' cannot be imported: No module named"):
        resolve_model_class(["TheirsForCausalLM"])


def register_theirs() -> None:
    """A plug-in's entry point names this."""
    ModelRegistry.register_model("TheirsForCausalLM", f"{__name__}:DoubledLogits")


def test_general_plugins_run_when_an_engine_starts(tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path / "model")
    rename_architecture(folder, "TheirsForCausalLM")
    entry = metadata.EntryPoint("theirs", f"{__name__}:register_theirs", plugins.DEFAULT_PLUGINS_GROUP)
    broken = metadata.EntryPoint("broken", "no_such_module:x", plugins.DEFAULT_PLUGINS_GROUP)
    found = metadata.entry_points

    def entry_points(**params: str) -> object:
        return [entry, broken] if params.get("group") == plugins.DEFAULT_PLUGINS_GROUP else found(**params)

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(ValueError, match="TheirsForCausalLM"):
        readings(folder)
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(plugins, "_has_loaded_general", False)
    assert list(plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)) == ["theirs"]
    assert readings(folder)
