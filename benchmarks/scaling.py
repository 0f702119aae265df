"""Scaling of decoding over ranks and stages and of scoring over replicas, on the cores of this machine.

    python benchmarks/scaling.py                        # 1 and 2 ranks, 1 and 2 stages, 1 and 2 replicas
    python benchmarks/scaling.py --model FOLDER --only replicas
    python benchmarks/scaling.py --only network         # on Linux, as root, with Ray

Ranks and stages share the cores of one process; each replica has one core. Figures are medians over alternating turns.
The last line is JSON.

ranks: tokens/s of greedy decoding with the logprobs of `--num-ids` ids; and the bytes that rank 0 sends in a step, by
    collective, beside the bytes of its slice of the logits. Without `--model`, a random model of 8 layers and 151,936
    tokens, as the embedded model's nine heads cannot be split.
stages: prompts/s of scoring (`value`), of scoring short ones one after another (`alone`), tokens/s of decoding
    `--batch` sequences, and the bytes of hidden states that rank 0 receives for a token; and the CPU seconds of each
    rank while it scores and decodes, of the seconds that this takes.
network: stages against ranks, on two network namespaces that stand for machines with a core each. A process joins them
    and passes packets on at `--gigabits` and after `--delay-ms`, in each direction; it takes a part of the cores. A
    random model of 30 layers; `paper` has the bytes a token, and the least seconds of the network for a prompt that is
    scored among others, by the formulas of docs/scaling.md.
replicas: texts/s of `vllm.batch.score_dataset`, from the first batch to the last, and of one engine on one core without
    Ray.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import ROOT, add_counts, cpu_seconds, make_parser, print_result, say, usable_cores

from vllm import LLM, SamplingParams
from vllm.utils.ray_utils import import_ray_for

RANKS = (1, 2)
STAGES = (1, 2)
REPLICAS = (1, 2)
LABELS = [" positive", " negative"]
_WORDS = "the soup was cold but our guide knew every street and we would come again for that view".split()
_STEPS = 32
_BATCH_ROWS = 64
_PROMPT_TOKENS = 16
_SCORED_TOKENS = 40
_ALONE = 32  # short prompts that are scored one after another
_MANY_WORDS = {"vocab_size": 151936, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
_DEEP = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 30}
SPLITS = {"width": {"tensor_parallel_size": 2}, "layers": {"pipeline_parallel_size": 2}}
_LOGIT_BYTES = 4  # float32


def main() -> None:
    """Measure and print."""
    parser = make_parser("Scaling of decoding over ranks and stages and of scoring over replicas.")
    parser.add_argument("--only", choices=("ranks", "stages", "replicas", "network"))
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second of the network, in each direction")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of the network, in each direction")
    parser.add_argument("--split", choices=SPLITS, help=argparse.SUPPRESS)
    add_counts(parser, repeats=(3, "turns"), batch=(64, "sequences that the ranks decode"))
    add_counts(parser, num_ids=(20, "ids read in each step"), texts=(1024, "texts that the replicas score"))
    add_counts(parser, scored=(256, "prompts that the stages score"))
    args = parser.parse_args()
    if args.split:
        # Within a machine of `measure_network`.
        fields = {"distributed_executor_backend": "ray", "skip_tokenizer_init": True, **SPLITS[args.split]}
        print(json.dumps(measure_stages(args, **fields)))
        return
    result: dict[str, Any] = {"model": Path(args.model).name if args.model else "embedded"}
    if args.only in (None, "stages"):
        result["stages"] = _in_turns(
            STAGES, args.repeats, lambda stages: measure_stages(args, pipeline_parallel_size=stages)
        )
    if args.only in (None, "ranks"):
        with tempfile.TemporaryDirectory() as folder:
            model = args.model or make_model(Path(folder))
            result["ranks"] = _in_turns(RANKS, args.repeats, lambda ranks: measure_ranks(model, args, ranks))
    if args.only in (None, "replicas"):
        result["replicas"] = measure_replicas(args)
    if args.only == "network":
        result["network"] = measure_network(args)
    print_result(**result)


def make_model(folder: Path, sizes: Mapping[str, int] = _MANY_WORDS) -> str:
    """A random model that two ranks can share."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def measure_ranks(model: str, args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Tokens/s of one engine over `ranks` ranks, and rank 0's bytes a decode step."""
    options = {"skip_tokenizer_init": True, "max_model_len": 256, "use_tqdm_on_load": False}
    llm = LLM(model, tensor_parallel_size=ranks, max_num_seqs=args.batch, **options)
    core, config = llm.llm_engine.engine_core, llm.llm_engine.model_config
    draw = random.Random(0)
    prompts = [[draw.randrange(100, 1000) for _ in range(_PROMPT_TOKENS)] for _ in range(args.batch)]
    # The prompts are always the same, and so in the prefix cache.
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    readings = {"logprob_token_ids": list(range(args.num_ids)), **greedy}

    def run(num_tokens: int) -> tuple[float, dict[str, int]]:
        before, began = core.stats()["collective_bytes"], time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=num_tokens, **readings), use_tqdm=False)
        seconds, after = time.perf_counter() - began, core.stats()["collective_bytes"]
        return seconds, {name: count - before.get(name, 0) for name, count in after.items()}

    run(2)
    (short_seconds, short), (long_seconds, long) = run(1), run(1 + _STEPS)
    core.shutdown()
    return {
        "value": args.batch * _STEPS / (long_seconds - short_seconds),
        "step_bytes": {name: (count - short.get(name, 0)) / _STEPS for name, count in long.items()},
        "step_bytes_of_logits": args.batch * config.vocab_size * _LOGIT_BYTES // ranks if ranks > 1 else 0,
    }


