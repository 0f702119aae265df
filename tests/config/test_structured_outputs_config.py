"""structured_outputs_config: neutral values pass, defaults reach requests' forms, and the rest is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import make_tiny_llm

from vllm import EngineArgs, SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.config.structured_outputs import as_structured_outputs_config
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.mark.parametrize(
    "value",
    [
        None, {}, "{}", {"backend": "auto"}, {"backend": "guidance"}, {"backend": None}, {"disable_fallback": True},
        {"enable_in_reasoning": True}, {"reasoning_parser": "", "reasoning_parser_plugin": None},
    ],
)  # fmt: skip
def test_what_changes_nothing_passes(value: Any) -> None:
    config = as_structured_outputs_config(value)
    form = StructuredOutputsParams(json=SCHEMA)
    assert config.applied(form) == form


@pytest.mark.parametrize(
    ("value", "says"),
    [
        *[({"backend": name}, f"backend='{name}'.*llguidance") for name in ("xgrammar", "outlines")],
        ({"backend": "lm-format-enforcer"}, "backend='lm-format-enforcer'"),
        ({"backend": "other"}, "backend must be one of auto"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser='qwen3'.*whole text"),
        ({"no_such_field": 1}, "has no field 'no_such_field'"),
        (3, "must be a StructuredOutputsConfig"),
    ],
)
def test_what_is_not_done_is_refused_by_name(folder: Path, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineArgs(model=str(folder), structured_outputs_config=value).create_engine_config()


def test_its_flags() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for flags in (
        ["--structured-outputs-config", '{"disable_any_whitespace": true, "backend": "guidance"}'],
        ["--structured-outputs-config.disable_any_whitespace", "true", "--structured-outputs-config.backend=guidance"],
    ):
        args = EngineArgs.from_cli_args(parser.parse_args(flags))
        found = as_structured_outputs_config(args.structured_outputs_config)
        assert found == StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True)


def test_older_arguments(folder: Path) -> None:
    args = EngineArgs(model=str(folder), guided_decoding_disable_any_whitespace=True)
    assert args.create_engine_config().structured_outputs_config.disable_any_whitespace
    with pytest.raises(VLLMValidationError, match="backend='outlines'"):
        EngineArgs(model=str(folder), guided_decoding_backend="outlines").create_engine_config()


def test_a_requests_own_white_space_wins() -> None:
    config = StructuredOutputsConfig(disable_any_whitespace=True)
    assert config.applied(StructuredOutputsParams(json=SCHEMA)).disable_any_whitespace
    own = StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ")
    assert config.applied(own) == own
    assert not StructuredOutputsParams(json=SCHEMA).disable_any_whitespace


def test_defaults_bind_requests(folder: Path) -> None:
    pytest.importorskip("llguidance")
    config = {"disable_any_whitespace": True, "disable_additional_properties": True}
    llm = make_tiny_llm(folder, structured_outputs_config=config)
    params = SamplingParams(temperature=1.0, n=8, seed=1, max_tokens=40, structured_outputs={"json": SCHEMA})
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    assert {choice.text for choice in output.outputs} <= {'{"a":1}', '{"a":2}'}
    params.structured_outputs = StructuredOutputsParams(json=SCHEMA, whitespace_pattern="_")
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    for choice in output.outputs:
        assert re.fullmatch(r"\{_?\"a\"_?:_?[12]_?\}", choice.text)
        assert json.loads(choice.text.replace("_", "")) in ({"a": 1}, {"a": 2})
