"""curl against a live server, as the documentation shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from live_server import LiveServer
from served import API_KEY, MODEL

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

JSON = ("-H", "Content-Type: application/json")
KEY = ("-H", f"Authorization: Bearer {API_KEY}")
PROMPT = "The capital of France is"


class Answer(NamedTuple):
    """The answer as `curl -i` prints it. Header names in lower case."""

    status: int
    headers: dict[str, str]
    body: str


def curl(*arguments: str, stdin: str | None = None) -> str:
    command = ["curl", "-sS", "--max-time", "60", *arguments]
    done = subprocess.run(command, input=None if stdin is None else stdin.encode(), stdout=subprocess.PIPE, check=True)
    # Not as text: line ends are a part of the protocol.
    return done.stdout.decode()


def answer_of(*arguments: str) -> Answer:
    head, _, body = curl("-i", *arguments).partition("\r\n\r\n")
    while re.match(r"HTTP/1.1 100", head):
        head, _, body = body.partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(status.split()[1]), {name.lower(): value for name, value in headers.items()}, body)


def body_of(**fields: object) -> str:
    return json.dumps({"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 4, **fields})


def test_completion_with_labels(live_server: LiveServer) -> None:
    answer = json.loads(
        curl(
            f"{live_server.url}/v1/completions",
            *JSON,
            "-d",
            body_of(max_tokens=1, labels=[" Paris", " London"]),
        )
    )
    (reading,) = answer["choices"][0]["readings"]
    paris, london = (reading["ids"][str(entry["token_id"])] for entry in answer["labels"])
    assert (paris["label"], london["label"]) == (" Paris", " London")
    assert answer["choices"][0]["text"] == " Paris"
    assert paris["rank"] == 1 < london["rank"]
    assert paris["probability"] + london["probability"] == pytest.approx(1)


def test_a_body_from_a_file_and_from_stdin(live_server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    # The emoji stays itself, and the file has lines.
    body = json.dumps(json.loads(body_of(prompt="😀 " * 30)), ensure_ascii=False, indent=1)
    file.write_text(body, encoding="utf-8")
    url = f"{live_server.url}/v1/completions"
    by_file = json.loads(curl(url, *JSON, "--data-binary", f"@{file}"))
    by_stdin = json.loads(curl(url, *JSON, "--data-binary", "@-", stdin=body))
    chunked = json.loads(curl(url, *JSON, "-H", "Transfer-Encoding: chunked", "--data-binary", f"@{file}"))
    slowly = json.loads(curl(url, *JSON, "-H", "Expect: 100-continue", "--data-binary", f"@{file}"))
    assert by_file["usage"]["prompt_tokens"] > 60
    assert by_file["choices"] == by_stdin["choices"] == chunked["choices"] == slowly["choices"]


def test_a_stream(live_server: LiveServer) -> None:
    url = f"{live_server.url}/v1/completions"
    whole = json.loads(curl(url, *JSON, "-d", body_of()))
    streamed = answer_of("-N", url, *JSON, "-d", body_of(stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["transfer-encoding"] == "chunked"
    *events, done, end = streamed.body.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_a_bad_stream_is_refused_before_it_begins(live_server: LiveServer) -> None:
    answer = answer_of("-N", f"{live_server.url}/v1/completions", *JSON, "-d", body_of(stream=True, top_p=7))
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert json.loads(answer.body)["error"]["param"] == "top_p"


def test_chat_and_get_routes(live_server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Say hi."}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0})
    chat = json.loads(curl(f"{live_server.url}/v1/chat/completions", *JSON, "--json", body))
    assert chat["choices"][0]["message"]["content"]
    assert json.loads(curl(f"{live_server.url}/v1/models"))["data"][0]["id"] == MODEL
    health = answer_of(f"{live_server.url}/health")
    assert (health.status, health.body) == (200, "")
    assert set(json.loads(curl(f"{live_server.url}/version"))) == {"version"}


def test_two_requests_share_a_connection(live_server: LiveServer) -> None:
    url = f"{live_server.url}/v1/completions"
    report = "%{http_version} %{http_code} %{num_connects}\n"
    # An error, and a stream, leave the connection usable, too.
    parts = [["-d", body_of()], ["-d", body_of(top_p=7)], ["-d", body_of(stream=True)], ["-d", body_of()]]
    arguments: list[str] = []
    for part in parts:
        arguments += [*(["--next"] if arguments else []), "-sS", "-o", "/dev/null", "-w", report, *JSON, *part, url]
    assert curl(*arguments).splitlines() == ["1.1 200 1", "1.1 400 0", "1.1 200 0", "1.1 200 0"]


def test_keys(guarded_server: LiveServer) -> None:
    url = f"{guarded_server.url}/v1/completions"
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
    for wrong in ((), ("-H", "Authorization: Bearer no"), ("-H", f"Authorization: {API_KEY}"), ("-u", f":{API_KEY}")):
        refused = answer_of(url, *JSON, *wrong, "-d", body)
        assert refused.status == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        error = json.loads(refused.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert answer_of(url, *JSON, *KEY, "-d", body).status == 200
    assert answer_of(f"{guarded_server.url}/health").status == 200


@pytest.mark.parametrize("chunked", [(), ("-H", "Transfer-Encoding: chunked")])
def test_a_long_body(guarded_server: LiveServer, tmp_path: Path, chunked: tuple[str, ...]) -> None:
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"model": "tiny", "prompt": "a" * 5_000_000}))
    url = f"{guarded_server.url}/v1/completions"
    answer = answer_of(url, *JSON, *KEY, *chunked, "--data-binary", f"@{file}")
    assert answer.status == 413
    assert json.loads(answer.body)["error"]["code"] == "body_too_large"


def test_what_curl_sends_when_the_content_type_is_forgotten(live_server: LiveServer) -> None:
    answer = answer_of(f"{live_server.url}/v1/completions", "-d", body_of())
    assert answer.status == 415
    assert "application/x-www-form-urlencoded" in json.loads(answer.body)["error"]["message"]


def test_other_methods(live_server: LiveServer) -> None:
    url = f"{live_server.url}/v1/completions"
    got = answer_of(url)
    assert (got.status, got.headers["allow"]) == (405, "POST")
    assert "error" in json.loads(got.body)
    for path in ("/health", "/v1/models"):
        head = answer_of("--head", f"{live_server.url}{path}")
        assert (head.status, head.body) == (200, "")
    origin = ("-H", "Origin: http://elsewhere.example")
    asked = answer_of(
        "-X", "OPTIONS", url, *origin, "-H", "Access-Control-Request-Method: POST",
        "-H", "Access-Control-Request-Headers: content-type,authorization",
    )  # fmt: skip
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] in ("*", "http://elsewhere.example")
    assert "POST" in asked.headers["access-control-allow-methods"]
    plain = answer_of("-X", "OPTIONS", url)
    assert plain.status in (200, 204, 405)
