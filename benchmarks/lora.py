"""The cost of LoRA adapters, against the same model without one.

    python benchmarks/lora.py --model FOLDER
    python benchmarks/lora.py --model FOLDER --upstream ENVIRONMENT --peft ENVIRONMENT

decode   64 requests of 64 fresh tokens generate 64 tokens each, greedily
score    256 requests of 128 fresh tokens, a logprob of one token each

With adapters, request i has adapter i mod 8: random ones of rank 16 on every linear of the blocks. `plain` is ours
without enable_lora. Each engine is a process of its own; they take turns, in alternating order. A share is of the
rates of one repeat, adapters over none; the table has medians. On a busy machine the shares of processor time are the
ones to go by, and between engines the tokens of a second of processor time. Others are slow with adapters: an eighth
of the requests warms them up, and the first repeat alone is timed, so that --scale 0.25 is enough. peft runs rows with
adapters of their own through transformers' generate. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_ADAPTERS, RANK = 8, 16
OTHERS = ("upstream", "peft")
ROWS = {"decode": (64, 64, 64), "score": (256, 128, 1)}
"""Requests, their tokens, and those that they generate."""


def main() -> None:
    """Measure and print."""
    from common import add_counts, describe_machine, make_parser, say, utc_now
    from engines import find_python
    from report import markdown_table

    parser = make_parser("Shares of the speed without adapters that requests with adapters have.", dtype=True)
    add_counts(parser, repeats=(5, "measured runs a row"))
    parser.add_argument("--upstream", type=find_python, metavar="ENVIRONMENT", help="compare with upstream vLLM")
    parser.add_argument("--peft", type=find_python, metavar="ENVIRONMENT", help="compare with peft on transformers")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests, for trying out")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which to measure")
    args = parser.parse_args()
    engines = {"ours": sys.executable, "plain": sys.executable, "upstream": args.upstream, "peft": args.peft}
    rates: dict[tuple[str, str, bool], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), Path(args.model))
        workers = {}
        for name, python in engines.items():
            if python:
                say(f"start {name}")
                workers[name] = _Worker(name, python, args.model, args.dtype, folder)
        for repeat in range(-1, args.repeats):
            for row in args.rows:
                for name in list(workers)[:: 1 if repeat % 2 else -1]:
                    for has_adapters in (False, True)[: 1 if name == "plain" else 2][:: 1 if repeat % 2 else -1]:
                        if name in OTHERS and repeat > 0:
                            continue
                        scale = args.scale / 8 if name in OTHERS and repeat < 0 else args.scale
                        result = workers[name].measure(row, has_adapters, repeat, scale)
                        if repeat >= 0:
                            rates.setdefault((row, name, has_adapters), []).append(result)
        for worker in workers.values():
            worker.close()
    table = [_line(key, rates) for key in rates]
    header = ["row", "engine", "adapters", "tokens/s", "tokens/processor s", "share", "share of processor time"]
    print(markdown_table(header, [[str(cell) for cell in line] for line in table], 2))
    rows = [dict(zip(header, line, strict=True)) for line in table]
    print(json.dumps({"machine": describe_machine(), "date": utc_now(), "rows": rows}))


def _line(key: tuple[str, str, bool], rates: dict[tuple[str, str, bool], list[dict[str, float]]]) -> list[Any]:
    row, name, has_adapters = key
    own, base = rates[key], rates.get((row, name, False), [])
    per_second = [round(statistics.median(each[unit] for each in own), 1) for unit in ("rate", "cpu_rate")]
    line = [row, name, NUM_ADAPTERS if has_adapters else 0, *per_second]
    if not has_adapters:
        return [*line, "", ""]
    pairs = list(zip(own, base, strict=False))
    wall = statistics.median(one["rate"] / other["rate"] for one, other in pairs)
    cpu = statistics.median(other["cpu"] / one["cpu"] for one, other in pairs)
    return [*line, round(wall, 3), round(cpu, 3)]


class _Worker:
    """An engine's process: a line in, a line out."""

    def __init__(self, name: str, python: str, model: str, dtype: str | None, folder: str) -> None:
        command = [python, __file__, "--worker", name, str(model), dtype or "bfloat16", folder]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def measure(self, *asked: Any) -> dict[str, float]:
        """The rate in tokens a second, and the seconds of processor time."""
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"an engine ended: {self._process.wait()}")


