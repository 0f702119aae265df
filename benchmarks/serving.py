"""The servers of this package and of upstream, in turns under the same load.

    python benchmarks/serving.py --model FOLDER --upstream ENVIRONMENT
    python benchmarks/serving.py                      # this package alone, on the embedded model

The load is that of `vllm bench serve`, from this process: texts of random words, new in every repeat, the same for both
servers. Prints a table and JSON; benchmarks/README.md defines the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import add_counts, make_parser, print_result, say, usable_cores, utc_now
from report import markdown_table
from servers import OURS, UPSTREAM, Serving, serve

from vllm.cli.bench.load import Call, Outcome, latencies, rates, run_load
from vllm.utils.server_client import ServerClient, served_model

Results = dict[tuple[str, int, str], dict[str, Any]]  # (row, concurrency, server's name) -> measurements

LABEL_IDS = [4321, 1234]
CHECK_TOLERANCE = 0.25
DECODED = 64
# Requests at each concurrency: a few seconds, and every slot is used more than once.
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
    """Start the servers in turn, load them, print the table and JSON."""
    args = _parse_args()
    # An exception, so that the servers are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = [OURS] if args.upstream is None else [OURS, UPSTREAM]
    results: Results = {}
    about: dict[str, dict[str, Any]] = {name: {"start_seconds": []} for name in names}
    order = [(name, turn) for turn in range(args.turns) for name in (names if turn % 2 == 0 else names[::-1])]
    for name, group in itertools.groupby(order, key=lambda each: each[0]):
        say(f"starting {name}")
        with serve(name, args.model, "--dtype", args.dtype, upstream=args.upstream, threads=args.threads) as serving:
            say(f"{name} is ready after {serving.start_seconds:.1f} s")
            about[name]["start_seconds"].append(round(serving.start_seconds, 2))
            about[name] |= asyncio.run(_introduce(serving))
            for (_, turn), row, concurrency in itertools.product(group, args.rows, args.concurrency):
                _measure(serving, row, concurrency, turn, args, results)
    _print_table(results, names, about)
    for warning in _warnings(results, names, about):
        say(f"warning: {warning}")
    shown = ("dtype", "threads", "turns", "repeats", "scale")
    settings = {name: value for name, value in vars(args).items() if name in shown}
    print_result(benchmark="serving", servers=about, **settings, date=utc_now(), results=_rows(results))


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
    # Upstream serves a model under its path.
    return {"version": version, "model": Path(model).name, "check": round(statistics.fmean(values), 4)}


def _measure(
    serving: Serving, row: str, concurrency: int, turn: int, args: argparse.Namespace, results: Results
) -> None:
    """Warm up with as many requests as are measured, then measure the repeats of one cell in one turn."""
    count = max(concurrency, round(ROWS[row].get(concurrency, 4 * concurrency) * args.scale))
    unit = "tok/s" if row == "decode" else "req/s"
    blank: dict[str, Any] = {"unit": unit, "requests": count, "values": [], "outcomes": []}
    result = results.setdefault((row, concurrency, serving.name), blank)
    runs = asyncio.run(_run(serving, row, concurrency, count, turn, args.repeats))
    rate = "output_tokens_per_second" if row == "decode" else "requests_per_second"
    values = [rates(outcomes)[rate] for outcomes in runs]
    result["values"] += values
    result["outcomes"] += itertools.chain(*runs)
    shown = " ".join(f"{value:.1f}" for value in values)
    say(f"{serving.name} {row} at {concurrency}: {shown} {unit}")


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
    """Texts of about 40 tokens (score), of 470 with 450 in common (score_prefix), or of 32 (decode)."""
    prefix = draw.choices(WORDS, k=450) if row == "score_prefix" else []
    lengths = {"score": (36, 44), "score_prefix": (16, 24), "decode": (28, 36)}[row]
    return [" ".join([*prefix, *draw.choices(WORDS, k=draw.randint(*lengths))]) for _ in range(count)]


def make_bodies(row: str, model: str, prompts: list[str]) -> list[dict[str, Any]]:
    """A completion request a prompt; upstream requires `logprobs` with `logprob_token_ids`."""
    what: dict[str, Any] = {"max_tokens": 1, "logprob_token_ids": LABEL_IDS, "logprobs": 1}
    if row == "decode":
        what = {"max_tokens": DECODED, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    return [{"model": model, "prompt": prompt, "temperature": 0.0, **what} for prompt in prompts]


def _print_table(results: Results, names: list[str], about: dict[str, dict[str, Any]]) -> None:
    """Medians of the repeats, their ratio, and latencies over all requests in milliseconds."""
    print("; ".join(f"{name} {about[name]['version']}" for name in names))
    head = ["row", "at once", "unit", *names, *(["ratio"] if len(names) > 1 else [])]
    columns = {label: ("end_to_end_seconds", label) for label in ("p50", "p90", "p99")}
    columns |= {"first p50": ("first_token_seconds", "p50"), "token p50": ("further_token_seconds", "p50")}
    head += [f"{label} {name}" for label in columns for name in names]
    lines = []
    for row, concurrency in dict.fromkeys(key[:2] for key in results):
        cells = [results[row, concurrency, name] for name in names]
        medians = [statistics.median(cell["values"]) for cell in cells]
        line = [row, str(concurrency), cells[0]["unit"], *(f"{median:.1f}" for median in medians)]
        line += [f"{medians[0] / medians[1]:.2f}x"] if len(names) > 1 else []
        times = [latencies(cell["outcomes"]) for cell in cells]
        for kind, percentile in columns.values():
            line += [f"{each[kind][percentile] * 1e3:.1f}" if kind in each else "-" for each in times]
        lines.append(line)
    print(markdown_table(head, lines, num_text=len(head)))


def _warnings(results: Results, names: list[str], about: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Signs that the servers did different work."""
    checks = [about[name]["check"] for name in names]
    if max(checks) - min(checks) > CHECK_TOLERANCE:
        yield f"mean logprobs of the labels differ: {dict(zip(names, checks, strict=True))}"
    for row, concurrency in dict.fromkeys(key[:2] for key in results):
        outcomes = {name: results[row, concurrency, name]["outcomes"] for name in names}
        tokens = {name: sum(outcome.prompt_tokens for outcome in own) for name, own in outcomes.items()}
        if len(set(tokens.values())) > 1:
            yield f"{row} at {concurrency}: numbers of prompt tokens differ: {tokens}"


def _rows(results: Results) -> list[dict[str, Any]]:
    return [
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


def _parse_args() -> argparse.Namespace:
    parser = make_parser("This package's server against upstream's, under the same load.", dtype=True)
    parser.add_argument("--upstream", type=Path, metavar="ENV", help="environment with upstream's `vllm`")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s")
    parser.add_argument("--concurrency", default="1,8,64", help="requests in flight (default: %(default)s)")
    add_counts(parser, turns=(2, "turns of each server"), repeats=(3, "measured runs a turn"))
    add_counts(parser, threads=(usable_cores(), "cores of each server"))
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
