"""Requests that say nothing sample by the model's generation_config.json, or by vLLM's defaults."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.cli.generation import LocalModel, add_generation_arguments
from vllm.config.checkpoint.local_model import NO_EMBEDDED_MODEL, embedded_model_path, local_model
from vllm.engine.arg_utils import EngineArgs

needs_embedded = pytest.mark.skipif(embedded_model_path() is None, reason=NO_EMBEDDED_MODEL)


@needs_embedded
def test_the_embedded_model_samples_as_its_card_says(vllm_log: pytest.LogCaptureFixture) -> None:
    vllm_log.set_level("INFO", "vllm")
    config = EngineArgs().create_engine_config().model_config
    assert config.default_sampling_params == {"temperature": 0.2, "top_p": 0.9}
    assert "requests sample by default with temperature 0.2, top_p 0.9" in vllm_log.text
    config = EngineArgs(generation_config="vllm").create_engine_config().model_config
    assert config.default_sampling_params == {}
    config = EngineArgs(override_generation_config={"temperature": 0.7}).create_engine_config().model_config
    assert config.default_sampling_params == {"temperature": 0.7, "top_p": 0.9}


@needs_embedded
def test_the_embedded_model_is_found_by_its_served_name() -> None:
    path = embedded_model_path()
    assert path is not None
    assert local_model(path.stem) == local_model(None) == path
    assert local_model(path.stem + "x") is None
    assert EngineArgs(model=path.stem).create_engine_config().model_config.model == path.stem


@pytest.mark.parametrize(("choice", "temperature"), [("auto", 0.25), ("vllm", 1.0)])
def test_commands_and_offline_calls_heed_the_choice(
    choice: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    llm = make_tiny_llm(folder, generation_config=choice)
    assert llm.get_default_sampling_params().temperature == temperature
    seen: list[SamplingParams] = []
    add = llm.llm_engine.add_request

    def record(request_id: str, prompt: object, params: SamplingParams, *args: object, **options: object) -> object:
        seen.append(params)
        return add(request_id, prompt, params, *args, **options)

    monkeypatch.setattr(llm.llm_engine, "add_request", record)
    monkeypatch.setattr("vllm.cli.generation.load_engine", lambda args: llm.llm_engine)
    parser = argparse.ArgumentParser()
    add_generation_arguments(parser, max_tokens=1)
    for flags, expected in (([], temperature), (["--temperature", "0.5"], 0.5)):
        list(LocalModel(parser.parse_args(flags)).complete("abc"))
        assert seen.pop().temperature == expected