def measure_stages(args: argparse.Namespace, **fields: Any) -> dict[str, Any]:
    """Scoring and decoding by one engine, and the bytes a token that rank 0 receives from another stage, or puts into
    sums of ranks."""
    llm = LLM(args.model, max_model_len=256, use_tqdm_on_load=False, **fields)
    moved = "all_reduce" if "tensor_parallel_size" in fields else "receive"
    core, draw = llm.llm_engine.engine_core, random.Random(0)
    # An actor cannot import the benchmarks.
    is_here = "distributed_executor_backend" not in fields

    def used_so_far() -> list[float]:
        return llm.collective_rpc(cpu_seconds) if is_here else []

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(100, 1000) for _ in range(length)] for _ in range(count)]

    def run(rows: list[list[int]], **fields: Any) -> tuple[float, int, list[float]]:
        before, cpu_before = core.stats()["collective_bytes"].get(moved, 0), used_so_far()
        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **fields)
        began = time.perf_counter()
        llm.generate(rows, params, use_tqdm=False)
        seconds, cpu_after = time.perf_counter() - began, used_so_far()
        used = [round(after - before, 2) for after, before in zip(cpu_after, cpu_before, strict=True)]
        return seconds, core.stats()["collective_bytes"].get(moved, 0) - before, used

    reads = {"max_tokens": 1, "logprob_token_ids": [7, 9]}
    run(prompts(8, _SCORED_TOKENS), max_tokens=2)
    score_seconds, score_bytes, score_used = run(prompts(args.scored, _SCORED_TOKENS), **reads)
    alone_seconds = sum(run(prompts(1, _PROMPT_TOKENS), **reads)[0] for _ in range(_ALONE))
    begun = prompts(args.batch, _PROMPT_TOKENS)
    run(begun, max_tokens=1)
    # The prompts are in the prefix cache from here on.
    long_seconds, long_bytes, long_used = run(begun, max_tokens=1 + _STEPS)
    again_seconds, again_bytes, _ = run(begun, max_tokens=1)
    core.shutdown()
    num_tokens = args.batch * _STEPS
    return {
        "value": args.scored / score_seconds,
        "alone": _ALONE / alone_seconds,
        "cpu_seconds": {
            "score": [round(score_seconds, 2), score_used],
            "decode": [round(long_seconds, 2), long_used],
        },
        "dtype": llm.llm_engine.model_config.dtype,
        "decoded": num_tokens / (long_seconds - again_seconds),
        "token_bytes": {
            "score": score_bytes / (args.scored * _SCORED_TOKENS),
            "decode": (long_bytes - again_bytes) / num_tokens,
        },
    }


