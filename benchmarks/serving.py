"""Serve one model with this package and with upstream's, one after another, under the same load; compare.

    python benchmarks/serving.py --model FOLDER --upstream ENVIRONMENT
    python benchmarks/serving.py                      # this package alone, on the embedded model

The load is that of `vllm bench serve`, from this process, over HTTP: texts of random words, other ones in every
repeat, the same for both servers. The last line of stdout is the result as JSON; benchmarks/README.md says what each
row is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import describe_machine, usable_cores, utc_now
from report import markdown_table
from servers import OURS, UPSTREAM, Serving, serve

from vllm.entrypoints.cli.bench.load import Call, Outcome, latencies, rates, run_load
from vllm.utils.server_client import ServerClient, served_model

LABEL_IDS = [4321, 1234]
CHECK_TOLERANCE = 0.25
DECODED = 64
# Requests at each concurrency: enough for a few seconds, and for every slot to be used more than once.
ROWS: dict[str, dict[int, int]] = {
    "score": {1: 64, 8: 256, 64: 512},
    "score_prefix": {1: 32, 8: 128, 64: 256},
    "decode": {1: 4, 8: 16, 64: 128},
}
# Words that are one token each in most vocabularies.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office door "
    "health person art war history party result change morning reason research girl guy moment air teacher force order"
).split()


def main() -> None:
    """Start the servers in turn, load them, print the table and the JSON line."""
    args = _parse_args()
    # So that whoever ends this process early leaves no server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = [OURS] if args.upstream is None else [OURS, UPSTREAM]
    results: dict[tuple[str, int, str], dict[str, Any]] = {}
    about: dict[str, dict[str, Any]] = {name: {"start_seconds": []} for name in names}
    # The order turns round, so that neither always has the machine as the other left it.
    order = [(name, turn) for turn in range(args.turns) for name in (names if turn % 2 == 0 else names[::-1])]
    for name, group in itertools.groupby(order, key=lambda each: each[0]):
        _say(f"starting {name}")
        with serve(name, args.model, "--dtype", args.dtype, upstream=args.upstream, threads=args.threads) as serving:
            _say(f"{name} is ready after {serving.start_seconds:.1f} s")
            about[name]["start_seconds"].append(round(serving.start_seconds, 2))
            about[name] |= asyncio.run(_introduce(serving))
            for _, turn in group:
                for row, concurrency in _cells(args):
                    _measure(serving, row, concurrency, turn, args, results)
    _print_table(results, names, about)
    for warning in _warnings(results, names, about):
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(_summary(args, results, about)), flush=True)


def _cells(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    return ((row, concurrency) for row in args.rows for concurrency in args.concurrency)


async def _introduce(serving: Serving) -> dict[str, Any]:
    """The server's version, and the mean logprob that it reads for labels after fixed prompts."""
    client = ServerClient(serving.url)
    try:
        model = (await served_model(client, None))["id"]
        prompts = make_prompts("score", 8, random.Random("check"))
        # Keys by id: two tokens of one text would be one key.
        calls = [{**body, "return_tokens_as_token_ids": True} for body in make_bodies("score", model, prompts)]
        answers = [await client.post("/v1/completions", body) for body in calls]
        tops = [answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in answers]
        values = [top[f"token_id:{token_id}"] for top in tops for token_id in LABEL_IDS]
        version = (await client.get("/version"))["version"]
    finally:
        await client.close()
    # Some serve a model under its path, which is the machine's own affair.
    return {"version": version, "model": Path(model).name, "check": round(statistics.fmean(values), 4)}


def _measure(
    serving: Serving,
    row: str,
    concurrency: int,
    turn: int,
    args: argparse.Namespace,
    results: dict[tuple[str, int, str], dict[str, Any]],
) -> None:
    """Warm up with as many requests as are measured, then measure the repeats of one cell in one turn."""
    count = max(concurrency, round(ROWS[row].get(concurrency, 4 * concurrency) * args.scale))
    result = results.setdefault(
        (row, concurrency, serving.name),
        {"unit": "tok/s" if row == "decode" else "req/s", "requests": count, "values": [], "outcomes": []},
    )
    runs = asyncio.run(_run(serving, row, concurrency, count, turn, args.repeats))
    rate = "output_tokens_per_second" if row == "decode" else "requests_per_second"
    values = [rates(outcomes)[rate] for outcomes in runs]
    result["values"] += values
    result["outcomes"] += itertools.chain(*runs)
    shown = " ".join(f"{value:.1f}" for value in values)
    _say(f"{serving.name} {row} at {concurrency}: {shown} {result['unit']}")


async def _run(
    serving: Serving, row: str, concurrency: int, count: int, turn: int, repeats: int
) -> list[list[Outcome]]:
    client = ServerClient(serving.url)
    try:
        model = (await served_model(client, None))["id"]
        runs = []
        for repeat in range(-1, repeats):
            prompts = make_prompts(row, count, random.Random(f"{row}/{concurrency}/{turn}/{repeat}"))
            calls = [Call("/v1/completions", body) for body in make_bodies(row, model, prompts)]
            outcomes = await run_load(client, calls, concurrency)
            failed = [outcome.error for outcome in outcomes if outcome.error is not None]
            if failed:
                raise SystemExit(f"{serving.name}, {row} at {concurrency}: {len(failed)} failed, first: {failed[0]}")
            wanted = DECODED if row == "decode" else 1
            if any(outcome.output_tokens != wanted for outcome in outcomes):
                raise SystemExit(f"{serving.name}, {row} at {concurrency}: an answer has other than {wanted} tokens")
            runs.append(outcomes)
    finally:
        await client.close()
    return runs[1:]


