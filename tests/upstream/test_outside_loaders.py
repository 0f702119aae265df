"""Loaders of callers: register_model_loader, and models that they fill."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outside_models import plugin
from safetensors.torch import load_file
from tiny_models import make_tiny, reference

from vllm import LLM, ModelRegistry, SamplingParams
from vllm.config import LoadConfig
from vllm.config.load import OTHER_FORMATS
from vllm.loader import LOADERS
from vllm.model_executor.model_loader import (
    _LOAD_FORMAT_TO_MODEL_LOADER,
    get_model_loader,
    register_model_loader,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

IDS = [5, 9, 30, 31, 32, 7]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    plugin.register()
    yield
    for name in list(_LOAD_FORMAT_TO_MODEL_LOADER):
        del _LOAD_FORMAT_TO_MODEL_LOADER[name]
        OTHER_FORMATS.discard(name)
        del LOADERS[name]


@pytest.fixture(scope="module", params=["Qwen2ForCausalLM", "BiasedForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A folder without weights, where these are, and transformers' model; one of ours and one from outside the tree."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model = make_tiny("qwen2", folder, use_sliding_window=False)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [request.param]}))
    weights = (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    return folder, weights, model


def make_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=64, skip_tokenizer_init=True, **fields)


def check(llm: LLM, model: Any) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[5, 6])
    (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
    expected = reference(model, IDS)[-1]
    for token in (5, 6):
        assert output.outputs[0].logprobs[0][token].logprob == pytest.approx(expected[token].item(), abs=1e-4)


def test_a_stream_of_weights(checkpoint):
    folder, weights, model = checkpoint

    @register_model_loader("streamed")
    class Streamed(DefaultModelLoader):
        def __init__(self, load_config: LoadConfig) -> None:
            extra = dict(load_config.model_loader_extra_config)
            self.file = extra.pop("file")
            super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config=extra))

        def get_all_weights(self, model_config, model):
            assert model_config.dtype == torch.float32
            yield from load_file(self.file).items()

    assert "streamed" in _LOAD_FORMAT_TO_MODEL_LOADER
    check(make_llm(folder, load_format="streamed", model_loader_extra_config={"file": str(weights)}), model)


def test_parameters_one_by_one(checkpoint):
    folder, weights, model = checkpoint
    taken = []

    class Own(BaseModelLoader):
        def download_model(self, model_config):
            raise AssertionError("the engine has the folder")

        def load_weights(self, model, model_config):
            taken.extend(name for name, _ in model.named_parameters())
            model.load_weights(load_file(weights).items())

    register_model_loader("own")(Own)
    check(make_llm(folder, load_format="own"), model)
    assert any(name.endswith("norm.weight") for name in taken)


def test_a_loader_that_loads_the_model_itself(checkpoint):
    folder, weights, model = checkpoint

    @register_model_loader("whole")
    class Whole(DefaultModelLoader):
        def load_model(self, vllm_config, model_config):
            assert vllm_config.load_config.load_format == "whole"
            made_up = DummyModelLoader(load_config=vllm_config.load_config)
            found = made_up.load_model(vllm_config=vllm_config, model_config=model_config)
            found.load_weights(load_file(weights).items())
            return found.eval()

    check(make_llm(folder, load_format="whole"), model)


def test_what_a_loader_lacks_is_named(checkpoint):
    folder, weights, _ = checkpoint

    @register_model_loader("partial")
    class Partial(DefaultModelLoader):
        def get_all_weights(self, model_config, model):
            yield from (item for item in load_file(weights).items() if "layers.2.mlp.down_proj" not in item[0])

    with pytest.raises(ValueError, match=r"lacks weights: model\.layers\.2\.mlp\.down_proj\.weight"):
        make_llm(folder, load_format="partial")


def test_bad_loaders_and_formats_are_refused(checkpoint):
    folder, _, _ = checkpoint
    with pytest.raises(ValueError, match="load_format must be one of auto, .*, got 'unknown'"):
        make_llm(folder, load_format="unknown")
    with pytest.raises(ValueError, match="model_loader_extra_config=.* is not supported: load_format='auto' has no"):
        make_llm(folder, model_loader_extra_config={"file": "f"})
    with pytest.raises(ValueError, match="must be a subclass of BaseModelLoader"):
        register_model_loader("bad")(dict)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="load_format='dummy' is the engine's own"):
        register_model_loader("dummy")(DefaultModelLoader)
    assert isinstance(get_model_loader(LoadConfig()), DefaultModelLoader)
    with pytest.raises(NotImplementedError, match="start one by load_format"):
        DefaultModelLoader(LoadConfig()).load_model(None, None)


def test_a_loader_that_returns_another_model_is_refused(checkpoint):
    folder, _, _ = checkpoint

    @register_model_loader("other")
    class Other(DefaultModelLoader):
        def load_model(self, vllm_config, model_config):
            return torch.nn.Linear(1, 1)

    with pytest.raises(ValueError, match=r"Other\.load_model must return the model that"):
        make_llm(folder, load_format="other")
