"""/openapi.json: it says what the server takes and gives, and schemathesis finds no answer that it does not say."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace

import httpx
import pytest
from live_server import LiveServer
from tiny_llm import make_tiny_model

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.server import serving
from vllm.server.app import _ENDPOINTS, build_app
from vllm.server.http.routes import REQUEST_MODELS
from vllm.server.protocol.generation import ChatCompletionChunk, CompletionResponse
from vllm.server.server_args import ServerArgs
from vllm.server.state import ServerState

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

KEY = "secret"
TEMPLATE = "{% for m in messages %}>{{ m.content }}{% endfor %}"

LEFT_OUT_CHECKS = (
    # Limits that a description cannot say still refuse: ids beyond the vocabulary, prompts beyond the context, labels
    # of several tokens, fields that contradict each other.
    "positive_data_acceptance",
)


def description(**args):
    """The schema of a server with these arguments; it needs no engine."""
    engine = SimpleNamespace(model_config=SimpleNamespace(model="/models/tiny", served_model_name=()))
    return build_app(ServerState(engine, ServerArgs(**args))).openapi()


def walk(value):
    """All objects within a schema."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from walk(each)


def operations(schema):
    return {(path, method): each for path, item in schema["paths"].items() for method, each in item.items()}


def test_references_lead_somewhere():
    schema = description()
    references = {each["$ref"] for each in walk(schema) if isinstance(each.get("$ref"), str)}
    assert references
    for reference in references:
        root, *path = reference.split("/")
        assert root == "#"
        target = schema
        for step in path:
            target = target[step]


def test_bodies_are_described_to_the_field():
    schemas = description()["components"]["schemas"]
    for model in REQUEST_MODELS:
        body = schemas[model.__name__]
        assert body["additionalProperties"]["enum"] == [None, False, "", [], {}]
        assert set(body["properties"]) == {*model.model_fields, *model.ACCEPTED, *model.REFUSED}
        # One that is not asked to be there may be null.
        for name in set(model.model_fields) - set(body.get("required", ())):
            field = body["properties"][name]
            assert None in field["enum"] if name in model.REFUSED else {"type": "null"} in field["anyOf"], (model, name)


def test_the_served_models_are_named():
    for args, names in (({"served_model_name": ["a", "b"]}, ["a", "b"]), ({}, ["/models/tiny"])):
        schemas = description(**args)["components"]["schemas"]
        for model in ("CompletionRequest", "TokenizeRequest"):
            assert schemas[model]["properties"]["model"]["anyOf"][0]["enum"] == names


def test_no_answer_is_the_frameworks_own():
    schema = description()
    assert not {"HTTPValidationError", "ValidationError"} & set(schema["components"]["schemas"])
    for place, operation in operations(schema).items():
        assert "422" not in operation["responses"], place
        for status, answer in operation["responses"].items():
            assert answer["description"], (place, status)
            if status != "200":
                content = answer["content"]["application/json"]["schema"]
                shape = "MessagesError" if place[0].startswith("/v1/messages") else "ErrorResponse"
                assert content == {"$ref": f"#/components/schemas/{shape}"}, (place, status)