def make_prompts(row: str, count: int, draw: random.Random) -> list[str]:
    """Texts of about 40 tokens (score), 470 of which 450 are common to all (score_prefix), or 32 (decode)."""
    prefix = draw.choices(WORDS, k=450) if row == "score_prefix" else []
    lengths = {"score": (36, 44), "score_prefix": (16, 24), "decode": (28, 36)}[row]
    return [" ".join([*prefix, *draw.choices(WORDS, k=draw.randint(*lengths))]) for _ in range(count)]


def make_bodies(row: str, model: str, prompts: list[str]) -> list[dict[str, Any]]:
    """A completion request a prompt; upstream's server reads chosen ids only where logprobs are asked for."""
    if row == "decode":
        what: dict[str, Any] = {
            "max_tokens": DECODED, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
    else:
        what = {"max_tokens": 1, "logprob_token_ids": LABEL_IDS, "logprobs": 1}
    return [{"model": model, "prompt": prompt, "temperature": 0.0, **what} for prompt in prompts]


def _print_table(
    results: dict[tuple[str, int, str], dict[str, Any]], names: list[str], about: dict[str, dict[str, Any]]
) -> None:
    """Medians of the repeats, their ratio, and latencies over all requests, in milliseconds."""
    print("; ".join(f"{name} {about[name]['version']}" for name in names))
    head = ["row", "at once", "unit", *names, *(["ratio"] if len(names) > 1 else [])]
    head += [f"{label} {name}" for label in ("p50", "p90", "p99", "first p50", "token p50") for name in names]
    lines = []
    for row, concurrency in dict.fromkeys(key[:2] for key in results):
        cells = [results[row, concurrency, name] for name in names]
        medians = [statistics.median(cell["values"]) for cell in cells]
        line = [row, str(concurrency), cells[0]["unit"], *(f"{median:.1f}" for median in medians)]
        line += [f"{medians[0] / medians[1]:.2f}x"] if len(names) > 1 else []
        times = [latencies(cell["outcomes"]) for cell in cells]
        for kind, percentile in (
            ("end_to_end_seconds", "p50"),
            ("end_to_end_seconds", "p90"),
            ("end_to_end_seconds", "p99"),
            ("first_token_seconds", "p50"),
            ("further_token_seconds", "p50"),
        ):
            line += [f"{each[kind][percentile] * 1e3:.1f}" if kind in each else "-" for each in times]
        lines.append(line)
    print(markdown_table(head, lines, num_text=len(head)))


def _warnings(
    results: dict[tuple[str, int, str], dict[str, Any]], names: list[str], about: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Why the servers may not have done the same work."""
    checks = [about[name]["check"] for name in names]
    if max(checks) - min(checks) > CHECK_TOLERANCE:
        yield f"mean logprobs of the labels differ: {dict(zip(names, checks, strict=True))}"
    for row, concurrency in dict.fromkeys(key[:2] for key in results):
        tokens = {
            name: sum(outcome.prompt_tokens for outcome in results[row, concurrency, name]["outcomes"])
            for name in names
        }
        if len(set(tokens.values())) > 1:
            yield f"{row} at {concurrency}: numbers of prompt tokens differ: {tokens}"


def _summary(
    args: argparse.Namespace, results: dict[tuple[str, int, str], dict[str, Any]], about: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    rows = [
        {
            "row": row,
            "concurrency": concurrency,
            "server": name,
            "unit": result["unit"],
            "requests": result["requests"],
            "median": round(statistics.median(result["values"]), 2),
            "best": round(max(result["values"]), 2),
            "values": [round(value, 2) for value in result["values"]],
            "latencies": latencies(result["outcomes"]),
        }
        for (row, concurrency, name), result in results.items()
    ]
    return {
        "benchmark": "serving",
        "servers": about,
        "dtype": args.dtype,
        "threads": args.threads,
        "turns": args.turns,
        "repeats": args.repeats,
        "scale": args.scale,
        "machine": describe_machine(),
        "date": utc_now(),
        "results": rows,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="This package's server against upstream's, under the same load.")
    parser.add_argument("--model", help="folder of the model; default: the embedded model (this package alone)")
    parser.add_argument("--upstream", type=Path, metavar="ENV", help="environment with upstream's `vllm`")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s")
    parser.add_argument("--concurrency", default="1,8,64", help="requests in flight (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="times each server has its turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs a turn (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: all usable cores")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests, for trying out")
    args = parser.parse_args()
    args.rows = args.rows.split(",")
    args.concurrency = [int(each) for each in args.concurrency.split(",")]
    if set(args.rows) - set(ROWS) or min(args.concurrency) < 1 or min(args.turns, args.repeats, args.scale) <= 0:
        parser.error("an unknown row, or a number that is not above 0")
    if args.upstream is not None:
        if args.model is None:
            parser.error("--upstream needs --model FOLDER")
        if not os.access(args.upstream / "bin" / "vllm", os.X_OK):
            parser.error(f"--upstream: there is no {args.upstream / 'bin' / 'vllm'}")
    if args.model is not None:
        args.model = str(Path(args.model).resolve())
    return args


if __name__ == "__main__":
    main()