def write_adapters(folder: Path, model: Path) -> None:
    """Random adapters of a Llama's linears, in peft's files."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(model / "model.safetensors", framework="pt") as stored:
        names = [name for name in stored.keys() if name.endswith("_proj.weight")]  # noqa: SIM118 (not a dict)
        shapes = {name.removesuffix(".weight"): stored.get_slice(name).get_shape() for name in names}
    for number in range(NUM_ADAPTERS):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, (outputs, inputs) in shapes.items():
            for kind, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                values = torch.randn(shape, generator=generator) * 0.02
                tensors[f"base_model.model.{name}.{kind}.weight"] = values
        own = folder / str(number)
        own.mkdir()
        save_file(tensors, own / "adapter_model.safetensors")
        targets = sorted({name.rpartition(".")[2] for name in shapes})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets}
        config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "bias": "none"}
        (own / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def prompts(row: str, repeat: int, scale: float) -> list[list[int]]:
    """Fresh tokens of each request."""
    import random

    count, length, _ = ROWS[row]
    chosen = random.Random(f"{row} {repeat}")
    return [[chosen.randrange(10, 40000) for _ in range(length)] for _ in range(max(1, int(count * scale)))]


def work(name: str, model: str, dtype: str, folder: str) -> None:
    """An engine's process."""
    here = Path(__file__).resolve().parent
    # Libraries try to import a module `kernels`, which must not be the script here.
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != here]
    if name == "upstream":
        # It starts `python -m vllm...`, which in this checkout's root would be this package.
        os.chdir(tempfile.gettempdir())
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    run = _run_peft(model, dtype, folder) if name == "peft" else _run_vllm(name, model, dtype, folder)
    print("answer {}", flush=True)
    for line in sys.stdin:
        row, has_adapters, repeat, scale = json.loads(line)
        asked, num_tokens = prompts(row, 2 * repeat + has_adapters, scale), ROWS[row][2]
        cpu, begin = sum(os.times()[:4]), time.perf_counter()
        run(asked, num_tokens, has_adapters)
        seconds = time.perf_counter() - begin
        tokens = len(asked) * (num_tokens if num_tokens > 1 else len(asked[0]))
        used = sum(os.times()[:4]) - cpu
        answer = {"rate": tokens / seconds, "cpu": used, "cpu_rate": tokens / used}
        print("answer", json.dumps(answer), flush=True)


def _run_vllm(name: str, model: str, dtype: str, folder: str) -> Callable[[list[list[int]], int, bool], None]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    fields: dict[str, Any] = {"dtype": dtype, "max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    if name != "plain":
        fields |= {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": RANK}
    llm = LLM(model, enable_prefix_caching=False, **fields)
    requests = [LoRARequest(str(number), number + 1, f"{folder}/{number}") for number in range(NUM_ADAPTERS)]

    def run(asked: list[list[int]], num_tokens: int, has_adapters: bool) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1 if num_tokens == 1 else None
        )
        own = [requests[index % NUM_ADAPTERS] for index in range(len(asked))] if has_adapters else None
        llm.generate([{"prompt_token_ids": each} for each in asked], params, use_tqdm=False, lora_request=own)

    return run


def _run_peft(model: str, dtype: str, folder: str) -> Callable[[list[list[int]], int, bool], None]:
    """Batches of one length, whose rows have adapters of their own (peft's adapter_names)."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    adapted = PeftModel.from_pretrained(base, f"{folder}/0", adapter_name="0").eval()
    for number in range(1, NUM_ADAPTERS):
        adapted.load_adapter(f"{folder}/{number}", str(number))

    @torch.inference_mode()
    def run(asked: list[list[int]], num_tokens: int, has_adapters: bool) -> None:
        for start in range(0, len(asked), 64):
            ids = torch.tensor(asked[start : start + 64])
            names = [str(index % NUM_ADAPTERS) if has_adapters else "__base__" for index in range(len(ids))]
            if num_tokens > 1:
                options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
                adapted.generate(input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=names, **options)
            else:
                adapted(input_ids=ids, adapter_names=names, logits_to_keep=1).logits.float().log_softmax(-1)

    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        options = argparse.ArgumentParser()
        options.add_argument("--worker", nargs=4)
        work(*options.parse_args().worker)
    else:
        main()
