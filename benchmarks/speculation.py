"""The gain of drafting: tokens a second with speculation, over those without.

    python benchmarks/speculation.py                                            # the embedded model
    python benchmarks/speculation.py --model FOLDER --upstream ENVIRONMENT --llama-cpp ENVIRONMENT --gguf FILE

copies1, copies16    3 requests one after another, 16 at once: answers that copy a passage, 64 tokens each
answers1, answers16  the same of questions whose answers do not copy; the most likely tokens, which may recur
drawn1, drawn16      the same at temperature 1
..._ids              20 ids are read at every position

With `--methods draft` a model drafts that is made here: the target's first layers, `--draft-layers` of them, with its
embeddings, final norm and head.

Texts are in speculation_texts.py. Every engine runs with and without speculation, all of them in turns, in alternating
order; a ratio is of one engine and repeat. Upstream and llama.cpp draft by n-grams; llama.cpp's own prompt lookup makes
the drafts, and its C interface verifies them. Prints a table of medians; the last line of stdout is JSON, in which
`answers` is a hash of our tokens: the same with and without. On a busy machine the ratios of processor time are the
ones to go by.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import add_counts, describe_machine, make_parser, say, some_of, utc_now
from engines import Engine, EngineProcess, find_python
from report import markdown_table
from speculation_texts import COPY_TASKS, PASSAGES, QUESTIONS
from teacher import measure
from workloads import PROMPTS_VARIABLE, SPECULATION_ROWS, EngineOptions

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "suffix": {"method": "suffix"},
    "draft": {"method": "draft_model", "num_speculative_tokens": 4},
}


def main() -> None:
    """Measure and print."""
    parser = make_parser("What drafting brings.", dtype=True)
    add_counts(parser, repeats=(5, "measured runs a row"))
    parser.add_argument("--rows", type=some_of(SPECULATION_ROWS, "row"), default=list(SPECULATION_ROWS))
    parser.add_argument("--methods", type=some_of(METHODS, "method"), default=["ngram", "suffix"])
    parser.add_argument("--draft-layers", type=int, default=10, metavar="N", help="layers of the model that drafts")
    parser.add_argument("--upstream", type=find_python, metavar="ENVIRONMENT", help="compare with upstream vLLM")
    parser.add_argument("--llama-cpp", type=find_python, metavar="ENVIRONMENT", help="compare with llama.cpp")
    parser.add_argument("--gguf", metavar="FILE", help="the model for llama.cpp")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the amount of work, for trying out")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {PROMPTS_VARIABLE: str(folder / "prompts.json")}
        (folder / "prompts.json").write_text(json.dumps(make_prompts(args.model, args.rows, args.repeats)))

        def started(name: str, kind: str, python: str, model: str | None, speculative: Any) -> EngineProcess:
            say(f"start {name}")
            options = EngineOptions(kind, model, args.dtype, cores, speculative=speculative, environment=environment)
            return stack.enter_context(EngineProcess(Engine(name, python, options), folder))

        processes = {"ours": started("ours", "ours", sys.executable, args.model, None)}
        for method in args.methods:
            name = f"ours {method}"
            settings = METHODS[method]
            if method == "draft":
                settings = settings | {"model": str(first_layers(args.model, args.draft_layers, folder / "draft"))}
            processes[name] = started(name, "ours", sys.executable, args.model, settings)
        for kind, python, model in (("upstream", args.upstream, args.model), ("llama.cpp", args.llama_cpp, args.gguf)):
            if python:
                processes[kind] = started(kind, kind, python, model, None)
                processes[f"{kind} ngram"] = started(f"{kind} ngram", kind, python, model, NGRAM)
        found = measure(processes, args.rows, args.repeats, args.scale)
    columns = ["engine, row", "tok/s", "over without", "over without, processor time", "right / drafted"]
    print(markdown_table(columns, lines(found), num_text=1))
    print(json.dumps({"rows": found, "scale": args.scale, "date": utc_now(), "machine": describe_machine()}))


def first_layers(model: str | None, count: int, folder: Path) -> Path:
    """A checkpoint in `folder` with the first `count` of the model's layers, and all else that it has."""
    from safetensors.torch import save_file

    from vllm import EngineArgs
    from vllm.config.checkpoint.weight_files import iterate_tensors, shard_files

    source = Path(EngineArgs(model=model).create_engine_config().model_config.path)
    folder.mkdir()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}), encoding="utf-8")
    if (generation := source / "generation_config.json").is_file():
        shutil.copy(generation, folder)
    tensors = {}
    for name, tensor in iterate_tensors(shard_files(source)):
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < count:
            tensors[name] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_prompts(model: str | None, rows: list[str], repeats: int) -> dict[str, list[list[list[int]]]]:
    """Token ids by row, repeat (from the warm-up on) and request; no two prompts are alike, but those of
    the same kind, repeat and number differ by a number only."""
    from vllm import EngineArgs
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(EngineArgs(model=model).create_engine_config().model_config)
    found: dict[str, list[list[list[int]]]] = {}
    number = 0
    for row in rows:
        copies, _, count, _, _ = SPECULATION_ROWS[row]
        found[row] = []
        for repeat in range(repeats + 1):
            texts = []
            for request in range(count):
                place = repeat * count + request
                text = f"{COPY_TASKS[place % 3]}\n\n{PASSAGES[place % 8]}" if copies else QUESTIONS[place % 16]
                texts.append(f"Task {number}. {text}")
                number += 1
            found[row].append([chat_ids(tokenizer, text) for text in texts])
    return found


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """The model's chat template around a question."""
    messages = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(whole, add_special_tokens=False))


def lines(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[list[str]]:
    """For each engine and row the median rate, and over the same engine without speculation, by wall-clock and by
    processor time; the share of drafted tokens that were right, of ours."""
    result = []
    for name, rows in found.items():
        plain = found[name.split()[0]]
        for row, answers in rows.items():
            rate = statistics.median(answer["amount"] / answer["seconds"] for answer in answers)
            ratios = ["", ""]
            if plain is not rows and row in plain:
                ratios = [f"{_ratio(plain[row], answers, key):.2f}" for key in ("seconds", "own_cpu_seconds")]
            drafted = sum(answer.get("drafted", 0) for answer in answers)
            right = f"{sum(answer['accepted'] for answer in answers)} / {drafted}" if drafted else ""
            result.append([f"{name}, {row}", f"{rate:,.1f}", *ratios, right])
    return result


def _ratio(slow: list[dict[str, Any]], fast: list[dict[str, Any]], key: str) -> float:
    """The median of how many times as much the first ones took, by repeat."""
    return statistics.median(one[key] / other[key] for one, other in zip(slow, fast, strict=True))


if __name__ == "__main__":
    main()
