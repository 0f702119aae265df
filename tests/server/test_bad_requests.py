"""Bad requests: one shape of error that names the field, and a server that goes on as if nothing had been asked."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from pathlib import Path

import pytest
from asgi import AppThread, Serve, client_of
from bad_bodies import (
    CHAT,
    COMPLETION,
    DECISION,
    DETOKENIZE,
    MAX_IDS,
    MAX_LOGPROBS,
    MAX_MODEL_LEN,
    ROWS,
    SCORING,
    SYSTEM_ONE,
    TOKENIZE,
)
from pydantic import ValidationError
from tiny_llm import make_tiny_model

from vllm import SamplingParams
from vllm.server.http.routes import REQUEST_MODELS

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
GOOD = {**COMPLETION, "temperature": 0, "logprobs": 3}
BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/generative_scoring": SCORING,
    "/v1/score": SCORING,
    "/v1/decisions": DECISION,
    "/v1/systemone": SYSTEM_ONE,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    413: "request_too_large_error",
    415: "unsupported_media_type_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> AppThread:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    caps = {"max_model_len": MAX_MODEL_LEN, "max_logprobs": MAX_LOGPROBS, "max_logprob_token_ids": MAX_IDS}
    limits = {"max_prompts_per_request": 64, "max_body_mib": 0.25}
    app = serve({**caps, "max_num_seqs": 4}, folder, chat_template=TEMPLATE, **limits)
    app.expected = choices(app)
    app.folder = folder
    return app


def choices(server):
    """The server's choices for a good request."""
    answer = send(server, "/v1/completions", GOOD)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def send(server, path, body, **headers):
    """POST a body, which may hold what JSON libraries refuse to write."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    return server.request("POST", path, content=content, headers={"Content-Type": "application/json", **headers})


def check_error(server, answer, status, param, says):
    """The answer is this error, and the server is as it was before."""
    assert answer.status_code == status, answer.text[:1000]
    assert answer.headers["content-type"] == "application/json"
    is_of_messages = answer.json().get("type") == "error"
    assert set(answer.json()) == ({"type", "error"} if is_of_messages else {"error"})
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    kind = "invalid_request_error" if is_of_messages else TYPES[status]
    assert (error["type"], error["param"]) == (kind, param), error
    assert isinstance(error["code"], str)
    assert says in error["message"]
    assert len(error["message"]) < 1000
    for path in (server.folder, Path(__file__).parents[2], Path(os.__file__).parent):
        assert str(path) not in answer.text
    assert not re.search(r"Traceback|File \"", answer.text)
    assert server.engine.num_unfinished_requests == len(server.state.in_flight) == 0


@pytest.fixture
def goes_on(server):
    """After the test the server answers as it did before all tests."""
    yield
    assert choices(server) == server.expected


GROUPS = [
    pytest.param(path, list(rows), id=f"{path} {ascii(field)[1:-1]}")
    for (path, field), rows in itertools.groupby(ROWS, lambda row: (row[0], row[2].param))
]


@pytest.mark.parametrize(("path", "rows"), GROUPS)
def test_bad_fields(server, goes_on, path, rows):
    for _, good, row in rows:
        try:
            check_error(server, send(server, path, row.over(good)), row.status, row.param, row.says)
        except AssertionError as error:
            raise AssertionError(f"{row}: {error}") from None


def completion(*fields):
    """A body with these fields, written by hand."""
    return b"{" + b",".join((b'"model":"tiny","prompt":"ab"', *fields)) + b"}"


BODIES_WITHOUT_A_FIELD = {
    "empty": b"",
    "blank": b"  \n",
    "cut": completion()[:-1],
    "cut in a text": completion()[:-3],
    "more behind it": completion() + b"}",
    "two": completion() * 2,
    "no JSON": b"model=tiny&prompt=ab",
    "single quotes": b"{'model': 'tiny'}",
    "a comment": b'{"model": "tiny" /* it */}',
    "a comma too many": completion(b""),
    "NaN": completion(b'"temperature":NaN'),
    "Infinity": completion(b'"temperature":Infinity'),
    "-Infinity": completion(b'"temperature":-Infinity'),
    "hexadecimal": completion(b'"seed":0x10'),
    "a list": b"[" + completion() + b"]",
    "a text": b'"tiny"',
    "a number": b"7",
    "null": b"null",
    "true": b"true",
    "no UTF-8": completion(b'"user":"\xff"'),
    "UTF-16": completion().decode().encode("utf-16"),
    "a NUL": completion() + b"\0",
    "a control character": completion(b'"user":"\n"'),
    "a bad escape": completion(b'"user":"\\x41"'),
    "a surrogate in UTF-8": completion(b'"user":"\xed\xa0\x80"'),
    "lists in lists": b"[" * 100_000,
    "objects in objects": b'{"model":' * 20_000,
    "lists in lists, closed": completion(b'"user":' + b"[" * 50_000 + b"]" * 50_000),
    "5000 digits": completion(b'"seed":' + b"9" * 5000),
    "5000 digits within": completion(b'"user":[' + b"9" * 5000 + b"]"),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", BODIES_WITHOUT_A_FIELD)
def test_what_is_no_body(server, goes_on, path, kind):
    check_error(server, send(server, path, BODIES_WITHOUT_A_FIELD[kind]), 400, None, "the body")


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"model":7', "model"),  # the last of two is what counts
        (b'"temperature":1e999', "temperature"),
        (b'"temperature":-1e999', "temperature"),
        (b'"max_tokens":1e3', "max_tokens"),
        (b'"max_tokens":' + b"9" * 4000, "max_tokens"),
        (b'"n":-0.0', "n"),
        (b'"temperature":"NaN"', "temperature"),
        (b'"tools":' + b"[" * 900 + b"]" * 900, "tools"),
        (b'"stop":' + b"[" * 900 + b"]" * 900, "stop"),
        (b'"prompt":' + b"[" * 900 + b"]" * 900, "prompt"),
        (b'"messages":' + b"[" * 900 + b"]" * 900, "messages"),
        (b'"logit_bias":' + b'{"7":' * 900 + b"1" + b"}" * 900, "logit_bias"),
        (b'"' + b"z" * 100_000 + b'":1', "z" * 64),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_json_libraries_do_not_write(server, goes_on, field, param):
    check_error(server, send(server, "/v1/completions", completion(field)), 400, param, param)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonl", "x"],
)
def test_another_content_type(server, goes_on, path, kind):
    check_error(server, send(server, path, BODIES[path], **{"Content-Type": kind}), 415, None, kind.partition(";")[0])


@pytest.mark.parametrize("path", BODIES)
def test_a_compressed_body(server, goes_on, path):
    body = gzip.compress(json.dumps(BODIES[path]).encode())
    check_error(server, send(server, path, body, **{"Content-Encoding": "gzip"}), 415, None, "gzip")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long(server, goes_on, path, announced):
    body = json.dumps({**BODIES[path], "user": "x" * 2**18}).encode()

    async def parts():
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    answer = server.request("POST", path, content=body if announced else parts())
    check_error(server, answer, 413, None, "--max-body-mib")


@pytest.mark.parametrize(
    "path",
    ["/v1", "/v1/", "/v2/completions", "/v1/completion", "/V1/completions", "/etc/passwd", "/%2e%2e/", "/é", "/a b"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_such_route(server, goes_on, method, path):
    check_error(server, server.request(method, path), 404, None, "no route")


def test_no_such_model(server, goes_on):
    check_error(server, server.request("GET", "/v1/models/other"), 404, "model", "'other'")
    check_error(server, server.request("GET", "/v1/models/etc/passwd"), 404, "model", "'etc/passwd'")


def test_another_method(server, goes_on):
    routes = server.request("GET", "/openapi.json").json()["paths"]
    assert set(BODIES) < set(routes)
    for path, operations in routes.items():
        allowed = {method.upper() for method in operations}
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "TRACE"} - allowed:
            answer = server.request(method, path)
            check_error(server, answer, 405, None, method)
            assert {each.strip() for each in answer.headers["allow"].split(",")} - {"HEAD"} == allowed


@pytest.mark.parametrize("path", BODIES)
def test_without_a_key(server, goes_on, path):
    async def ask(headers):
        async with client_of(server.engine, api_key=["secret"], access_log=False) as client:
            return await client.post(path, json=BODIES[path], headers=headers)

    for headers in (
        {},
        {"Authorization": "Bearer other"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
    ):
        answer = server.run(ask(headers))
        check_error(server, answer, 401, None, "key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.run(ask({"Authorization": "Bearer secret"})).status_code != 401


GENERATING = [path for path in BODIES if "tokenize" not in path]


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue(server, goes_on, path):
    params = SamplingParams(n=4, max_tokens=120, ignore_eos=True)
    body = {**BODIES[path], **({"chat_template": TEMPLATE} if "chat" in path else {})}

    async def ask_beside_a_long_request():
        await server.engine.add_request("long", "a", params)
        # It may not end before it is compared with.
        await server.engine.pause_generation(mode="keep", clear_cache=False)
        try:
            async with client_of(server.engine, max_num_queued_reqs=0, access_log=False) as client:
                refused = await client.post(path, json=body)
                counted = (await client.get("/metrics")).text
                assert re.search(
                    r'^vllm:admission_rejections_total{model_name=".+",reason="max_num_queued_reqs"} 1.0$',
                    counted,
                    re.M,
                )
                return refused
        finally:
            await server.engine.abort("long")
            await server.engine.resume_generation()

    answer = server.run(ask_beside_a_long_request())
    check_error(server, answer, 429, None, "--max-num-queued-reqs")
    assert int(answer.headers["retry-after"]) > 0


def test_more_sequences_than_ever_fit(server, goes_on):
    """Trying again would not help: no 429."""
    answer = send(server, "/v1/completions", {**COMPLETION, "n": 5000})
    check_error(server, answer, 400, None, "--max-num-queued-reqs")


@pytest.mark.parametrize("path", GENERATING)
def test_a_server_that_stops(server, goes_on, path):
    server.state.draining = True
    try:
        answer = send(server, path, BODIES[path])
    finally:
        server.state.draining = False
    check_error(server, answer, 503, None, "shutting down")
    assert int(answer.headers["retry-after"]) > 0


def test_wrong_lists_are_not_read_to_their_end():
    """pydantic notes every wrong entry, which takes a minute for a list as long as a body may be."""
    wrong = [[object()] * 5, {index: object() for index in range(5)}]
    for model in REQUEST_MODELS:
        for name in model.model_fields:
            for value in wrong:
                try:
                    model.model_validate({name: value})
                except ValidationError as error:
                    noted = [each for each in error.errors() if each["loc"][0] == name]
                    assert len(noted) <= 1, (model, name, noted)
