"""CPU time of the API server's process per request and per token.

    python benchmarks/api_cost.py      # about a minute

The core process runs a scripted engine without a model: each step gives every request a token and its readings. The
load is that of serving.py, from this process, with 64 requests in flight. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from common import add_counts, make_parser, print_result, some_of

from vllm.cli.bench.load import Call, run_load
from vllm.utils.server_client import ServerClient

CONCURRENCY = 64
DECODED = 64
STEP_SECONDS = 0.04  # minimum, so that the server and the client complete one step before the next
# Number of requests, and the unit of cost.
CASES = {"score": (512, "request"), "stream": (128, "token"), "whole": (128, "token")}
_TOKENS = range(300, 364)


class ScriptedCore:
    """Replaces EngineCore in core_proc.py; it is its own scheduler."""

    def __init__(self, config: Any) -> None:
        self.executor = SimpleNamespace(num_blocks=4096)
        self.scheduler = self
        self.requests: dict[str, Any] = {}
        self._num_generated: dict[str, int] = {}
        self._due = 0.0

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self._num_generated[request.request_id] = 0

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {"num_running": len(self.requests), "weight_version": 0, "time": time.monotonic()}

    def step(self) -> list[Any]:
        """A token for every request."""
        from vllm.v1.messages import EngineCoreOutput

        time.sleep(max(0.0, self._due - time.monotonic()))
        now = time.monotonic()
        self._due = now + STEP_SECONDS
        readers = [request for request in self.requests.values() if request.sampling_params.num_logprobs is not None]
        lists = self._readings(readers) if readers else None
        rows = {request.request_id: index for index, request in enumerate(readers)}
        outputs = []
        for request_id, request in tuple(self.requests.items()):
            number = self._num_generated[request_id] = self._num_generated[request_id] + 1
            finished = number >= request.sampling_params.max_tokens
            row = None if lists is None or request_id not in rows else [(lists, rows[request_id])]
            token = _TOKENS[number % len(_TOKENS)]
            reason = "length" if finished else None
            outputs.append(EngineCoreOutput(request_id, [token], row, reason, scheduled_time=now))
            if finished:
                del self.requests[request_id], self._num_generated[request_id]
        return outputs

    def _readings(self, readers: list[Any]) -> Any:
        """A row a request: the token, the top-k, the requested ids."""
        import numpy as np

        from vllm.logprobs.lists import LogprobsLists

        num_topk = max(request.sampling_params.logprobs or 0 for request in readers)
        num_ids = max(len(request.sampling_params.logprob_token_ids or ()) for request in readers)
        shape = (len(readers), 1 + num_topk + num_ids)
        token_ids = np.zeros(shape, np.int32)
        for row, request in enumerate(readers):
            token = _TOKENS[(self._num_generated[request.request_id] + 1) % len(_TOKENS)]
            own = request.sampling_params.logprob_token_ids or []
            token_ids[row] = [token, *range(token, token + num_topk), *own, *[0] * (num_ids - len(own))]
        logits = np.full(shape, -1.5, np.float32)
        return LogprobsLists(token_ids, logits - 2, logits, np.ones(shape, np.int32), logits[:, 0] * 0 + 2, num_topk)


def main() -> None:
    """Start the server, load it, print a table and JSON."""
    args = _parse_args()
    if args.role is not None:
        sys.exit({"server": _serve, "core": _be_core}[args.role](args))
    command = [sys.executable, __file__, "--role", "server"]
    command += ["--model", args.model] if args.model else []
    # At this level it logs its URL.
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        result = asyncio.run(_measure(_url(server), server.pid, args))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    for name, row in result.items():
        server_us, client_us = f"{row['server_us']:8.1f} us of the server", f"{row['client_us']:7.1f} us of the client"
        print(f"{name:7} {server_us}, {client_us} {row['per']}")
    print_result(benchmark="api_cost", concurrency=CONCURRENCY, **result)


async def _measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    client = ServerClient(url)
    result = {}
    try:
        for case in args.cases:
            number, unit = CASES[case]
            runs = []
            for repeat in range(-1, args.repeats):
                calls = _calls(case, number, random.Random(f"{case}/{repeat}"))
                began, own = _cpu_seconds(pid), time.process_time()
                outcomes = await run_load(client, calls, CONCURRENCY)
                spent, own = _cpu_seconds(pid) - began, time.process_time() - own
                wanted = 1 if case == "score" else DECODED
                wrong = [each.error for each in outcomes if each.error is not None or each.output_tokens != wanted]
                if wrong:
                    raise SystemExit(f"{case}: {len(wrong)} answers are wrong, the first: {wrong[0]}")
                count = number * (1 if unit == "request" else DECODED)
                runs.append((spent / count * 1e6, own / count * 1e6))
            server, own_runs = zip(*runs[1:], strict=True)
            result[case] = {
                "server_us": round(statistics.median(server), 1),
                "client_us": round(statistics.median(own_runs), 1),
                "runs": [round(each, 1) for each in server],
                "per": f"a {unit}",
            }
    finally:
        await client.close()
    return result


def _calls(case: str, number: int, draw: random.Random) -> list[Call]:
    from serving import make_bodies, make_prompts

    row = "score" if case == "score" else "decode"
    bodies = make_bodies(row, "model", make_prompts(row, number, draw))
    if case == "whole":
        bodies = [{name: body[name] for name in body if not name.startswith("stream")} for body in bodies]
    return [Call("/v1/completions", body) for body in bodies]


def _cpu_seconds(pid: int) -> float:
    # The clock id of another process's CPU time on Linux, as from clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    text = ""
    while line := server.stderr.readline():
        text += line
        found = re.search(r"ready: (http://\S+?)[ ;,]", line)
        if found is not None:
            return found[1]
    raise SystemExit(f"the server did not start:\n{text}")


def _serve(args: argparse.Namespace) -> int:
    """Run the server with a scripted core."""
    from vllm import AsyncEngineArgs
    from vllm.server.launcher import bind, serve
    from vllm.server.server_args import ServerArgs

    command = [sys.executable, __file__, "--role", "core"]
    core = subprocess.Popen(command, stdin=subprocess.PIPE)
    options = {"model": args.model} if args.model else {}
    config = AsyncEngineArgs(**options, max_logprobs=-1).create_engine_config()
    server_args = ServerArgs(served_model_name=["model"], access_log=False)
    return serve(config, server_args, None, bind("127.0.0.1", 0), [core], lambda: None)


def _be_core(args: argparse.Namespace) -> int:
    from vllm.v1.engine.core_process import loop as core_proc

    core_proc.EngineCore = ScriptedCore  # type: ignore[assignment, misc]
    status = core_proc.main()
    sys.stderr.flush()
    os._exit(status)


def _parse_args() -> argparse.Namespace:
    parser = make_parser("CPU time of the API server's process; of the model only the tokenizer is used.")
    add_counts(parser, repeats=(3, "measured runs a case"))
    names = f"some of {','.join(CASES)}"
    parser.add_argument("--cases", type=some_of(CASES, "case"), default=list(CASES), help=names)
    parser.add_argument("--role", choices=("server", "core"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


if __name__ == "__main__":
    main()
