"""Schemas of the JSON Schema Test Suite: what compiles accepts nothing that the suite or `jsonschema` rejects; the rest
is refused."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from grammar_walks import accepts, byte_grammars, random_answer
from schema_suite import load

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SUITE = load()


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("keyword", SUITE)
def test_what_is_kept_accepts_nothing_else(grammars: Grammars, keyword: str) -> None:
    for case in SUITE[keyword]:
        try:
            grammar = grammar_text(StructuredOutputsParams(json=case["schema"], disable_any_whitespace=True))
            grammars.start(grammar)
        except ValueError as error:
            assert str(error), case
            continue
        for test in case["tests"]:
            text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            if accepts(grammars.start(grammar), text):
                assert test["valid"], (case["description"], case["schema"], text)
        validator = jsonschema.Draft202012Validator(case["schema"])
        for seed in range(2):
            answer = random_answer(grammars.start(grammar), random.Random(seed))
            if answer is not None:
                validator.validate(json.loads(answer))


# No schema with these keywords is kept.
REFUSED = """contains defs dependentRequired dependentSchemas dynamicRef if-then-else maxContains minContains not
    propertyNames refRemote unevaluatedItems unevaluatedProperties uniqueItems vocabulary""".split()


def test_what_is_kept(grammars: Grammars) -> None:
    """Most of what other keywords say, and most instances that it allows."""
    counts: Counter[str] = Counter()
    for keyword, cases in SUITE.items():
        if keyword in REFUSED:
            continue
        for case in cases:
            try:
                grammar = grammar_text(StructuredOutputsParams(json=case["schema"], disable_any_whitespace=True))
                grammars.start(grammar)
            except ValueError:
                counts["refused"] += 1
                continue
            counts["kept"] += 1
            for test in case["tests"]:
                if test["valid"]:
                    text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
                    counts["accepted" if accepts(grammars.start(grammar), text) else "rejected"] += 1
    assert counts["kept"] > 5 * counts["refused"]
    assert counts["accepted"] > 15 * counts["rejected"]
