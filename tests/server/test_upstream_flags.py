"""Upstream's flags of the server: each is honoured, or refused by name before a model loads."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer
from tiny_llm import make_tiny_model

from vllm.cli import main as cli
from vllm.cli import serve
from vllm.cli.frame import CommandParser, be_command
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.server.server_args import ServerArgs
from vllm.server.upstream_server_args import UpstreamServerArgs

# The flags of upstream's BaseFrontendArgs and FrontendArgs, and of its `serve` command.
UPSTREAM = """
    lora_modules chat_template chat_template_content_format trust_request_chat_template trust_request_mm_kwargs
    default_chat_template_kwargs reasoning_effort_map response_role return_tokens_as_token_ids enable_auto_tool_choice
    exclude_tools_when_tool_choice_none tool_call_parser tool_parser_plugin tool_strict_level tool_server max_log_len
    enable_prompt_tokens_details enable_per_request_metrics enable_server_load_tracking enable_force_include_usage
    sse_keep_alive_interval enable_tokenizer_info_endpoint enable_log_outputs enable_log_deltas
    cohere_is_reasoning_model cohere_format anthropic_disabled_thinking_effort log_error_stack tokens_only
    enable_scale_out fingerprint_mode fingerprint_value host port grpc_port data_parallel_supervisor_port
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold uds
    uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints allow_credentials allowed_origins
    allowed_methods allowed_headers api_key ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs
    ssl_ciphers root_path middleware enable_request_id_headers disable_fastapi_docs h11_max_incomplete_event_size
    h11_max_header_count enable_offline_docs enable_flash_late_interaction headless api_server_count grpc
    enable_log_requests otlp_traces_endpoint
""".split()

MIDDLEWARE = """
class Header:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def sent(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"yes")]
            await send(message)

        await self.app(scope, receive, sent)


async def header(request, call_next):
    answer = await call_next(request)
    answer.headers["x-function"] = "yes"
    return answer


