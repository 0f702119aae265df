"""Flags of `vllm serve`: what is refused before the model loads, and what a server behind all of them does, whichever
name it was started by."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import ROOT, LiveServer
from tiny_llm import make_tiny_model

from vllm.cli import main as cli

KEY = {"Authorization": "Bearer k1"}
MAX_BODY = 10_000
API_SERVER = "python -m vllm.entrypoints.openai.api_server"


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    """A folder with cert.pem and key.pem for 127.0.0.1, other.pem (another key) and locked.pem (key with password)."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    name = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    openssl("req", "-x509", *key, *name, "-keyout", "key.pem", "-out", "cert.pem")
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "other.pem")
    openssl("ec", "-in", "key.pem", "-aes256", "-passout", "pass:secret", "-out", "locked.pem")
    return folder


def assert_refused(capsys, message: str, *flags: str) -> None:
    """Exit code 2 and one line that names what is wrong."""
    try:
        code = cli.main(["serve", *flags])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("vllm serve: error: ")
    assert message in line


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    """Nothing is loaded by a command line that is wrong."""

    def fail(*arguments):
        raise AssertionError("the model would have been loaded")

    monkeypatch.setattr("vllm.server.launcher.serve", fail)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "65536"], "--port must be in 0..65535, got 65536"),
        (["--port", "-1"], "--port must be in 0..65535, got -1"),
        (["--data-parallel-size", "0"], "data_parallel_size must be an integer of at least 1, got 0"),
        (["--data-parallel-size", "100000"], "data_parallel_size must be at most "),
        (["--port", "http"], "--port"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000"),
        (["--root-path", "api"], "--root-path must begin with a slash"),
        (["--root-path", "/api/"], "--root-path must begin with a slash and not end with one"),
        (["--max-body-mib", "0"], "--max-body-mib must be positive"),
        (["--max-body-mib", "nan"], "--max-body-mib must be positive"),
        (["--max-prompts-per-request", "0"], "--max-prompts-per-request must be at least 1"),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs must be at least 0"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be at least 0"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--api-key", "k", " "], "--api-key must not be empty"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--allowed-origins", "page.example"], "--allowed-origins"),
        (["--allowed-origins", "https://page.example/"], "--allowed-origins"),
        (["--chat-template", "nowhere.jinja"], "cannot read nowhere.jinja: No such file"),
        (["--ssl-certfile", "nowhere.pem"], "--ssl-certfile: there is no file nowhere.pem"),
        (["--ssl-certfile", __file__], "--ssl-certfile"),
        (["--ssl-keyfile", __file__], "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile"),
        (["--ssl-ca-certs", __file__], "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile"),
        (["--access-log-format", "xml"], "--access-log-format"),
        (["--generation-config", "mine"], "generation_config must be 'auto', 'vllm' or a folder"),
        (["no/such/model", "--port", "0"], "no/such/model"),
        (["--max-model-len", "0", "--port", "0"], "max_model_len must be a positive integer"),
        (["--logits-processors", "no_such_module:Name", "--port", "0"], "no_such_module"),
        (["--disable-log-request"], "unrecognized arguments: --disable-log-request"),
    ],
)
def test_a_bad_flag_is_one_line(flags, message, capsys):
    assert_refused(capsys, message, *flags)


def test_a_bad_environment_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_ENGINE_HANG_TIMEOUT_S", "soon")
    assert_refused(capsys, "VLLM_ENGINE_HANG_TIMEOUT_S must be a positive number of seconds, or 0 for no limit")


def test_keys_and_certificates_that_do_not_fit(tls, capsys):
    certificate = ("--ssl-certfile", str(tls / "cert.pem"))
    for key in ("other.pem", "locked.pem"):
        assert_refused(capsys, "--ssl-certfile and --ssl-keyfile", *certificate, "--ssl-keyfile", str(tls / key))
    assert_refused(capsys, "--ssl-certfile and --ssl-keyfile", *certificate)  # it holds no key
    good = (*certificate, "--ssl-keyfile", str(tls / "key.pem"))
    assert_refused(capsys, "--ssl-ca-certs cannot be used", *good, "--ssl-ca-certs", str(tls / "key.pem"))


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert_refused(capsys, f"--host 127.0.0.1 --port {port}: Address already in use", "--port", port)


@pytest.mark.parametrize(
    ("flags", "code", "out", "message"),
    [
        (["--help"], 0, f"usage: {API_SERVER} [options] [MODEL]\n", ""),
        (["--model", "a", "--port", "65536"], 2, "", f"{API_SERVER}: error: --port must be in 0..65535, got 65536\n"),
        (["--modle=a"], 2, "", f"{API_SERVER}: error: unrecognized arguments: --modle=a; did you mean --model?"),
        (["a", "--model", "b"], 2, "", f"{API_SERVER}: error: argument MODEL: not allowed with argument --model"),
    ],
)
def test_the_entry_point_of_containers_takes_the_same_flags(flags, code, out, message):
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert result.stdout.startswith(out) and bool(result.stdout) == bool(out)
    assert result.stderr.startswith(message) and result.stderr.count("\n") == bool(message)


