"""Latency of /health while the server answers with full vocabularies and decodes many streams.

    python benchmarks/health_latency.py                    # 20 s on the embedded model
    python benchmarks/health_latency.py --full-vocab 16 --seconds 60

Three processes: the server, a client that makes the load and discards the answers, and this one, which requests /health
at fixed times and measures from these, so that a late answer does not hide later ones. Prints percentiles in
milliseconds without and with the load, then JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from urllib.parse import urlsplit

from common import add_counts, make_parser, print_result
from servers import serve_for_probes

from vllm.utils.server_client import ServerClient

_SETTLING_SECONDS = 5.0  # a server that has just become ready still imports modules in the background
_IDLE_SECONDS = 3.0
_DECODE_TOKENS = 256


def main() -> None:
    """Start the server, measure it idle and at work."""
    args = _parse_args()
    if args.load:
        asyncio.run(_load(args.load, args.full_vocab, args.positions, args.decode))
        return
    with serve_for_probes(args.model, "--trust-request-chat-template") as server:
        time.sleep(_SETTLING_SECONDS)
        idle = asyncio.run(_probe(server.url, _IDLE_SECONDS, args.interval))
        load = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--load", server.url], stdout=subprocess.PIPE)
        try:
            assert load.stdout is not None
            load.stdout.readline()  # each request has an answer
            busy = asyncio.run(_probe(server.url, args.seconds, args.interval))
        finally:
            load.terminate()
            load.wait()
    rows = {"idle": _percentiles(idle), "busy": _percentiles(busy)}
    for name, row in rows.items():
        print(f"{name:5}" + "".join(f"  {key} {value:8.1f}" for key, value in row.items()))
    work = {"full_vocab": args.full_vocab, "positions": args.positions, "decode": args.decode, "probes": len(busy)}
    print_result(**work, **rows, start_seconds=round(server.start_seconds, 2))


async def _probe(url: str, seconds: float, interval: float) -> list[float]:
    """Milliseconds of each probe."""
    client = ServerClient(url)

    async def ask(due: float) -> float:
        await client.get("/health")
        return (time.perf_counter() - due) * 1000

    await client.get("/health")
    tasks, began = [], time.perf_counter()
    for number in range(int(seconds / interval)):
        due = began + number * interval
        await asyncio.sleep(due - time.perf_counter())
        tasks.append(asyncio.create_task(ask(due)))
    result = list(await asyncio.gather(*tasks))
    await client.close()
    return result


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 2) for name, share in shares.items()}


async def _load(url: str, full_vocab: int, positions: int, decode: int) -> None:
    """Load the server until killed; print a line once every request has had an answer."""
    common = {"model": "model", "temperature": 0, "ignore_eos": True}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    talk = [{"role": "user", "content": "Once upon a time"}]
    whole = {**common, "max_tokens": positions}
    chat = {**whole, "logprobs": True, "top_logprobs": -1, "messages": talk, "chat_template": template}
    text = {**whole, "prompt": "The capital of France is", "logprobs": -1}
    kinds = [("/v1/completions", text), ("/v1/chat/completions", chat)]
    answered = [asyncio.Event() for _ in range(full_vocab + decode)]

    async def repeat(number: int, path: str, body: dict) -> None:
        while True:
            await _post(url, path, body, answered[number])

    tasks = [asyncio.create_task(repeat(number, *kinds[number % 2])) for number in range(full_vocab)]
    for number in range(decode):
        body = {**common, "prompt": f"Story {number}.", "max_tokens": _DECODE_TOKENS, "stream": True}
        tasks.append(asyncio.create_task(repeat(full_vocab + number, "/v1/completions", body)))

    async def announce() -> None:
        for event in answered:
            await event.wait()
        print("working", flush=True)

    await asyncio.gather(announce(), *tasks)


async def _post(url: str, path: str, body: dict, answered: asyncio.Event) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{path} answered {status.decode()}{(await reader.read(2000)).decode()}")
    answered.set()
    while await reader.read(2**20):
        pass
    writer.close()


def _parse_args() -> argparse.Namespace:
    parser = make_parser("How long /health takes while the server works.")
    add_counts(parser, full_vocab=(8, "full-vocabulary requests"), positions=(4, "positions in each of them"))
    add_counts(parser, decode=(64, "streams decoding"))
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to ask (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between probes (default: %(default)s)")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
