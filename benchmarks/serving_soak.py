"""Memory of a server and its engine core over thousands of requests of every kind, some of which are cancelled.

    python benchmarks/serving_soak.py                             # 5,000 requests, the embedded model
    python benchmarks/serving_soak.py --model FOLDER --requests 20000

Prints the resident memory of both processes, then JSON. Exits with 1 if a process grows steadily by more than
`--limit-mib` after the first `--warmup` requests, which fill caches. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from common import add_counts, make_parser, print_result
from servers import Serving, serve_for_probes

from vllm.utils.server_client import ServerClient

_WORDS = (
    "the of and to in is was for on that with as it be by are this from at which have not or had but an all".split()
)
_LABELS = [" the", " of course"]
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

# Fields beside the prompt.
_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 3, "logprobs": 5},
    {"logprob_token_ids": [7, 9, 11], "max_tokens": 1},
    {"logprobs": 2, "echo": True},
    {"prompt_logprobs": 1},
    {"logprobs": -1, "max_tokens": 1},
    {"max_tokens": 0, "logprob_token_ids": [5, 6]},
    {"stop": ["e"], "top_p": 0.9},
)
_LEAVE_EVERY = 10
_PROCESSES = ("server", "core")
_BLOCKS = 512  # of the KV cache: few, so that all are resident after the warm-up


def main() -> None:
    """Start the server, send, watch."""
    args = _parse_args()
    flags = ("--num-gpu-blocks-override", str(_BLOCKS), "--trust-request-chat-template")
    with serve_for_probes(args.model, *flags) as server:
        began = time.monotonic()
        samples = asyncio.run(_run(server, args))
        seconds = time.monotonic() - began
    settled = [sample for sample in samples if sample["requests"] >= args.warmup]
    growth = {name: round(_growth([sample[name] for sample in settled]), 2) for name in _PROCESSES}
    total = {name: round(settled[-1][name] - settled[0][name], 1) for name in _PROCESSES}
    is_flat = max(growth.values()) < args.limit_mib
    figures = {"growth_mib": growth, "total_mib": total, "is_flat": is_flat, "samples": samples}
    print_result(requests=args.requests, seconds=round(seconds, 1), **figures)
    raise SystemExit(not is_flat)


async def _run(server: Serving, args: argparse.Namespace) -> list[dict[str, float]]:
    client = ServerClient(server.url)
    requests = iter(_requests(args.requests))
    samples: list[dict[str, float]] = []
    num_done = 0

    async def work() -> None:
        nonlocal num_done
        for number, path, body in requests:
            await _send(client, path, body, leaves=number % _LEAVE_EVERY == 0)
            num_done += 1
            if num_done % args.every == 0:
                samples.append({"requests": num_done, **{k: round(v, 1) for k, v in server.rss_mib().items()}})
                print("  ".join(f"{name} {value:8.1f}" for name, value in samples[-1].items()), flush=True)

    await asyncio.gather(*(work() for _ in range(args.concurrency)))
    await client.close()
    return samples


async def _send(client: ServerClient, path: str, body: dict[str, Any], leaves: bool) -> None:
    if not body.get("stream"):
        await client.post(path, body)
        return
    async with aclosing(client.events(path, body)) as events:  # type: ignore[type-var]
        async for _ in events:
            if leaves:
                return


def _requests(count: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number, path, body), the same in every run."""
    rng = random.Random(0)
    for number in range(count):
        text = " ".join(rng.choices(_WORDS, k=rng.randint(1, 30)))
        common = {"model": "model", "seed": rng.randrange(2**31), "max_tokens": rng.randint(1, 8)}
        # After the completions: chat, then scoring.
        kind = number % (len(_COMPLETIONS) + 2)
        streams = number % _LEAVE_EVERY == 0 or rng.random() < 0.3
        if kind < len(_COMPLETIONS):
            yield number, "/v1/completions", {**common, "prompt": text, "stream": streams, **_COMPLETIONS[kind]}
        elif kind == len(_COMPLETIONS):
            talk = [{"role": "user", "content": text}]
            body = {**common, "messages": talk, "chat_template": _TEMPLATE, "logprobs": True, "top_logprobs": 3}
            body["stream"] = streams
            yield number, "/v1/chat/completions", body
        else:
            items = [" ".join(rng.choices(_WORDS, k=5)) for _ in range(rng.randint(1, 4))]
            body = {"model": "model", "query": text, "items": items, "labels": _LABELS}
            yield number, "/generative_scoring", body


def _growth(values: list[float]) -> float:
    """MiB over all samples at the median growth between two: a leak grows in every step, while working memory for the
    largest batch is allocated once."""
    steps = [later - earlier for earlier, later in itertools.pairwise(values)]
    return statistics.median(steps) * len(steps)


def _parse_args() -> argparse.Namespace:
    parser = make_parser("Memory of a server over thousands of requests.")
    add_counts(parser, requests=(5000, "how many"), warmup=(1000, "those that fill caches"))
    add_counts(parser, concurrency=(32, "at once"), every=(250, "requests between samples"))
    parser.add_argument("--limit-mib", type=float, default=4.0, help="most steady growth (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