@pytest.fixture(scope="module")
def server(tls, tmp_path_factory) -> Iterator[LiveServer]:
    """Behind a key, TLS and a root path, for short bodies. The last test ends it."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    flags = {
        "--ssl-certfile": tls / "cert.pem",
        "--ssl-keyfile": tls / "key.pem",
        "--api-key": "k1",
        "--root-path": "/api",
        "--allowed-origins": "https://page.example",
        "--access-log-format": "json",
        "--max-body-mib": MAX_BODY / 2**20,
    }
    with LiveServer(folder, *(str(each) for flag in flags.items() for each in flag), api_server=True) as server:
        yield server


@pytest.fixture
def client(server, tls) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(tls / "cert.pem"))
    with httpx.Client(base_url=server.url, verify=context, headers=KEY) as client:
        yield client


def body_of(length: int) -> bytes:
    start = b'{"model": "tiny", "max_tokens": 1, "prompt": "'
    return start + b"z" * (length - len(start) - 2) + b'"}'


def test_a_server_behind_everything(server, client):
    assert server.url.startswith("https://")
    for prefix in ("", "/api"):
        assert client.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get(f"{prefix}/v1/models", headers={"Authorization": ""}).status_code == 401
        assert client.head(f"{prefix}/health", headers={"Authorization": ""}).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")  # its certificate is not known to everybody
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):  # closed, or reset, without an answer
        httpx.get(server.url.replace("https", "http") + "/health")
    origin = {"Origin": "https://page.example"}
    asks = {**origin, "Access-Control-Request-Method": "POST", "Authorization": ""}
    assert client.options("/v1/completions", headers=asks).status_code == 200
    answer = client.post("/v1/completions", headers={**origin, "Authorization": ""})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://page.example"


def test_a_connection_survives_answers_that_did_not_wait_for_the_body(server, client):
    def send(length: int, path: str = "/v1/completions", **headers: str) -> int:
        return client.post(path, content=body_of(length), headers=headers).status_code

    connections = set()
    for length in (100, 2 * MAX_BODY, 2_000_000):
        answers = [send(length, Authorization="Bearer no"), send(length, "/nowhere"), send(length)]
        assert answers == [401, 404, 200 if length == 100 else 413]
        answer = client.get("/v1/models")
        assert answer.status_code == 200
        connections.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(connections) == 1

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield body_of(1000)

    assert client.post("/v1/completions", content=chunks()).status_code == 413
    assert client.get("/v1/models").status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("expect", ["Expect:", "Expect: 100-continue"])
@pytest.mark.parametrize("connection", ["Connection: keep-alive", "Connection: close"])
def test_and_so_does_curl(server, tls, tmp_path, expect, connection):
    """Two requests of one curl; with Expect it waits to be asked for the body, which it never is."""
    (tmp_path / "body").write_bytes(body_of(2_000_000))
    one = ["--cacert", str(tls / "cert.pem"), "-s", "-w", "\n%{http_code}\n", "-H", "Authorization: Bearer k1"]
    one += ["-H", "Content-Type: application/json", "-H", expect, "-H", connection]
    one += ["--data-binary", f"@{tmp_path / 'body'}"]
    two = [*one, f"{server.url}/v1/completions", "--next", *one, f"{server.url}/nowhere"]
    result = subprocess.run(["curl", *two], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    first, first_code, second, second_code = result.stdout.split("\n")[:4]
    assert (first_code, second_code) == ("413", "404")
    assert json.loads(first)["error"]["code"] == "body_too_large"
    assert json.loads(second)["error"]["code"] == "not_found"


def test_what_is_not_http_is_an_error_of_the_same_shape(server, tls):
    context = ssl.create_default_context(cafile=str(tls / "cert.pem"))
    port = int(server.url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        connection.makefile("rb") as answer,
    ):
        connection.sendall(b"nonsense\r\n\r\n")
        head, _, body = answer.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"\r\nconnection: close" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_what_the_log_has_of_all_this(server, client):
    assert client.get("/v1/models", headers={"X-Request-Id": "the-last"}).headers["x-request-id"] == "the-last"
    deadline = time.monotonic() + 10
    # A line is written behind its answer.
    while (last := json.loads(server.access_log().splitlines()[-1]))["request_id"] != "the-last":
        assert time.monotonic() < deadline, last
        time.sleep(0.01)
    assert last["path"] == "/api/v1/models"
    assert "k1" not in server.access_log() + server.log()
    assert "zzz" not in server.access_log() + server.log()
    done = ("the model found and its configuration read", "tokenizer read", "weights read and packed")
    assert all(re.search(rf"\] {work}: \d+\.\d s\n", server.log()) for work in done), server.log()


def test_and_its_end_is_an_orderly_one(server):
    assert server.stop() == 0
    assert "Traceback" not in server.log()
