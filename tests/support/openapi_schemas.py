"""Schemas of real APIs: from OpenAPI documents, which packages ship, and from the OpenAI client's types.

`python tests/support/openapi_schemas.py FILE ...` tries those of documents (npm's @octokit/openapi has GitHub's, PyPI's
apache-airflow-core and jupyter-server their own): each compiles, and random answers are valid, or it is refused with a
reason. It prints how many of each document did, why others did not, and a last line of JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from grammar_walks import byte_grammars, random_answer

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars


def openapi_schemas(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each named schema of a document, with what it refers to."""
    import yaml

    text = path.read_text(encoding="utf-8")
    document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    named = document.get("components", {}).get("schemas") or document["definitions"]
    for name in named:
        yield name, _bundled(named, name)


def _bundled(named: dict[str, Any], name: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    wanted = [name]

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        if isinstance(target := value.get("$ref"), str):
            wanted.append(target.rpartition("/")[2])
            return {"$ref": f"#/$defs/{wanted[-1]}"}
        return {key: moved(each) for key, each in value.items()}

    while wanted:
        if (each := wanted.pop()) not in definitions:
            definitions[each] = moved(named[each])
    return {"$ref": f"#/$defs/{name}", "$defs": definitions}


def openai_schemas(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many of the client's response types, spread over their names."""
    import openai.types
    import pydantic

    found = {}
    for module in pkgutil.walk_packages(openai.types.__path__, "openai.types."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(kind) and issubclass(kind, pydantic.BaseModel) and kind.__module__ == module.name:
                found[f"{module.name}.{name}"] = kind
    for name in sorted(found)[:: len(found) // count][:count]:
        yield name, found[name].model_json_schema()


def outcome(grammars: Grammars, schema: dict[str, Any], num_answers: int = 3) -> str:
    """ "valid", "unfinished" (no answer came to its end), or why it is refused. AssertionError: an invalid answer."""
    import jsonschema

    try:
        grammar = grammar_text(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
        grammars.start(grammar)
    except ValueError as error:
        assert str(error)
        return str(error)
    validator = jsonschema.Draft202012Validator(schema)
    finished = False
    for seed in range(num_answers):
        answer = random_answer(grammars.start(grammar), random.Random(seed), most=3000)
        if answer is not None:
            finished = True
            problem = next(validator.iter_errors(json.loads(answer)), None)
            assert problem is None, (problem, answer)
    return "valid" if finished else "unfinished"


def main() -> None:
    """Try the documents' schemas."""
    grammars = byte_grammars(Path(tempfile.mkdtemp()))
    totals: dict[str, dict[str, int]] = {}
    for path in map(Path, sys.argv[1:]):
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for name, schema in openapi_schemas(path):
            began = time.perf_counter()
            result = outcome(grammars, schema)
            if time.perf_counter() - began > 5:
                print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
            counts[result if result in ("valid", "unfinished") else "refused"] += 1
            if result not in ("valid", "unfinished"):
                reasons[result[:100]] += 1
        totals[path.name] = dict(counts)
        print(path.name, dict(counts))
        for reason, count in reasons.most_common():
            print(f"  {count}: {reason}")
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
