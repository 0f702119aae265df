"""The cost of answers bound to a JSON schema, against free text.

    python benchmarks/structured.py                                         # the embedded model
    python benchmarks/structured.py --model FOLDER --upstream ENVIRONMENT --outlines ENVIRONMENT
    python benchmarks/structured.py --llama-cpp ENVIRONMENT --gguf FILE     # the same model

free64, json64              64 requests of 60 to 80 fresh tokens decode 64 tokens each, greedily
free64_drawn, json64_drawn  the same at temperature 1
free_first, json_first      32 requests, one after another: time to the first token; the form is compiled already

The form is a list of records (structured_forms.py), longer than what is generated; llama.cpp gets it as GBNF and
transformers by outlines' logits processor. All engines run a row in turns, in alternating
order; a share is of the rates of one engine and repeat, form over free text. Prints a table of medians; the last line
of stdout is JSON. On a busy machine the shares of processor time are the ones to go by.
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
from engines import Engine, EngineProcess, find_python
from report import markdown_table
from teacher import measure
from workloads import STRUCTURED_ROWS, EngineOptions

PAIRS = {"json64": "free64", "json64_drawn": "free64_drawn", "json_first": "free_first"}


def main() -> None:
    """Measure and print."""
    parser = make_parser("Shares of free text's speed that answers of a form have.", dtype=True)
    add_counts(parser, repeats=(5, "measured runs a row"))
    parser.add_argument("--rows", type=some_of(STRUCTURED_ROWS, "row"), default=list(STRUCTURED_ROWS))
    parser.add_argument("--upstream", type=find_python, metavar="ENVIRONMENT", help="compare with upstream vLLM")
    parser.add_argument("--outlines", type=find_python, metavar="ENVIRONMENT", help="compare with it on transformers")
    parser.add_argument("--llama-cpp", type=find_python, metavar="ENVIRONMENT", help="compare with llama.cpp")
    parser.add_argument("--gguf", metavar="FILE", help="the model for llama.cpp")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the amount of work, for trying out")
    args = parser.parse_args()
    engines = [("ours", "ours", sys.executable, args.model)]
    if args.upstream:
        engines.append(("upstream", "upstream", args.upstream, args.model))
    if args.outlines:
        engines.append(("outlines", "transformers", args.outlines, args.model))
    if args.llama_cpp:
        engines.append(("llama.cpp", "llama.cpp", args.llama_cpp, args.gguf))
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for name, kind, python, model in engines:
            say(f"start {name}")
            engine = Engine(name, python, EngineOptions(kind, model, args.dtype, cores))
            processes[name] = stack.enter_context(EngineProcess(engine, logs))
        found = measure(processes, args.rows, args.repeats, args.scale)
    columns = ["engine, row", "tok/s or req/s", "share of free text", "share of processor time", "ours over it"]
    print(markdown_table(columns, lines(found), num_text=1))
    print(json.dumps({"rows": found, "scale": args.scale, "date": utc_now(), "machine": describe_machine()}))


def lines(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[list[str]]:
    """For each engine and row the median rate, the form's over free text's by wall-clock and by processor time, and our
    rate over the engine's."""
    result = []
    for name, rows in found.items():
        for row, answers in rows.items():
            shares = ["", ""]
            if (free := rows.get(PAIRS.get(row, ""))) is not None:
                shares = [f"{_ratio(free, answers, key):.2f}" for key in ("seconds", "own_cpu_seconds")]
            ours = found["ours"].get(row)
            over = "" if name == "ours" or ours is None else f"{_ratio(answers, ours, 'seconds'):.2f}"
            rate = statistics.median(answer["amount"] / answer["seconds"] for answer in answers)
            result.append([f"{name}, {row}", f"{rate:,.1f}", *shares, over])
    return result


def _ratio(slow: list[dict[str, Any]], fast: list[dict[str, Any]], key: str) -> float:
    """The median of how many times as much the first ones took, by repeat."""
    return statistics.median(one[key] / other[key] for one, other in zip(slow, fast, strict=True))


if __name__ == "__main__":
    main()