neither = 7
"""


def parse(*flags: str) -> argparse.Namespace:
    parser = CommandParser(prog="vllm serve")
    be_command(parser, serve)
    return parser.parse_args(flags)


def server_args(*flags: str) -> ServerArgs:
    args = ServerArgs.from_cli_args(parse(*flags))
    serve.check_args(args)
    return args


def test_every_argument_of_upstreams_server_is_known():
    known = {item.name for item in (*fields(ServerArgs), *fields(EngineArgs))}
    assert [name for name in UPSTREAM if name not in known] == []


def test_defaults_are_taken_and_ask_for_nothing():
    for item in fields(UpstreamServerArgs):
        value = item.default
        if isinstance(value, bool):
            spelled = [f"--{'' if value else 'no-'}{item.name}"]
        elif value is None or value == "":
            continue
        else:
            spelled = [f"--{item.name}", str(value)]
        assert getattr(server_args(*spelled), item.name) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--lora-modules", "a"],
            "--lora-modules takes NAME=PATH or a JSON object with name, path and base_model_name",
        ),
        (["--lora-modules", "a=b"], "--lora-modules: LoRA adapters are not enabled"),
        (["--tool-server", "demo"], "tool_server='demo' is not supported: this server calls no tools"),
        (["--tool-call-parser", "nobody"], "tool parser 'nobody' is not known; there are "),
        (["--reasoning-parser", "nobody"], "reasoning parser 'nobody' is not known; there are "),
        (["--tool-parser-plugin", "/none/such.py"], "the tool parsers of /none/such.py cannot be loaded"),
        (["--headless"], "headless=True is not supported: one process serves all replicas"),
        (["--api-server-count", "4"], "api_server_count=4 is not supported"),
        (["-asc", "2"], "api_server_count=2 is not supported"),
        (["--grpc-port", "50051"], "grpc_port=50051 is not supported: the server speaks HTTP"),
        (["--sse-keep-alive-interval", "5"], "sse_keep_alive_interval=5 is not supported"),
        (["--fingerprint-mode", "custom"], "--fingerprint-mode custom and --fingerprint-value VALUE need each other"),
        (["--fingerprint-value", "x"], "--fingerprint-mode custom and --fingerprint-value VALUE need each other"),
        (["--max-log-len", "-1"], "--max-log-len must be at least 0"),
        (["--ssl-ciphers", "ALL"], "--ssl-cert-reqs, --ssl-ciphers and --enable-ssl-refresh need"),
        (["--middleware", "nowhere.Name"], "--middleware nowhere.Name cannot be imported"),
        (["--middleware", "json.dumps"], "--middleware json.dumps must be a class or an async function"),
        (["--allowed-methods", ""], "--allowed-methods must not be empty"),
    ],
)
def test_what_is_not_done_is_refused_by_name(flags, message, capsys):
    assert cli.main(["serve", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm serve: error: {message}")


def test_what_changes_nothing_is_a_warning(monkeypatch):
    told = []
    monkeypatch.setattr("vllm.engine.arguments.warn_once", lambda logger, message, *parts: told.append(message % parts))
    server_args("--h11-max-header-count", "100")
    assert told == [
        "h11_max_header_count=100 changes nothing: requests are parsed by httptools, whose limits are its own"
    ]


def test_spellings():
    args = parse("--max_model_len", "4k", "-tp", "2", "-O3", "--chat_template=a_b", "--disable-log-requests", "M_x")
    assert (args.max_model_len, args.tensor_parallel_size, args.optimization_level) == (4000, 2, "3")
    assert (args.chat_template, args.model, args.enable_log_requests) == ("a_b", "M_x", False)
    assert parse("--task", "generate", "--disable-frontend-multiprocessing", "--model", "m").model == "m"
    assert parse("--enable-prefix-caching").enable_prefix_caching is True
    assert parse("--disable-prefix-caching").enable_prefix_caching is False
    assert parse("--no_enable_prefix_caching").enable_prefix_caching is False


def test_objects_in_parts(capsys):
    args = parse(
        "--pooler-config.task", "token_embed", "--pooler_config.use_activation=false", "--hf-overrides.a.b", "[1]"
    )
    assert json.loads(args.pooler_config) == {"task": "token_embed", "use_activation": False}
    assert args.hf_overrides == {"a": {"b": [1]}}
    with pytest.raises(SystemExit):
        parse("--hf-overrides", "{}", "--hf-overrides.a", "1")
    assert "give one of them" in capsys.readouterr().err


def test_a_file_of_flags(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("max_model_len: 64\nmiddleware: [a.b, c.d]\nserved-model-name: [x]\nport: 9\n")
    args = parse("--config", str(path), "--port", "10")
    assert (args.max_model_len, args.middleware, args.served_model_name, args.port) == (64, ["a.b", "c.d"], ["x"], 10)


def test_values_as_upstream_writes_them():
    args = server_args(
        "--allowed-methods", '["GET", "POST"]', "--host", "None", "--middleware", "email.message.Message"
    )
    assert (args.allowed_methods, args.host) == (["GET", "POST"], "127.0.0.1")
    repeated = parse("--middleware", "a", "--middleware", "b").middleware
    assert repeated == ["a", "b"]
    assert server_args("--default-chat-template-kwargs", '{"a": 1}').default_chat_template_kwargs == {"a": 1}
    assert server_args("--disable-uvicorn-access-log").logs_requests is False
    with pytest.raises(CliError, match="must be 0, or with --ssl-ca-certs 1 or 2"):
        server_args("--ssl-certfile", __file__, "--ssl-cert-reqs", "3")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    """Over a Unix socket, with middleware and logs."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    (folder / "our_middleware.py").write_text(MIDDLEWARE)
    flags = [
        "--uds", str(folder / "socket"), "--middleware", "our_middleware.Header", "--middleware=our_middleware.header",
        "--chat_template", "{{ messages[0].content }}", "--disable-fastapi-docs", "--enable-log-requests",
        "--enable_log_outputs", "--max-log-len", "3", "--disable-access-log-for-endpoints", "/version,/load",
        "--fingerprint-mode=custom", "--fingerprint-value", "mine", "--response-role", "model",
        "--enable_force_include_usage", "--allowed-methods", '["GET"]',
    ]  # fmt: skip
    with LiveServer(folder, *flags, env={"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}, wait=False) as server:
        deadline = time.monotonic() + 180
        while "ready: " not in server.log():
            assert server.process.poll() is None and time.monotonic() < deadline, server.log()
            time.sleep(0.05)
        yield server


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    path = server.log().partition("http+unix://")[2].partition(" ")[0].rstrip(";")
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://server", timeout=60) as client:
        yield client


def test_a_server_behind_these_flags(server, client):
    answer = client.get("/version")
    assert (answer.headers["x-class"], answer.headers["x-function"]) == ("yes", "yes")
    assert answer.headers["x-request-id"]
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client.get(path).status_code == 404
    asks = {"Origin": "http://page.example", "Access-Control-Request-Method": "DELETE"}
    assert client.options("/v1/models", headers=asks).status_code == 400
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    log = server.access_log()
    assert "/v1/models" in log and "/version" not in log and "/load" not in log


def test_answers_behind_these_flags(server, client):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["role"] == "model"
    assert answer["system_fingerprint"] == "mine"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    text = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    first, *_, last = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert first["choices"][0]["delta"]["role"] == "model"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)
    assert first["system_fingerprint"] == last["system_fingerprint"] == "mine"
    log = server.log()
    assert "'hel'" in log and "hello" not in log
    assert "max_tokens=2" in log
    # The whole answer and the stream alike.
    shown, ids = first_output(log), [line.rpartition(": ")[2] for line in log.splitlines() if "output chatcmpl" in line]
    assert ids == [shown, shown]
    assert shown == f"{answer['choices'][0]['message']['content'][:3]!r}, ids {shown_ids(shown)} of 2, length"


def first_output(log: str) -> str:
    return next(line.rpartition(": ")[2] for line in log.splitlines() if "output chatcmpl" in line)


def shown_ids(line: str) -> str:
    return line.partition(", ids ")[2].partition(" of ")[0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_over_the_socket(server, client):
    path = server.log().partition("http+unix://")[2].partition(" ")[0].rstrip(";")
    command = ["curl", "-s", "--unix-socket", path, "http://localhost/v1/models"]
    assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["data"][0]["id"] == "tiny"
    assert Path(path).is_socket()
