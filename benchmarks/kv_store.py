"""Seconds that a store of KV blocks saves a new process, and the cost of writing to one that never reads it back.

    python benchmarks/kv_store.py                                  # the embedded model, bfloat16, 6,000 tokens
    python benchmarks/kv_store.py --shape 3B --prefix 2000 --prompts 4 --tail 8 --skip-cost   # random weights

Processes score prompts behind a common prefix, one token each with readings: without a store, with an empty one, and
with the one that the second wrote. Seconds are from the first prompt to the last reading; starts are beside them. The
digests of all readings must be equal. The cost: an engine with a store and one without compute different prompts in
turns in one process; the ratio is that of their processor time, which other processes disturb little. Prints one JSON
line.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import add_counts, make_parser, print_result, say, use_all_cores

# Hidden and intermediate size, layers, query and key heads, vocabulary: Llama 3.2 3B's.
_SHAPES = {"3B": (3072, 8192, 28, 24, 8, 128256), "0.1B": (512, 2048, 12, 8, 2, 32000)}


def main() -> None:
    """Run the processes, and print the figures."""
    parser = make_parser("What a store of KV blocks saves a new process.", dtype=True)
    parser.add_argument("--shape", choices=_SHAPES, help="random weights of this size in place of --model")
    parser.add_argument("--skip-without", action="store_true", help="compare with the process that writes")
    parser.add_argument("--skip-cost", action="store_true", help="do not measure what writing costs")
    parser.add_argument("--folder", type=Path, help="where stores are made")
    parser.add_argument("--child", help="what a process is to do, as JSON")
    counts = {"prefix": (6000, "tokens of the prefix"), "prompts": (64, "behind it"), "tail": (8, "tokens of each")}
    add_counts(parser, **counts, rounds=(6, "of the cost"))
    args = parser.parse_args()
    use_all_cores()
    os.environ.setdefault("VLLM_GGUF_DEQUANTIZE", "1")
    if args.child:
        print(json.dumps(_child(json.loads(args.child))))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        job = {"dtype": args.dtype, **{name: getattr(args, name) for name in (*counts, "rounds")}}
        job |= _model(args, Path(folder))
        rows = {}
        stores = {"without": "", "writing": f"{folder}/store", "warm": f"{folder}/store"}
        if args.skip_without:
            del stores["without"]
        for name, store in stores.items():
            rows[name] = _run({**job, "store": store})
            say(f"{name}: {rows[name]}")
        if len({row.pop("digest") for row in rows.values()}) > 1:
            sys.exit("readings differ")
        speedup = rows[next(iter(stores))]["seconds"] / rows["warm"]["seconds"]
        cost = None if args.skip_cost else _run({**job, "store": f"{folder}/cost", "cost": True})
    print_result(benchmark="kv_store", model=args.shape or args.model, job=job, rows=rows, speedup=speedup, cost=cost)


def _model(args: Any, folder: Path) -> dict[str, Any]:
    if args.shape is None:
        return {"model": args.model, "load_format": "auto"}
    hidden, inner, layers, heads, kv_heads, vocab = _SHAPES[args.shape]
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab}
    fields |= {"intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    fields |= {"num_key_value_heads": kv_heads, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    fields |= {"hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rope_theta": 5e5}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(fields))
    return {"model": f"{folder}/model", "load_format": "dummy"}


def _run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(job: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    if job.get("cost"):
        return _cost(job)
    llm = _engine(job, job["store"])
    started, cpu_started = time.perf_counter(), time.process_time()
    prompts = [[*_tokens(0, job["prefix"]), *_tokens(1 + each, job["tail"])] for each in range(job["prompts"])]
    outputs = _score(llm, prompts)
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


def _cost(job: dict[str, Any]) -> dict[str, Any]:
    """Processor seconds of prompts that nobody shares, with a store and without, in turns."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    engines = {"with": _engine(job, job["store"]), "without": _engine(job, "")}
    for number in range(job["rounds"] + 1):
        for name in sorted(engines, reverse=number % 2 == 1):
            prompts = [_tokens(f"{name}{number}{each}", job["prefix"] // 4) for each in range(4)]
            began = time.process_time()
            _score(engines[name], prompts)
            if name == "with":
                engines[name].llm_engine.engine_core.scheduler.guests[-1].store.flush()
            seconds[name].append(time.process_time() - began)
    # The first round touches memory.
    ratios = [one / other - 1 for one, other in zip(seconds["with"][1:], seconds["without"][1:], strict=True)]
    return {"cpu_seconds": seconds, "share": sorted(ratios)[len(ratios) // 2]}


def _engine(job: dict[str, Any], store: str) -> Any:
    from vllm import LLM

    fields = {"dtype": job["dtype"], "load_format": job["load_format"], "kv_store": store, "max_model_len": 8192}
    return LLM(job["model"], skip_tokenizer_init=True, **fields)


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
