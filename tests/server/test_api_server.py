"""A server that a program builds around an engine of its own, as trainers do."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import signal
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn
from tiny_llm import make_tiny_model

import vllm.entrypoints.cli.serve
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.api_server import build_app, init_app_state
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "logprob_token_ids": [3, 4], "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def parse(*flags: str) -> argparse.Namespace:
    """As verl does it: a parser of its own, with the subcommands of vllm's modules."""
    parser = FlexibleArgumentParser(description="a trainer's")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    commands = {}
    for command in vllm.entrypoints.cli.serve.cmd_init():
        command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
        commands[command.name] = command
    args = parser.parse_args(["serve", *flags])
    args.model = args.model_tag
    commands[args.subparser].validate(args)
    return args


@pytest.fixture(scope="module")
def args(model) -> argparse.Namespace:
    return parse(
        str(model), "--dtype", "float32", "--max_model_len", "128", "--served-model-name", "tiny", "--max-logprobs=-1",
        "--enable_sleep_mode", "--no-page", "--logprobs_mode", "processed_logprobs", "--enable-log-requests",
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(args):
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    config.parallel_config.data_parallel_master_port = 12345
    options = {
        "enable_log_requests": engine_args.enable_log_requests,
        "disable_log_stats": engine_args.disable_log_stats,
    }
    assert set(options) <= set(inspect.signature(AsyncLLM.from_vllm_config).parameters)
    found = AsyncLLM.from_vllm_config(vllm_config=config, usage_context=UsageContext.OPENAI_API_SERVER, **options)
    yield found
    found.shutdown()


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    (reading,) = answer.json()["choices"][0]["readings"]
    assert list(reading["ids"]) == ["3", "4"]


def test_an_app_around_an_engine(engine, args):
    async def run() -> None:
        app = build_app(args, await engine.get_supported_tasks())
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        early = await client.post("/v1/completions", json=BODY)
        assert early.status_code == 503 and early.json()["error"]["message"].startswith("the server is starting")
        assert early.headers["retry-after"] == "1"
        await init_app_state(engine, app.state, args)
        assert app.state.engine_client is engine and app.state.args is args

        @app.get("/own")
        async def own() -> dict[str, str]:
            return {"answer": "own"}

        check(await client.post("/v1/completions", json=BODY))
        assert (await client.get("/own")).json() == {"answer": "own"}
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["tiny"]
        assert "tiny" in (await client.get("/openapi.json")).text

        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient() as other:
            check(await other.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY))
        server.should_exit = True
        await serving

    asyncio.run(run())


def test_a_served_app_of_ours_until_sigterm(model, args, tmp_path):
    """run_server: as `vllm serve`, but in the caller's loop, who goes on afterwards with signal handlers as before. A
    share of its traffic is audited as there."""
    audited = {"audit_share": 1.0, "audit_reference": str(model), "audit_log": str(tmp_path / "log")}
    args = argparse.Namespace(**{**vars(args), **audited, "logprobs_mode": "raw_logprobs"})
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    async def run() -> None:
        args.port = 0
        address, listener = api_server.setup_server(args)
        serving = asyncio.create_task(api_server.run_server_worker(address, listener, args, timeout_keep_alive=5))
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                assert not serving.done(), serving.exception()
                try:
                    check(await client.post(f"{address}/v1/completions", json=BODY))
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
            assert "vllm:audit_rows_total" in (await client.get(f"{address}/metrics")).text
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(serving, 30)

    timers = {each for each in threading.enumerate() if isinstance(each, threading.Timer)}
    asyncio.run(run())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    # Such as the one that ends a server's own process some seconds later.
    assert not {each for each in threading.enumerate() if isinstance(each, threading.Timer)} - timers


def test_a_plain_parser():
    args = api_server.make_arg_parser(FlexibleArgumentParser()).parse_args(["--port", "0", "--api-key", "a", "b"])
    assert (args.port, args.api_key, args.model_tag, args.model) == (0, ["a", "b"], None, None)
    assert args.enable_prefix_caching is True


def test_a_namespace_that_lacks_flags_has_their_defaults():
    app = build_app(argparse.Namespace(served_model_name=["given"]))
    assert app.state.serving.model_names == ["given"]


def test_what_is_not_done_is_refused(args):
    with pytest.raises(ValueError, match="--max-log-len must be at least 0"):
        parse("somewhere", "--max-log-len", "-1")
    with pytest.raises(ValueError, match="--lora-modules takes NAME=PATH"):
        build_app(argparse.Namespace(lora_modules=["a"]))
    with pytest.raises(ValueError, match="headless is not supported"):
        run_headless(args)
    with pytest.raises(ValueError, match="headless=True is not supported"):
        AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=True)
    with pytest.raises(NotImplementedError, match="gpt-oss"):
        get_encoding()

    async def other_process() -> None:
        async with api_server.build_async_engine_client(args, client_config={"input_address": "x"}):
            pass

    with pytest.raises(ValueError, match="client_config"):
        asyncio.run(other_process())
