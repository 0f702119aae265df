"""`vllm run-batch`: every line is answered as the server answers it, in order; bad files are refused before a load."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.cli import main as cli
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.entrypoints.openai.run_batch import BatchRequestOutput

IDS = [65, 66, 200]


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, *lines: Any) -> str:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return str(path)


@pytest.fixture
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", refuse)


class Store(http.server.BaseHTTPRequestHandler):
    """GET gives what was PUT."""

    content: bytes = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(Store.content)

    def do_PUT(self) -> None:
        Store.content = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def store() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/file.jsonl"
    server.shutdown()
    thread.join()
    server.server_close()


def test_lines_are_answered_in_order(tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    texts = [f"text {number}" * (1 + number % 5) for number in range(20)]
    # The longest answers come first: order is not that of ends.
    good = [
        line(
            f"id {number}", "/v1/completions", prompt=text, max_tokens=21 - number, temperature=0, logprob_token_ids=IDS
        )
        for number, text in enumerate(texts)
    ]
    bad = [
        line("model", "/v1/completions", prompt="a", model="other"),
        line("route", "/v1/nothing", prompt="a"),
        line("field", "/v1/completions", prompt="a", max_tokens=-3),
        line("stream", "/v1/completions", prompt="a", stream=True),
    ]
    Store.content = "".join(json.dumps(each) + "\n\n" for each in [*bad, *good]).encode()
    assert (
        cli.main(["run-batch", "-i", store, "-o", store, str(model), "--api-key", "secret", "--max-num-seqs", "4"]) == 0
    )
    assert capsys.readouterr().err.splitlines()[-1].endswith("requests: 24, failed: 4")
    answers = [BatchRequestOutput.model_validate_json(each) for each in Store.content.decode().splitlines()]
    assert [each.custom_id for each in answers] == [each["custom_id"] for each in [*bad, *good]]
    assert len({each.id for each in answers}) == len(answers)
    for answer, status in zip(answers, (404, 404, 400, 400), strict=False):
        assert answer.response is not None and answer.response.status_code == status
        assert answer.error == answer.response.body["error"] and answer.error["message"]
    llm = make_tiny_llm(model)
    params = [SamplingParams(max_tokens=21 - number, temperature=0, logprob_token_ids=IDS) for number in range(20)]
    for answer, expected in zip(answers[len(bad) :], llm.generate(texts, params, use_tqdm=False), strict=True):
        assert answer.error is None and answer.response is not None and answer.response.status_code == 200
        choice = answer.response.body["choices"][0]
        assert choice["text"] == expected.outputs[0].text
        rows = expected.outputs[0].logprobs
        assert rows is not None
        for reading, row in zip(choice["readings"], rows, strict=True):
            for each in IDS:
                assert reading["ids"][str(each)]["logprob"] == pytest.approx(row[each].logprob, abs=1e-5)
                assert reading["ids"][str(each)]["rank"] == row[each].rank


def test_an_empty_file_has_no_answers(tmp_path: Path, no_load: None) -> None:
    source, target = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert cli.main(["run-batch", "-i", source, "-o", str(target)]) == 0
    assert target.read_text() == ""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: Invalid JSON"),
        ([{"method": "POST", "url": "/x", "body": {}}], "line 1: custom_id: Field required"),
        ([line("a", "/x"), "", {**line("b", "/x"), "method": "GET"}], "line 3: method: Input should be 'POST'"),
        ([line("a", "/x"), line("a", "/x")], "line 2: custom_id 'a' is that of line 1"),
        ([{**line("a", "/x"), "other": 1}], "line 1: other: Extra inputs are not permitted"),
    ],
)
def test_a_bad_line_is_refused_before_the_load(
    tmp_path: Path, no_load: None, capsys: pytest.CaptureFixture[str], lines: list[Any], message: str
) -> None:
    target = tmp_path / "out.jsonl"
    assert cli.main(["run-batch", "-i", written(tmp_path / "in.jsonl", *lines), "-o", str(target)]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_bad_places_are_refused(tmp_path: Path, no_load: None, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "in.jsonl", line("a", "/x"))
    for given, message in (
        (["-i", str(tmp_path / "no"), "-o", source], "there is no file"),
        (["-i", source, "-o", source], "is the input file"),
        (["-i", source, "-o", str(tmp_path / "no" / "out")], "there is no folder"),
        (["-i", source, "-o", str(tmp_path / "out"), "--enable-metrics"], "--enable-metrics is not supported"),
    ):
        assert cli.main(["run-batch", *given]) == 2
        assert message in capsys.readouterr().err
