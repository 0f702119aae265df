"""Engines that share a folder of KV blocks under a bound that evicts all the time, while one after another is killed.

    python benchmarks/kv_store_soak.py --minutes 20

Each engine's process scores random prompts, whose prefixes come from a few that all draw from, with a store and, once
a prompt, without one; readings must have equal bits. The folder must never be larger than its bound. Prints one JSON
line; the exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import add_counts, make_parser, print_result, say

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 1024}


def main() -> None:
    """Start the engines, kill one every `--kill-seconds`, and print the sums."""
    parser = make_parser("Engines that share a store of KV blocks, one of which is killed at times.", model=False)
    parser.add_argument("--minutes", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--bound-mib", type=float, default=12.0, help="of the folder (default: %(default)s)")
    parser.add_argument("--child", help="folder of a process that scores")
    counts = {"engines": (3, ""), "kill_seconds": (60, "between two kills"), "prefixes": (40, "of prompts")}
    add_counts(parser, **counts, seed=(0, ""))
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.child:
        _score_on(Path(args.child), args.bound_mib / 1024, args.prefixes, args.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        sums = _run(Path(folder), args)
    print_result(benchmark="kv_store_soak", minutes=args.minutes, engines=args.engines, **sums)
    sys.exit(0 if sums["wrong"] == sums["ended_early"] == sums["over_bound"] == 0 and sums["loaded"] else 1)


def _run(folder: Path, args: Any) -> dict[str, int]:
    (folder / "model").mkdir()
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 4, **_SIZES}
    fields |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    (folder / "model" / "config.json").write_text(json.dumps({**fields, "torch_dtype": "float32"}))
    names = ("prompts", "loaded", "stored", "wrong", "killed", "ended_early", "over_bound", "most_bytes")
    sums = dict.fromkeys(names, 0)
    numbers, running = iter(range(args.seed, sys.maxsize)), []
    until, kill_at = time.monotonic() + 60 * args.minutes, time.monotonic() + args.kill_seconds
    try:
        while time.monotonic() < until:
            while len(running) < args.engines:
                running.append(_Scorer(folder, next(numbers), args, sums))
            time.sleep(0.05)
            size = _size(folder / "store")
            sums["most_bytes"] = max(sums["most_bytes"], size)
            sums["over_bound"] += size > args.bound_mib * 2**20
            for scorer in [each for each in running if each.process.poll() is not None]:
                sums["ended_early"] += 1
                running.remove(scorer)
            if time.monotonic() > kill_at and running:
                kill_at += args.kill_seconds
                running.pop(0).kill()
                sums["killed"] += 1
                say(json.dumps(sums))
    finally:
        for scorer in running:
            scorer.kill()
    return sums


class _Scorer:
    """A process that scores, whose lines are added to `sums`."""

    def __init__(self, folder: Path, seed: int, args: Any, sums: dict[str, int]) -> None:
        given = {"--bound-mib": args.bound_mib, "--prefixes": args.prefixes, "--seed": seed, "--child": folder}
        flags = [text for name, value in given.items() for text in (name, str(value))]
        self.process = subprocess.Popen([sys.executable, __file__, *flags], stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, args=(sums,))
        self._thread.start()

    def _read(self, sums: dict[str, int]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # A line that was cut by the kill is none.
            with contextlib.suppress(ValueError):
                for name, value in json.loads(line).items():
                    sums[name] += value

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._thread.join()


def _size(folder: Path) -> int:
    size = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


def _score_on(folder: Path, bound_gib: float, num_prefixes: int, seed: int) -> None:
    """Score until killed, and print counts of each prompt as a line of JSON."""
    from vllm import LLM

    fields = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_batched_tokens": 512}
    # Few blocks, so that most of what is found is the store's.
    fields |= {"num_gpu_blocks_override": 64, "max_model_len": 640}
    store, plain = (
        LLM(str(folder / "model"), **fields, **own)  # type: ignore[arg-type]
        for own in ({"kv_store": str(folder / "store"), "kv_store_gib": bound_gib}, {"enable_prefix_caching": False})
    )
    source, known, before = random.Random(seed), dict[tuple[int, ...], bytes](), (0, 0)
    while True:
        prefix = random.Random(source.randrange(num_prefixes))
        length = prefix.randrange(32, 600)
        prompt = [prefix.randrange(1024) for _ in range(length)] + [source.randrange(4), 7]
        if tuple(prompt) not in known:
            known[tuple(prompt)] = _bits(plain, prompt)
        wrong = _bits(store, prompt) != known[tuple(prompt)]
        stats = store.llm_engine.engine_core.stats()
        now = stats["num_loaded_blocks"], stats["num_stored_blocks"]
        counts = {"prompts": 1, "wrong": int(wrong), "loaded": now[0] - before[0], "stored": now[1] - before[1]}
        print(json.dumps(counts), flush=True)
        before = now


def _bits(llm: Any, prompt: list[int]) -> bytes:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=4, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    readings = output.outputs[0].logprobs
    arrays = (readings.token_ids, readings.logprobs, readings.logits, readings.ranks, readings.lse)
    return b"".join(array.tobytes() for array in arrays)


if __name__ == "__main__":
    main()
