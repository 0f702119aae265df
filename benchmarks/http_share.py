"""The rate of a server as a share of LLM.generate's, on the same short prompts.

    python benchmarks/http_share.py --model FOLDER       # about a minute

Prompts are serving.py's of `score`: texts of about 40 tokens, two ids read, one token. The server has 64 requests in
flight over as many connections that stay open. Its client is this process, which shares the cores with it: requests
are written before the clock starts, and of an answer only the status and the length are read. The two sides take turns,
each repeat on texts that neither has seen; the other one waits meanwhile. Prints a table and JSON. CPU times are
of a request: they say what the share would be where nothing else uses the cores.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import signal
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import add_counts, make_parser, print_result, say, usable_cores, utc_now
from engines import cpu_seconds, rest, wake
from servers import OURS, serve
from serving import LABEL_IDS, make_prompts

CONNECTIONS = 64
_SIDES = ("generate", "server")
_PIECE = 65536


def main() -> None:
    """Start both sides, measure them in turns, print the table and JSON."""
    args = _parse_args()
    # An exception, so that the server is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from vllm import LLM

    llm = LLM(args.model, dtype=args.dtype, enable_prefix_caching=True)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
    flags = ("--dtype", args.dtype, "--served-model-name", "model", "--no-access-log", *args.flags.split())
    with serve(OURS, args.model, *flags, threads=args.threads) as serving:
        for repeat in range(-1, args.repeats):
            texts = make_prompts("score", args.requests, random.Random(f"http share/{repeat}"))
            for side in _SIDES if repeat % 2 == 0 else _SIDES[::-1]:
                if side == "generate":
                    rest(serving.pid)
                    run = _generate(llm, texts)
                    wake(serving.pid)
                else:
                    run = _serve(serving.url, serving.pid, texts)
                say(f"{side} {run['rate']:.1f} requests/s")
                if repeat >= 0:
                    runs[side].append(run)
    pairs = zip(*(runs[side] for side in _SIDES), strict=True)
    shares = [server["rate"] / generate["rate"] for generate, server in pairs]
    for side, own in runs.items():
        rate, *times = ((name, statistics.median(run[name] for run in own)) for name in own[0])
        shown = ", ".join(f"{name} {seconds * 1e6:,.0f} us" for name, seconds in times)
        print(f"{side:9} {rate[1]:7.1f} requests/s; CPU time: {shown}")
    print(f"share     {statistics.median(shares):7.3f} ({min(shares):.3f} to {max(shares):.3f})")
    settings = {"threads": args.threads, "flags": args.flags, "requests": args.requests}
    print_result(benchmark="http_share", **settings, runs=runs, shares=shares, date=utc_now())


def _generate(llm: Any, texts: list[str]) -> dict[str, float]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=LABEL_IDS)
    cpu, began = time.process_time(), time.perf_counter()
    outputs = llm.generate(texts, params, use_tqdm=False)
    values = [[output.outputs[0].logprobs[0][each].logprob for each in LABEL_IDS] for output in outputs]
    seconds = time.perf_counter() - began
    assert len(values) == len(texts)
    return {"rate": len(texts) / seconds, "process": (time.process_time() - cpu) / len(texts)}


def _serve(url: str, pid: int, texts: list[str]) -> dict[str, float]:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    body = {"model": "model", "max_tokens": 1, "temperature": 0.0, "logprob_token_ids": LABEL_IDS}
    bodies = [json.dumps({**body, "prompt": text}).encode() for text in texts]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
    requests = [f"{head}{len(each)}\r\n\r\n".encode() + each for each in bodies]
    server, client, began = cpu_seconds(pid), time.process_time(), time.perf_counter()
    own = _cpu_of(pid)
    _load((host, port), requests)
    seconds = time.perf_counter() - began
    spent, own = cpu_seconds(pid) - server, _cpu_of(pid) - own
    return {
        "rate": len(texts) / seconds,
        "API process": own / len(texts),
        "other processes": (spent - own) / len(texts),
        "client": (time.process_time() - client) / len(texts),
    }


def _load(address: tuple[Any, Any], requests: list[bytes]) -> None:
    """Send all requests over CONNECTIONS connections, each the next one as soon as it has its answer."""
    waiting = iter(requests)
    with selectors.DefaultSelector() as selector:
        for _ in range(CONNECTIONS):
            connection = socket.create_connection(address)
            selector.register(connection, selectors.EVENT_READ, bytearray())
            _send_next(selector, connection, waiting)
        while selector.get_map():
            for key, _ in selector.select():
                connection, received = key.fileobj, key.data
                piece = connection.recv(_PIECE)  # type: ignore[union-attr]
                received += piece
                end = received.find(b"\r\n\r\n")
                if not piece or (end >= 0 and not received.startswith(b"HTTP/1.1 200")):
                    raise SystemExit(f"the server answered {bytes(received[:500])!r}")
                if end >= 0 and len(received) >= end + 4 + _length(received[:end]):
                    received.clear()
                    _send_next(selector, connection, waiting)


def _send_next(selector: selectors.BaseSelector, connection: Any, waiting: Any) -> None:
    request = next(waiting, None)
    if request is None:
        selector.unregister(connection)
        connection.close()
    else:
        connection.sendall(request)


def _length(head: bytearray) -> int:
    return int(head.lower().partition(b"content-length:")[2].split(None, 1)[0])


def _cpu_of(pid: int) -> float:
    # The clock id of another process's CPU time on Linux, as from clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)


def _parse_args() -> argparse.Namespace:
    parser = make_parser("A server's rate as a share of LLM.generate's on the same short prompts.", dtype=True)
    add_counts(parser, repeats=(3, "measured runs"), requests=(512, "of a run"))
    add_counts(parser, threads=(usable_cores(), "cores of the server"))
    parser.add_argument("--flags", default="", help="further ones of `vllm serve`, with blanks between")
    args = parser.parse_args()
    if min(args.repeats, args.requests) < 1:
        parser.error("a number that is not above 0")
    if args.model is not None:
        args.model = str(Path(args.model).resolve())
    return args


if __name__ == "__main__":
    main()
