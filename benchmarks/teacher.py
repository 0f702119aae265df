"""The cost of a teacher's readings of prompts, as shares of plain prefill's tokens a second.

    python benchmarks/teacher.py                                            # the embedded model
    python benchmarks/teacher.py --model FOLDER --upstream ENVIRONMENT --transformers

8 prompts of 1,024 fresh tokens a run, max_tokens=1:

prefill          nothing is read
tokens           the prompt's own tokens (`prompt_logprobs=0`)
ids64, ids256    so many other ids at each position, anywhere in the vocabulary, with their ranks
ids256_no_ranks  without (`logprob_ranks=False`)
likely256        each position's most likely ids, as a student's are (upstream and transformers: top-k)
top256           the 256 most likely tokens, which the engine finds (`prompt_logprobs=256`)

Upstream reads no chosen ids a position: its rows of ids are `prompt_logprobs` of as many. All engines run a row in
turns, in alternating order; shares are of the same repeat. Prints a table of medians; the last line of stdout is JSON.
On a busy machine the shares of processor time are the ones to go by.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import add_counts, describe_machine, make_parser, say, some_of, utc_now
from engines import Engine, EngineError, EngineProcess, find_python
from report import markdown_table
from workloads import TEACHER_ROWS, EngineOptions


def main() -> None:
    """Measure and print."""
    parser = make_parser("Shares of prefill that a teacher's readings leave.", dtype=True)
    add_counts(parser, repeats=(3, "measured runs a row"))
    parser.add_argument("--rows", type=some_of(TEACHER_ROWS, "row"), default=list(TEACHER_ROWS))
    parser.add_argument("--upstream", type=find_python, metavar="ENVIRONMENT", help="compare with upstream vLLM")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the amount of work, for trying out")
    args = parser.parse_args()
    rows = list(dict.fromkeys(["prefill", *args.rows]))
    engines = [("ours", "ours", sys.executable)]
    if args.upstream:
        engines.append(("upstream", "upstream", args.upstream))
    if args.transformers:
        engines.append(("transformers", "transformers", sys.executable))
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for name, kind, python in engines:
            say(f"start {name}")
            engine = Engine(name, python, EngineOptions(kind, args.model, args.dtype, cores))
            processes[name] = stack.enter_context(EngineProcess(engine, logs))
        found = measure(processes, rows, args.repeats, args.scale)
    print(markdown_table(["engine, row", "tok/s", "share", "share of processor time"], lines(found), num_text=1))
    print(json.dumps({"rows": found, "scale": args.scale, "date": utc_now(), "machine": describe_machine()}))


def measure(
    processes: dict[str, EngineProcess], rows: list[str], repeats: int, scale: float
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Engine -> row -> its answers by repeat. A row that an engine fails is left out."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {row: [] for row in rows} for name in processes}
    for repeat in range(-1, repeats):
        for row in rows[:: -1 if repeat % 2 else 1]:
            for name, process in processes.items():
                if row not in found[name]:
                    continue
                try:
                    answer = process.measure(row, repeat, scale)
                except EngineError as error:
                    say(str(error))
                    del found[name][row]
                    continue
                say(f"{row} {repeat}: {name} {answer['seconds']:.2f} s")
                if repeat >= 0:
                    found[name][row].append(answer)
    return found


def lines(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[list[str]]:
    """For each engine and row the medians of tokens a second and of the shares, in wall-clock and processor time."""
    result = []
    for name, rows in found.items():
        plain = rows["prefill"]
        for row, answers in rows.items():
            rate = statistics.median(answer["amount"] / answer["seconds"] for answer in answers)
            shares = [
                statistics.median(one[key] / other[key] for one, other in zip(plain, answers, strict=True))
                for key in ("seconds", "own_cpu_seconds")
            ]
            result.append([f"{name}, {row}", f"{rate:,.0f}", *(f"{share:.2f}" for share in shares)])
    return result


if __name__ == "__main__":
    main()