def measure_network(args: argparse.Namespace) -> dict[str, Any]:
    """Both splits of one model over two machines, and by how much the stages are ahead."""
    sys.path.append(str(ROOT / "tests/support"))
    from ray_cluster import environment, join
    from two_machines import two_machines, why_not

    if reason := why_not():
        raise SystemExit(f"--only network: {reason}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, two_machines() as machines:
        model = args.model or make_model(Path(folder), _DEEP)
        variables = environment(machines)
        for machine in range(2):
            join(machines, machine, 1, variables)
        machines.link(delay_seconds=args.delay_ms / 1000, bytes_a_second=args.gigabits * 1e9 / 8)
        for split in SPLITS:
            counts = ["--batch", str(args.batch), "--scored", str(args.scored)]
            command = [sys.executable, __file__, "--model", model, "--split", split, *counts]
            ran = subprocess.run(machines.command(0, *command), env=variables, stdout=subprocess.PIPE, text=True)
            if ran.returncode:
                raise SystemExit(f"--only network: exit status {ran.returncode}")
            found[split] = json.loads(ran.stdout.splitlines()[-1])
            say(json.dumps({"split": split, **found[split]}))
    width, layers = _DEEP["hidden_size"], _DEEP["num_hidden_layers"]
    row_bytes = width * (2 if found["layers"]["dtype"] == "bfloat16" else 4)
    return {
        **found,
        "paper": None if args.model else _on_paper(row_bytes, layers, args.gigabits),
        "score_ratio": found["layers"]["value"] / found["width"]["value"],
        "alone_ratio": found["layers"]["alone"] / found["width"]["alone"],
        "decode_ratio": found["layers"]["decoded"] / found["width"]["decoded"],
    }


def _on_paper(row_bytes: int, num_layers: int, gigabits: float) -> dict[str, dict[str, float]]:
    """By the splits, bytes a token and seconds that a prompt's are on the network."""
    token_bytes = {"layers": row_bytes, "width": (2 * num_layers + 1) * row_bytes}
    seconds = {split: 8e-9 * _SCORED_TOKENS * each / gigabits for split, each in token_bytes.items()}
    return {"token_bytes": token_bytes, "prompt_seconds": seconds}


def measure_replicas(args: argparse.Namespace) -> dict[str, Any]:
    """Replicas of one core each, and an engine of one core without Ray."""
    import_ray_for()
    import ray
    import ray.data
    import torch

    quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    ray.init("local", num_cpus=usable_cores() + 1, **quiet)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    texts = _texts(args.texts)
    data = ray.data.from_items([{"text": text} for text in texts])

    def over_ray(replicas: int) -> dict[str, Any]:
        from vllm.batch import score_dataset

        job = {"template": "{text}", "replicas": replicas, "cpus_per_replica": 1, "batch_size": _BATCH_ROWS}
        scored = score_dataset(data, LABELS, **job, model=args.model, max_model_len=256)
        batches = scored.iter_batches(batch_size=None, batch_format="pyarrow")
        return {"value": _rate(batch.num_rows for batch in batches)}

    def without_ray() -> dict[str, Any]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        llm = LLM(args.model, max_model_len=256, use_tqdm_on_load=False)
        batches = [texts[first : first + _BATCH_ROWS] for first in range(0, len(texts), _BATCH_ROWS)]
        value = _rate(len(llm.score_labels(batch, LABELS, use_tqdm=False)) for batch in batches)
        torch.set_num_threads(threads)
        return {"value": value}

    result = _in_turns((0, *REPLICAS), args.repeats, lambda count: over_ray(count) if count else without_ray())
    result["without_ray"] = result.pop("0")
    ray.shutdown()
    return result


def _in_turns(counts: tuple[int, ...], repeats: int, measure: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Per count the last measurement with all values, and the medians' ratio of the two highest counts."""
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for _ in range(repeats):
        for count in counts:
            found[count].append(measure(count))
            say(json.dumps({"count": count, **found[count][-1]}))
    medians = {count: statistics.median(each["value"] for each in all_of) for count, all_of in found.items()}
    result: dict[str, Any] = {
        str(count): {**all_of[-1], "value": medians[count], "values": [each["value"] for each in all_of]}
        for count, all_of in found.items()
    }
    return {**result, "ratio": medians[counts[-1]] / medians[counts[-2]]}


def _rate(batches: Any) -> float:
    """Rows/s from the end of the first batch to that of the last."""
    sizes, ends = [], []
    for size in batches:
        sizes.append(size)
        ends.append(time.perf_counter())
    return sum(sizes[1:]) / (ends[-1] - ends[0])


def _texts(count: int) -> list[str]:
    draw = random.Random(0)
    return [f"{' '.join(draw.choices(_WORDS, k=30))} {i}. All in all it was" for i in range(count)]


if __name__ == "__main__":
    main()
