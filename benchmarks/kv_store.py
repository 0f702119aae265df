"""Seconds that a store of KV blocks saves a new process, and what writing costs one that never reads it back.

    python benchmarks/kv_store.py                                  # all three, two to three times 6.5 GB of memory
    python benchmarks/kv_store.py --skip large cost --prefix 2000  # less of it

1. small: a prefix of 6,000 tokens, the embedded model, bfloat16, 64 prompts behind it.
2. large: one of 2,000 tokens, a random model of Qwen2.5-3B's shape, whose packed weights are kept in --folder, and
   four prompts.
   Processes score these, one token each with readings: without a store, with an empty one, and with the one that the
   second wrote. Seconds are from the first prompt to the last reading; starts are beside them. The digests of all
   readings must be equal. The speedup is that of the clock; beside it is the processor's.
3. cost: pairs of processes, with an empty store and without, in turns, compute prompts that nobody shares. Seconds are
   from the first prompt to the engine's end, when all is written. The share is the median of the pairs' ratios, less 1,
   of the processor's time, which other processes disturb less, and of the clock.

Prints one JSON line.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import add_counts, make_parser, print_result, say, use_all_cores
from starting import SIZES, make_model

_PARTS = ("small", "large", "cost")


def main() -> None:
    """Run the processes, and print the figures."""
    parser = make_parser("What a store of KV blocks saves a new process.", dtype=True)
    parser.add_argument("--shape", choices=SIZES, default="3B", help="of the large model")
    parser.add_argument("--skip", nargs="+", choices=_PARTS, default=[], help="parts to leave out")
    parser.add_argument("--folder", type=Path, help="where stores are made")
    parser.add_argument("--child", help="what a process is to do, as JSON")
    counts = {"prefix": (6000, "tokens of the prefix"), "prompts": (64, "behind it"), "tail": (8, "tokens of each")}
    large = {"large_prefix": (2000, "tokens of the large model's"), "large_prompts": (4, "behind it")}
    add_counts(parser, **counts, **large, rounds=(5, "pairs of the cost"))
    args = parser.parse_args()
    use_all_cores()
    os.environ.setdefault("VLLM_GGUF_DEQUANTIZE", "1")
    if args.child:
        print(json.dumps(_child(json.loads(args.child))))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        small = {"model": args.model, "prefix": args.prefix, "prompts": args.prompts, "dtype": args.dtype}
        small["tail"] = args.tail
        if "small" not in args.skip:
            found["small"] = _compared(small, f"{folder}/small")
        if "large" not in args.skip:
            sizes = {"prefix": args.large_prefix, "prompts": args.large_prompts}
            make_model(Path(folder) / "model", *SIZES[args.shape])
            os.environ["VLLM_PACKED_CACHE"] = f"{folder}/packed"
            found["large"] = _compared(small | sizes | {"model": f"{folder}/model"}, f"{folder}/large")
        if "cost" not in args.skip:
            found["cost"] = _cost(small | {"is_cost": True}, folder, args.rounds)
    print_result(benchmark="kv_store", model=args.model, shape=args.shape, **found)


def _compared(job: dict[str, Any], store: str) -> dict[str, Any]:
    """The figures of a process without a store, of one that fills it, and of one that finds it full."""
    rows = {}
    for name, own in {"without": "", "writing": store, "warm": store}.items():
        rows[name] = _run({**job, "store": own})
        say(f"{name}: {rows[name]}")
    if len({row.pop("digest") for row in rows.values()}) > 1:
        sys.exit("readings differ")
    ratio = {name: round(rows["without"][name] / rows["warm"][name], 2) for name in ("seconds", "cpu_seconds")}
    return {"job": job, "rows": rows, "speedup": ratio["seconds"], "cpu_speedup": ratio["cpu_seconds"]}


def _cost(job: dict[str, Any], folder: str, rounds: int) -> dict[str, Any]:
    """The seconds of pairs of processes, with a store and without, and what it costs of them."""
    rows: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    for number in range(rounds):
        for name in sorted(rows, reverse=number % 2 == 1):
            store = f"{folder}/cost{number}" if name == "with" else ""
            rows[name].append(_run({**job, "store": store, "seed": number}))
            say(f"{name}: {rows[name][-1]}")
            # The next one's pages are those that this one's files had: others may be the first use of a virtual
            # machine's memory, which the host has to find.
            shutil.rmtree(store, ignore_errors=True)
    shares = {}
    for kind in ("seconds", "cpu_seconds"):
        pairs = zip(rows["with"], rows["without"], strict=True)
        ratios = sorted(one[kind] / other[kind] - 1 for one, other in pairs)
        shares[kind] = round(ratios[len(ratios) // 2], 4)
    return {"rows": rows, "share": shares["seconds"], "cpu_share": shares["cpu_seconds"]}


def _run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(job: dict[str, Any]) -> dict[str, Any]:
    if job.get("is_cost"):
        prompts = [_tokens(f"{job['seed']} {each}", job["prefix"] // 4) for each in range(4)]
    else:
        prefix = _tokens(0, job["prefix"])
        prompts = [[*prefix, *_tokens(1 + each, job["tail"])] for each in range(job["prompts"])]
    began = time.perf_counter()
    llm = _engine(job, job["store"])
    started, cpu_started = time.perf_counter(), time.process_time()
    outputs = _score(llm, prompts)
    if job.get("is_cost"):
        llm.llm_engine.engine_core.shutdown()
    ended, cpu_seconds = time.perf_counter(), time.process_time() - cpu_started
    digest = hashlib.sha256()
    for output in outputs:
        readings = output.outputs[0].logprobs
        for array in (readings.token_ids, readings.logprobs, readings.logits, readings.ranks, readings.lse):
            digest.update(array.tobytes())
    return {
        "start_seconds": round(started - began, 2),
        "seconds": round(ended - started, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "computed_tokens": sum(len(each) for each in prompts) - sum(each.num_cached_tokens for each in outputs),
        "digest": digest.hexdigest(),
    }


def _engine(job: dict[str, Any], store: str) -> Any:
    from vllm import LLM

    limits = {"max_model_len": job["prefix"] + job["tail"] + 8}
    return LLM(job["model"], dtype=job["dtype"], kv_store=store, skip_tokenizer_init=True, **limits)


def _score(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=[5, 6], detokenize=False)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return outputs


def _tokens(seed: int | str, count: int) -> list[int]:
    import random

    source = random.Random(seed)
    return [source.randrange(100, 30000) for _ in range(count)]


if __name__ == "__main__":
    main()
