"""Configurations of callers: register_config_parser, and models that have no config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny, reference

from vllm import LLM, EngineArgs, SamplingParams
from vllm.transformers_utils.config import (
    _CONFIG_FORMAT_TO_CONFIG_PARSER,
    HFConfigParser,
    MistralConfigParser,
    get_config_parser,
    register_config_parser,
)
from vllm.transformers_utils.config_parser_base import ConfigParserBase

IDS = [5, 9, 30, 31, 32, 7]


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    for name in set(_CONFIG_FORMAT_TO_CONFIG_PARSER) - {"hf"}:
        del _CONFIG_FORMAT_TO_CONFIG_PARSER[name]


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Any]:
    """A folder with another file in config.json's place, and transformers' model."""
    model = make_tiny("qwen2", tmp_path / "model", use_sliding_window=False)
    (tmp_path / "model/config.json").rename(tmp_path / "model/sizes.json")
    return tmp_path / "model", model


class Sizes(ConfigParserBase):
    def parse(
        self, model: Any, trust_remote_code: bool, revision: Any = None, code_revision: Any = None, **kwargs: Any
    ) -> Any:
        from transformers import Qwen2Config

        entries = json.loads((Path(model) / "sizes.json").read_text())
        return {}, Qwen2Config.from_dict(entries)


def read(folder: Path, **fields: Any) -> dict[int, float]:
    llm = LLM(str(folder), dtype="float32", max_model_len=64, skip_tokenizer_init=True, **fields)
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[5, 6])
    (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
    return {token: output.outputs[0].logprobs[0][token].logprob for token in (5, 6)}


def test_a_model_without_config_json(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    assert register_config_parser("sizes")(Sizes) is Sizes
    assert isinstance(get_config_parser("sizes"), Sizes)
    expected = reference(model, IDS)[-1]
    found = read(folder, config_format="sizes")
    assert found == {token: pytest.approx(expected[token].item(), abs=1e-4) for token in (5, 6)}


def test_the_object_counts(tmp_path: Path) -> None:
    """A parser over transformers' that changes what the file says."""
    model = make_tiny("qwen2", tmp_path / "model", use_sliding_window=False)
    file = tmp_path / "model/config.json"
    entries = json.loads(file.read_text())
    file.write_text(json.dumps(entries | {"rms_norm_eps": 0.5}))

    @register_config_parser("mended")
    class Mended(HFConfigParser):
        def parse(self, *args: Any, **kwargs: Any) -> Any:
            found, config = super().parse(*args, **kwargs)
            config.rms_norm_eps = entries["rms_norm_eps"]
            return found, config

    expected = reference(model, IDS)[-1]
    assert read(tmp_path / "model", config_format="mended")[5] == pytest.approx(expected[5].item(), abs=1e-4)
    assert abs(read(tmp_path / "model", config_format="hf")[5] - expected[5].item()) > 1e-4


def test_what_is_refused(checkpoint: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = checkpoint
    with pytest.raises(ValueError, match="subclass of ConfigParserBase"):
        register_config_parser("bad")(dict)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="'hf' is the engine's own"):
        register_config_parser("hf")(Sizes)
    with pytest.raises(ValueError, match="'sizes' has no parser"):
        get_config_parser("sizes")
    with pytest.raises(ValueError, match="config_format must be 'auto' or 'hf' .*got 'sizes'"):
        EngineArgs(model=str(folder), config_format="sizes").create_engine_config()
    with pytest.raises(NotImplementedError, match="convert the checkpoint"):
        MistralConfigParser()

    class Bare(Sizes):
        def parse(self, *args: Any, **kwargs: Any) -> Any:
            return super().parse(*args, **kwargs)[0]

    register_config_parser("sizes")(Sizes)
    register_config_parser("sizes")(Bare)
    assert "was registered already" in caplog.text
    with pytest.raises(ValueError, match="Bare.parse must return the entries and a PretrainedConfig, got dict"):
        EngineArgs(model=str(folder), config_format="sizes").create_engine_config()
    with pytest.raises(ValueError, match="hf_overrides must be a dict with config_format='sizes'"):
        EngineArgs(model=str(folder), config_format="sizes", hf_overrides=lambda c: c).create_engine_config()
    with pytest.raises(ValueError, match="config_format='sizes' is of folders"):
        EngineArgs(model=None, config_format="sizes").create_engine_config()
