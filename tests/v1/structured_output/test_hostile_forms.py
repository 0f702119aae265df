"""Forms that are made to hurt: refused with a reason, or followed within bounds."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from byte_tokenizer import EOS, VOCAB_SIZE
from grammar_walks import allowed_tokens, byte_grammars
from tokenizers import models, pre_tokenizers

from vllm.entrypoints import async_llm
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.grammar import MAX_GRAMMAR_CHARS, grammar_text
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def doubling(name: str, inner: dict[str, Any], depth: int = 25) -> dict[str, Any]:
    """2**depth schemas, written as `depth` definitions."""
    definitions = {
        f"d{index}": {name: [{"$ref": f"#/$defs/d{index + 1}"}, {"items": {"$ref": f"#/$defs/d{index + 1}"}}]}
        for index in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": inner}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


MANY = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1500)}}
FACTORS = {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": r"\((?R)?\)"}, "regex parse error"),
        ({"regex": "(a)\\1"}, "backreferences"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "invalid regex"),
        ({"json": {"type": "string", "description": "x" * 2**20}}, f"at most {MAX_GRAMMAR_CHARS}"),
        ({"json": '{"a":' * 100_000}, "nested too deeply"),
        ({"json": nested(300)}, "recursion limit"),
        ({"json": nested(5000)}, "nested too deeply"),
        ({"json": {"type": "integer", "multipleOf": 999_983}}, "multipleOf"),
        ({"json": FACTORS}, "multipleOf"),
        ({"json": MANY}, "Current row has"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "."),
        ({"json": {"$ref": "https://example.com/schema.json"}}, "Resource"),
        ({"grammar": "start: a\na: b"}, "unknown name"),
        ({"grammar": 'start: "a" {'}, "."),
    ],
)
def test_what_is_refused(grammars: Grammars, form: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        grammars.start(grammar_text(StructuredOutputsParams(**form)))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
        {"regex": "((a?){1,500}){1,500}b"},
        {"regex": "(.|a)*a.{2000}b.{2000}"},
        {"regex": r"(\w{1,200}\s){1,200}"},
        {"regex": "(a|b)*a(a|b){24}"},
        {"json": doubling("anyOf", {"type": "string"})},
        {"json": {"type": "array", "minItems": 10**6, "items": {"type": "string", "minLength": 10**6}}},
        {"json": {"enum": [f"value {index}" for index in range(5000)]}},
        {"json": {"type": "string", "pattern": r"^(([a-z]{1,50}\.){1,50}){1,50}$"}},
        {"grammar": 'start: (("a" | "b"){0,10000} "c"){0,10000}'},
        {"grammar": 'start: start | start start | "a"'},
    ],
    ids=map(str, range(11)),
)
def test_what_compiles_goes_on_or_ends_with_a_reason(grammars: Grammars, form: Any) -> None:
    matcher, rng = grammars.start(grammar_text(StructuredOutputsParams(**form))), random.Random(0)
    for _ in range(30):
        token = rng.choice(allowed_tokens(matcher))
        if token == EOS or (reason := matcher.take([token])) is not None:
            assert token == EOS or len(reason) < 500
            break


def test_a_tokenizer_with_huge_words_is_refused(tmp_path: Path) -> None:
    """llguidance panics over it."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({word: index for index, word in enumerate([*words, "a" * 2000])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(VLLMValidationError, match="does not read this model's tokenizer"):
        Grammars(backend.to_str(), VOCAB_SIZE, [0])


def test_a_form_that_takes_long_is_refused_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    slow = SimpleNamespace(read_grammars=lambda: None, compile_grammar=lambda form: go.wait(30))
    params = SamplingParams(structured_outputs={"regex": "a"})
    monkeypatch.setattr(async_llm, "MAX_COMPILE_SECONDS", 0.1)

    async def run() -> None:
        compiling = asyncio.ensure_future(AsyncLLM.compile_grammar(SimpleNamespace(input_processor=slow), params))
        await asyncio.sleep(0)
        assert not compiling.done()
        with pytest.raises(VLLMValidationError, match="structured_outputs.regex did not compile within"):
            await compiling
        go.set()

    asyncio.run(run())
