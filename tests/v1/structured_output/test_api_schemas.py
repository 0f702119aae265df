"""Schemas of real APIs: random answers of what compiles are valid; documents' own are tried by openapi_schemas.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grammar_walks import accepts, byte_grammars
from openapi_schemas import openai_schemas, openapi_schemas, outcome

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

NUM_SCHEMAS = 200


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def test_answers_are_valid(grammars: Grammars) -> None:
    """Every schema of the OpenAI client's types compiles."""
    pytest.importorskip("openai")
    results = [outcome(grammars, schema, num_answers=1) for _, schema in openai_schemas(NUM_SCHEMAS)]
    assert len(results) == NUM_SCHEMAS and set(results) <= {"valid", "unfinished"}
    assert results.count("valid") > NUM_SCHEMAS / 2


def test_schemas_of_a_document(grammars: Grammars, tmp_path: Path) -> None:
    """With what they refer to, also in a circle; OpenAPI's own keywords and formats change nothing."""
    person: dict[str, Any] = {
        "type": "object",
        "required": ["id", "kind"],
        "additionalProperties": False,
        "discriminator": {"propertyName": "kind"},
        "properties": {
            "id": {"type": "integer", "format": "int64", "minimum": 0},
            "kind": {"$ref": "#/components/schemas/Kind"},
            "friends": {"type": "array", "maxItems": 2, "items": {"$ref": "#/components/schemas/Person"}},
            "format": {"type": "string", "format": "uri-template", "maxLength": 4, "example": "x"},
        },
    }
    kind = {"type": "string", "enum": ["a", "b"], "xml": {"attribute": True}}
    odd = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}
    path = tmp_path / "api.yaml"
    path.write_text(str({"openapi": "3.1.0", "components": {"schemas": {"Person": person, "Kind": kind, "Odd": odd}}}))
    results = {name: outcome(grammars, schema) for name, schema in openapi_schemas(path)}
    assert results.pop("Odd") == 'Unimplemented keys: ["uniqueItems"]'
    assert results == {"Person": "valid", "Kind": "valid"}


def test_a_format_that_is_not_known_is_a_remark(grammars: Grammars) -> None:
    schema = {"type": "string", "maxLength": 40}
    for name, is_bound in (("ipv4", True), ("int32", False), ("no-such-format", False)):
        form = {"anyOf": [schema | {"format": name}]}
        grammar = grammar_text(StructuredOutputsParams(json=form))
        assert accepts(grammars.start(grammar), '"free text"') is not is_bound
