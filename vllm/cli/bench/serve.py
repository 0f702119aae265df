"""How fast a running server answers, under a load that is the same for every server.

Prompts are random tokens, drawn from --seed, and sent as ids (to chat as the text that the server decodes them to), or
the texts of a file (--dataset-name). completions and chat generate exactly --output-len tokens after random ones, and
stream if there is more than one; score reads --num-ids tokens at the prompt's end.

At most --concurrency requests are in flight; with --request-rate they are sent so many a second at random intervals,
whether earlier ones are done or not. Times are wall-clock seconds of the client. The server must be idle otherwise; if
the client shares its machine, that is part of the figures. Of a server that drafts tokens, /metrics says how many were
right.

example: vllm bench serve --url http://127.0.0.1:8000 --num-prompts 256 --concurrency 64 --output-len 64
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.cli.bench import serve_flags
from vllm.cli.bench.dataset import Prompt, make_prompts
from vllm.cli.bench.drafts import DraftCounts, counts_of_server
from vllm.cli.bench.run import print_about, print_figures, write_json
from vllm.cli.bench.serve_flags import ENDPOINTS
from vllm.exceptions import CliError
from vllm.utils.server_client import connect, served_model, wait_ready
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.cli.bench.load import Call, Outcome
    from vllm.utils.server_client import ServerClient

NAME = "serve"
HELP = "how fast a running server answers"

_MAX_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    serve_flags.complete(args)
    about, outcomes, drafts = asyncio.run(_measure(args))
    return _report(args, about, outcomes, drafts)


async def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Outcome], DraftCounts]:
    from vllm.cli.bench.load import run_load

    client = connect(args, args.header or ())
    try:
        await wait_ready(client, args.ready_check_timeout_sec)
        model = await served_model(client, args.model)
        calls = await make_calls(client, args, model["id"])
        warmup = await run_load(client, calls[: args.warmup], args.concurrency or args.warmup)
        for outcome in warmup:
            if outcome.error is not None:
                raise CliError(outcome.error)
        before = await counts_of_server(client)
        if args.profile:
            await client.post("/start_profile", {})
        outcomes = await run_load(
            client, calls[args.warmup :], args.concurrency, args.request_rate, args.seed, args.burstiness
        )
        if args.profile:
            await client.post("/stop_profile", {})
        drafts = (await counts_of_server(client)).since(before)
        version = await client.get("/version")
    finally:
        await client.close()
    names = (
        "endpoint", "num_prompts", "dataset_name", "input_len", "output_len", "num_ids", "vocab_size", "concurrency",
        "request_rate", "warmup", "seed",
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
    if args.dataset_name != "random":
        about["input_len"] = about["output_len"] = None
    return about, outcomes, drafts


async def make_calls(client: ServerClient, args: argparse.Namespace, model: str) -> list[Call]:
    """The requests of the workload, the warm-up first."""
    from vllm.cli.bench.load import Call

    async def tokenize(text: str) -> list[int]:
        answer = await client.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        tokens: list[int] = answer["tokens"]
        return tokens

    draw = random.Random(args.seed)
    ids = draw.sample(range(args.vocab_size), args.num_ids)
    prompts = await make_prompts(args, draw, args.num_prompts, args.vocab_size, tokenize)
    warmup = await make_prompts(args, draw, args.warmup, args.vocab_size, tokenize) if args.warmup else []
    calls = []
    in_turns = itertools.cycle(args.lora_modules or [model])
    for prompt in (*warmup, *prompts):
        is_drawn = args.lora_modules and args.lora_assignment == "random"
        name = draw.choice(args.lora_modules) if is_drawn else next(in_turns)
        body = await _body(client, args, name, prompt, ids)
        calls.append(Call(ENDPOINTS[args.endpoint], {**body, **(args.extra_body or {})}))
    return calls


async def _body(
    client: ServerClient, args: argparse.Namespace, model: str, prompt: Prompt, ids: list[int]
) -> dict[str, Any]:
    content = prompt.content
    if args.endpoint == "score":
        return {"model": model, "query": [], "items": [content], "label_token_ids": ids}
    generation = _generation(args, model, ids, prompt)
    if args.endpoint == "chat":
        if not isinstance(content, str):
            content = (await client.post("/detokenize", {"model": model, "tokens": content}))["prompt"]
        return {**generation, **_chat(args, content)}
    if args.dataset_name == "custom" and not args.skip_chat_template:
        content = (await client.post("/tokenize", {"model": model, **_chat(args, content)}))["tokens"]
    return {**generation, "prompt": content}


def _chat(args: argparse.Namespace, content: str | list[int]) -> dict[str, Any]:
    variables = {"chat_template_kwargs": args.chat_template_kwargs} if args.chat_template_kwargs else {}
    return {"messages": [{"role": "user", "content": content}], **variables}


def _generation(args: argparse.Namespace, model: str, ids: list[int], prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": prompt.output_len, **serve_flags.sampling_fields(args)}
    if args.ignore_eos or not isinstance(prompt.content, str):
        body["ignore_eos"] = True
    if args.logprobs is not None:
        is_chat = args.endpoint == "chat"
        body |= {"logprobs": True, "top_logprobs": args.logprobs} if is_chat else {"logprobs": args.logprobs}
    if ids:
        # Some servers ignore logprob_token_ids without logprobs.
        body |= {"logprobs": True if args.endpoint == "chat" else 1, **body, "logprob_token_ids": ids}
    if prompt.output_len > 1 and not args.no_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _report(args: argparse.Namespace, about: dict[str, Any], outcomes: list[Outcome], drafts: DraftCounts) -> int:
    from vllm.cli.bench.load import latencies, rates
    from vllm.cli.bench.saved import num_good, result_path, save, saved_result

    failures = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    totals, times = rates(outcomes), latencies(outcomes, args.percentile_metrics, args.metric_percentiles)
    if args.goodput:
        good = num_good(outcomes, args.goodput)
        totals["good_requests_per_second"] = good / totals["seconds"] if totals["seconds"] else 0.0
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
    if args.save_result:
        save(args, result_path(args, about["model"]), saved_result(args, about["model"], outcomes, totals["seconds"]))
    if not failures:
        return 0
    print(f"vllm bench serve: {failures.total()} of {len(outcomes)} requests failed:", file=sys.stderr)
    for error, count in failures.most_common(_MAX_SHOWN):
        print(f"  {count}: {error}", file=sys.stderr)
    return 1