def test_keys_are_asked_for_where_they_are_needed():
    assert "securitySchemes" not in description()["components"]
    schema = description(api_key=[KEY])
    assert schema["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    for (path, _), operation in operations(schema).items():
        is_open = path in ("/health", "/ping", "/load", "/version", "/metrics")
        assert operation.get("security") == (None if is_open else [{"bearer": []}]), path


def beyond(limit, step):
    return limit + (step if isinstance(limit, int) else step * max(abs(limit), 1.0) * 1e-6)


def test_numbers_have_the_limits_of_sampling_params():
    """The described limits are the last values that are taken."""
    properties = description()["components"]["schemas"]["CompletionRequest"]["properties"]
    beams = {"use_beam_search": True, "n": 2, "temperature": 0.0}
    prompt = {"prompt_logprobs": 1}
    others = {"min_tokens": {"max_tokens": None}, "prompt_logprob_start": prompt, "length_penalty": beams}
    limited = 0

    def refused(name, value):
        try:
            SamplingParams(**{name: value, **others.get(name, {})})
        except VLLMValidationError as error:
            return error.parameter == name
        return False

    for name, field in properties.items():
        for branch in field.get("anyOf", [field]):
            if name != "priority" and branch.get("type") in ("integer", "number"):
                limited += 1
                low = branch.get("minimum", branch.get("exclusiveMinimum"))
                assert refused(name, low) == ("exclusiveMinimum" in branch), name
                assert refused(name, beyond(low, -1)), name
                assert not refused(name, branch["maximum"]), name
                assert refused(name, beyond(branch["maximum"], 1)), name
                if "not" in branch:
                    assert refused(name, branch["not"]["const"]), name
    assert limited >= 15


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    # Short answers, and few of them: most valid requests ask for all that they can get. A decision takes 70 tokens.
    limits = ("--max-model-len", "96", "--max-num-seqs", "8", "--max-num-queued-reqs", "8", "--max-body-mib", "0.1")
    short = ("--override-generation-config", '{"max_new_tokens": 4}')
    with LiveServer(folder, *limits, *short, "--chat-template", str(template), "--api-key", KEY) as server:
        yield server


def test_events_are_as_described(server):
    body = {
        "model": "tiny",
        "stream": True,
        "max_tokens": 3,
        "labels": ["a"],
        "stream_options": {"include_usage": True},
    }
    more = {"prompt_logprobs": 1, "return_token_ids": True, "logits_indices": [7], "n": 2}
    kinds = {
        "/v1/completions": (CompletionResponse, {"prompt": "ab", "echo": True, "logprobs": 1}),
        "/v1/chat/completions": (
            ChatCompletionChunk,
            {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
        ),
    }
    for path, (model, own) in kinds.items():
        answer = httpx.post(
            server.url + path, json={**body, **more, **own}, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        *events, done = answer.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        for event in events:
            model.model_validate_json(event.removeprefix("data: "))


POOLING = ("/v1/embeddings",)
OF_AN_ID = tuple(f"/v1/responses/{{response_id}}{rest}" for rest in ("", "/cancel", "/input_items"))
"""Paths of responses that are there; nobody guesses which."""
# Other paths of endpoints that are tried at one of theirs, and of those for whose bodies this model is the wrong one.
ALIASES = (
    "/v2/embed", "/classify", "/pooling",
    "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/invocations", "/embeddings", "/embed", "/v1/embed",
    "/v1/rerank", "/v2/rerank", "/score",
)  # fmt: skip


def with_each_field_once(schema):
    """A field that several bodies share is left in one of them: each value of each would be a request at every route.
    test_bad_requests.py and test_fuzz.py try them all at each."""
    models, seen, found = schema["components"]["schemas"], set(), set()
    left = [each.get("requestBody") for each in operations(schema).values()]
    while left:
        names = {each["$ref"].rpartition("/")[2] for each in walk(left.pop()) if isinstance(each.get("$ref"), str)}
        left += [models[name] for name in names - found]
        found |= names
    for name in sorted(found):
        fields = models[name].get("properties", {})
        needed = {field for each in walk(models[name]) for field in each.get("required", ()) if isinstance(field, str)}
        for field in set(fields) - needed:
            said = json.dumps(
                {key: each for key, each in fields[field].items() if key != "description"}, sort_keys=True
            )
            if (field, said) in seen:
                del fields[field]
            seen.add((field, said))
    return schema


def test_schemathesis_finds_nothing(server, tmp_path):
    """All checks over all routes: values at and beyond every described limit, then random ones."""
    report = tmp_path / "report.ndjson"
    described = tmp_path / "openapi.json"
    schema = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    described.write_text(json.dumps(with_each_field_once(schema)))
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", str(described), "--url", server.url,
        "--header", f"Authorization: Bearer {KEY}",
        *(option for path in ALIASES for option in ("--exclude-path", path)),
        "--phases", "coverage,fuzzing", "--max-examples", "4", "--generation-deterministic", "--no-shrink",
        "--exclude-checks", ",".join(LEFT_OUT_CHECKS), "--continue-on-failure", "--no-color",
        "--report", "ndjson", "--report-ndjson-path", str(report),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    tried = [(path, method) for path, method in operations(description()) if path not in ALIASES]
    assert re.search(r"Tested: (\d+)", done.stdout)[1] == str(len(tried))
    statuses = statuses_of(report)
    for path, method in tried:
        # Neither refused at the door every time, nor let in; but this is no pooling model.
        seen = statuses[f"{method.upper()} {path}"]
        assert seen[200] > 0 or path in POOLING or path in OF_AN_ID, (path, dict(seen))
        assert method != "post" or path == "/ping" or path in OF_AN_ID or seen[400] > 10, (path, dict(seen))


def statuses_of(report):
    """How often each operation answered with each status."""
    counts = defaultdict(lambda: defaultdict(int))
    for line in report.read_text().splitlines():
        finished = json.loads(line).get("ScenarioFinished")
        if finished is not None:
            for interaction in finished["recorder"]["interactions"].values():
                counts[finished["recorder"]["label"]][(interaction["response"] or {}).get("status_code")] += 1
    return counts


def test_every_router_is_served():
    prefix = f"{serving.__name__}."
    modules = [importlib.import_module(found.name) for found in walk_packages(serving.__path__, prefix)]
    with_router = {module.__name__.removeprefix(prefix) for module in modules if hasattr(module, "router")}
    # The routes of some environment variables are.
    assert with_router == {*_ENDPOINTS, "adapters", "development"}
