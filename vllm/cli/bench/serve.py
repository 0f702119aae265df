"""How fast a running server answers, under a load that is the same for every server.

Prompts are random tokens, drawn from --seed, and sent as ids (to chat as the text that the server decodes them to).
completions and chat generate exactly --output-len tokens, and stream if there is more than one; score reads --num-ids
tokens at the prompt's end.

Either --concurrency requests are in flight all the time, or they are sent at --request-rate a second at random
intervals, whether earlier ones are done or not. Times are wall-clock seconds of the client. The server must be idle
otherwise; if the client shares its machine, that is part of the figures. Of a server that drafts tokens, /metrics says
how many were right.

example: vllm bench serve --url http://127.0.0.1:8000 --num-prompts 256 --concurrency 64 --output-len 64
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.cli.bench.drafts import DraftCounts, counts_of_server
from vllm.cli.bench.run import check_json_path, print_about, print_figures, write_json
from vllm.cli.generation import add_server_arguments
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least, positive
from vllm.utils.server_client import connect, served_model
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.cli.bench.load import Call, Outcome
    from vllm.utils.server_client import ServerClient

NAME = "serve"
HELP = "how fast a running server answers"

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "score": "/generative_scoring"}
_URL = "http://127.0.0.1:8000"
_MAX_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser, _URL)
    parser.add_argument("--model", metavar="NAME", help="one of the server's models; left out: its first")
    group = parser.add_argument_group("workload")
    group.add_argument("--endpoint", choices=tuple(ENDPOINTS), default="completions", help="what to ask for")
    for flag, least, default, text in (
        ("--num-prompts", 1, 64, "requests that count, of one prompt each"),
        ("--input-len", 1, 128, "tokens a prompt"),
        ("--output-len", 1, 32, "tokens to generate for each"),
        ("--num-ids", 0, 0, "logprob_token_ids to read at each of them; at least 1 for score"),
        ("--vocab-size", 1, 8192, "ids are drawn below this; at most the model's"),
        ("--warmup", 0, 4, "requests before those that count"),
        ("--seed", 0, 0, "of prompts and intervals"),
    ):
        group.add_argument(flag, metavar="N", type=at_least(least), default=default, help=text)
    load = group.add_mutually_exclusive_group()
    in_flight = "requests in flight (default: 16, or without limit)"
    load.add_argument("--concurrency", metavar="N", type=at_least(1), help=in_flight)
    load.add_argument("--request-rate", metavar="R", type=positive, help="requests a second, instead")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result, single requests included, as JSON")


def run(args: argparse.Namespace) -> int:
    import asyncio

    check_json_path(args.json)
    if args.concurrency is None and args.request_rate is None:
        args.concurrency = 16
    least = int(args.endpoint == "score")
    if not least <= args.num_ids <= args.vocab_size:
        raise CliError(f"--num-ids must be from {least} to --vocab-size={args.vocab_size}, got {args.num_ids}")
    about, outcomes, drafts = asyncio.run(_measure(args))
    return _report(args, about, outcomes, drafts)


async def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Outcome], DraftCounts]:
    from vllm.cli.bench.load import run_load

    client = connect(args)
    try:
        model = await served_model(client, args.model)
        calls = await make_calls(client, args, model["id"])
        warmup = await run_load(client, calls[: args.warmup], args.concurrency or args.warmup)
        for outcome in warmup:
            if outcome.error is not None:
                raise CliError(outcome.error)
        before = await counts_of_server(client)
        outcomes = await run_load(client, calls[args.warmup :], args.concurrency, args.request_rate, args.seed)
        drafts = (await counts_of_server(client)).since(before)
        version = await client.get("/version")
    finally:
        await client.close()
    names = (
        "endpoint", "num_prompts", "input_len", "output_len", "num_ids", "vocab_size", "concurrency", "request_rate",
        "warmup", "seed",
    )  # fmt: skip
    about = {
        "benchmark": NAME,
        "version": __version__,
        "server_version": version.get("version"),
        "model": model["id"],
        **{name: getattr(args, name) for name in names},
    }
    if args.endpoint == "score":
        about["output_len"] = None
    return about, outcomes, drafts


async def make_calls(client: ServerClient, args: argparse.Namespace, model: str) -> list[Call]:
    """The requests of the workload, the warm-up first."""
    from vllm.cli.bench.load import Call

    draw = random.Random(args.seed)
    ids = draw.sample(range(args.vocab_size), args.num_ids)
    calls = []
    for _ in range(args.warmup + args.num_prompts):
        prompt = draw.choices(range(args.vocab_size), k=args.input_len)
        if args.endpoint == "score":
            body: dict[str, Any] = {"model": model, "query": [], "items": [prompt], "label_token_ids": ids}
        elif args.endpoint == "chat":
            answer = await client.post("/detokenize", {"model": model, "tokens": prompt})
            message = {"role": "user", "content": answer["prompt"]}
            body = {**_generation(args, model, ids), "messages": [message]}
        else:
            body = {**_generation(args, model, ids), "prompt": prompt}
        calls.append(Call(ENDPOINTS[args.endpoint], body))
    return calls


def _generation(args: argparse.Namespace, model: str, ids: list[int]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": args.output_len, "temperature": 0.0, "ignore_eos": True}
    if ids:
        # Some servers ignore logprob_token_ids without logprobs.
        body |= {"logprob_token_ids": ids, "logprobs": True if args.endpoint == "chat" else 1}
    if args.output_len > 1:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _report(args: argparse.Namespace, about: dict[str, Any], outcomes: list[Outcome], drafts: DraftCounts) -> int:
    from vllm.cli.bench.load import latencies, rates

    failures = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    totals, times = rates(outcomes), latencies(outcomes)
    speculation, by_position = drafts.figures(), drafts.rates_by_position()
    print_about(about)
    shown = {**totals, **speculation, **{f"acceptance_rate_{place}": rate for place, rate in enumerate(by_position)}}
    width = max(map(len, [*shown, *times]))
    for name, value in shown.items():
        print(f"{name:{width}} {value:12.4g}")
    if times:
        print_figures(times, list(next(iter(times.values()))), width)
    first = min(outcome.began for outcome in outcomes)
    requests = [
        {
            "began": outcome.began - first,
            "seconds": outcome.ended - outcome.began if outcome.error is None else None,
            "token_times": [when - outcome.began for when in outcome.token_times],
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.output_tokens,
            "error": outcome.error,
        }
        for outcome in outcomes
    ]
    figures: dict[str, Any] = {"failures": failures.total(), "rates": totals, "latencies": times}
    if speculation:
        figures["speculation"] = {**speculation, "acceptance_rates_by_position": by_position}
    write_json(args.json, {**about, **figures, "requests": requests})
    if not failures:
        return 0
    print(f"vllm bench serve: {failures.total()} of {len(outcomes)} requests failed:", file=sys.stderr)
    for error, count in failures.most_common(_MAX_SHOWN):
        print(f"  {count}: {error}", file=sys.stderr)
    return 1
