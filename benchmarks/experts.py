"""A mixture of experts against a dense model of the same active size, and against peers, in turns.

    python benchmarks/experts.py                                       # ours alone
    python benchmarks/experts.py --upstream ENVIRONMENT --transformers --against CHECKOUT
    python benchmarks/experts.py --formats Q4_K,Q8_0 --llama-cpp ENVIRONMENT
    python benchmarks/experts.py --gguf FILE.gguf --llama-cpp ENVIRONMENT   # of a mixture of your own
    python benchmarks/experts.py --processor-time    # for a busy machine: one thread, and its processor time
    python benchmarks/experts.py --quick

The models are made here, of random weights in bfloat16: a Qwen3-MoE of 8 layers of 32 experts, of which a token takes
4, and the Qwen3 whose MLPs are as wide as 4 experts; `--formats` are also GGUF files of such a mixture, which llama.cpp
runs. Rows: score, decode64, decode1 (see README.md), start (process to
first score), memory (weights that stay, over the checkpoint's), peak (MiB, of the start and all rows). A round does a
row's work once with each engine, in alternating order; printed are each engine's best round and the medians of the
rounds' ratios. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_parser, print_result, say, some_of, usable_cores, utc_now
from engines import Engine, EngineError, EngineProcess, find_python
from gguf_mixture import make_gguf
from workloads import EngineOptions

RATES = ("score", "decode64", "decode1")
PLAIN = "bfloat16"
FORMATS = (PLAIN, "Q4_K", "Q8_0")
ROWS = ("start", *RATES, "memory", "peak")
OURS, DENSE, BEFORE = "ours", "ours, dense", "before"

_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_EXPERTS, _TOP_K, _EXPERT_WIDTH = 32, 4, 384


def main() -> None:
    """Make the models, measure, print."""
    args = _parse_args()
    # An exception, so that the engines' processes are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found, ratios = {}, {}
        for kind in [PLAIN] if args.gguf else args.formats:
            if not args.gguf:
                say(kind)
                _make(kind, folder)
            found[kind] = _measure(_engines(args, folder, kind), args, folder)
            ratios[kind] = _ratios(found[kind])
    print_result(date=utc_now(), processor_time=args.processor_time, found=found, ratios=ratios)


def _make(kind: str, folder: Path) -> None:
    if kind == PLAIN:
        _make_models(folder)
    else:
        make_gguf(folder / f"{kind}.gguf", _SHAPE, _EXPERTS, _TOP_K, _EXPERT_WIDTH, kind)


def _parse_args() -> argparse.Namespace:
    parser = make_parser("A mixture of experts against a dense model and against peers.", model=False)
    parser.add_argument("--upstream", metavar="ENV", help="upstream vLLM's environment: its folder, or its python")
    parser.add_argument("--transformers", action="store_true", help="transformers, in this environment")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another, built checkout of this package")
    parser.add_argument("--gguf", help="a mixture's file, in place of the models made here; for --llama-cpp, too")
    parser.add_argument("--llama-cpp", metavar="ENV", help="the environment of llama_cpp, which runs GGUF files")
    parser.add_argument("--formats", type=some_of(FORMATS, "format"), default=[PLAIN], help=",".join(FORMATS))
    parser.add_argument("--rows", type=some_of(ROWS, "row"), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the work; default: %(default)s")
    parser.add_argument("--processor-time", action="store_true", help="one thread each, measured by processor time")
    parser.add_argument("--quick", action="store_true", help="one small round")
    args = parser.parse_args()
    if args.llama_cpp and not args.gguf and args.formats == [PLAIN]:
        parser.error("--llama-cpp needs --formats Q4_K,Q8_0 or --gguf")
    if args.gguf and (args.upstream or args.transformers):
        parser.error("--upstream and --transformers load the models made here, not --gguf")
    if args.quick:
        args.rounds, args.scale = 1, min(args.scale, 0.1)
    return args


def _make_models(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    mixture = {"num_experts": _EXPERTS, "num_experts_per_tok": _TOP_K, "moe_intermediate_size": _EXPERT_WIDTH}
    made = {
        "mixture": Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **mixture, intermediate_size=_TOP_K * _EXPERT_WIDTH)),
        "dense": Qwen3ForCausalLM(Qwen3Config(**_SHAPE, intermediate_size=_TOP_K * _EXPERT_WIDTH)),
    }
    torch.set_default_dtype(dtype)
    for name, model in made.items():
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name, _SHAPE["vocab_size"])


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes are tokens, and so are words that no text has, up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(letters)}
    vocabulary |= {f"<{number}>": number for number in range(len(letters), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    last = f"<{vocab_size - 1}>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=last, pad_token=last).save_pretrained(folder)


def _engines(args: argparse.Namespace, folder: Path, kind: str) -> list[Engine]:
    cores = list(range(usable_cores()))[: 1 if args.processor_time else None]

    def engine(name: str, kind: str, python: str, model: str, **more: Any) -> Engine:
        return Engine(name, python, EngineOptions(kind, model, "bfloat16", cores, **more))

    is_file = args.gguf or kind != PLAIN
    mixture = args.gguf or str(folder / (f"{kind}.gguf" if is_file else "mixture"))
    engines = [engine(OURS, "ours", sys.executable, mixture)]
    if not is_file:
        engines.append(engine(DENSE, "ours", sys.executable, str(folder / "dense")))
    if args.against:
        engines.append(engine(BEFORE, "ours", sys.executable, mixture, checkout=str(args.against.resolve())))
    if args.upstream and not is_file:
        engines.append(engine("upstream", "upstream", find_python(args.upstream), mixture))
    if args.transformers and not is_file:
        engines.append(engine("transformers", "transformers", sys.executable, mixture))
    if args.llama_cpp and is_file:
        engines.append(engine("llama.cpp", "llama.cpp", find_python(args.llama_cpp), mixture))
    return engines


def _measure(engines: list[Engine], args: argparse.Namespace, logs: Path) -> dict[str, dict[str, list[float]]]:
    """row -> engine -> its values by round."""
    found: dict[str, dict[str, list[float]]] = {row: {} for row in args.rows}
    with contextlib.ExitStack() as stack:
        processes: dict[str, EngineProcess] = {}
        for engine in engines:
            try:
                # The first start fills the caches of files and compiled code.
                EngineProcess(engine, logs).close()
                processes[engine.name] = stack.enter_context(EngineProcess(engine, logs))
            except EngineError as error:
                say(str(error))
                continue
            say(f"{engine.name} started in {processes[engine.name].startup_seconds:.1f} s")
        stored = {name: _stored_mib(Path(engine.options.model or "")) for name, engine in _by_name(engines).items()}
        peaks = {name: process.startup_peak_mib for name, process in processes.items()}
        for row in args.rows:
            for number in range(args.rounds if row in RATES else 1):
                for name in list(processes)[:: -1 if number % 2 else 1]:
                    value = _value(row, number, processes[name], stored[name], peaks, args)
                    if value is not None:
                        found[row].setdefault(name, []).append(value)
            _print_row(row, found[row])
    return found


def _by_name(engines: list[Engine]) -> dict[str, Engine]:
    return {engine.name: engine for engine in engines}


def _stored_mib(model: Path) -> float:
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) / 2**20


def _value(
    row: str,
    number: int,
    process: EngineProcess,
    stored_mib: float,
    peaks: dict[str, float],
    args: argparse.Namespace,
) -> float | None:
    name = process.engine.name
    if row == "start":
        return process.startup_cpu_seconds if args.processor_time else process.startup_seconds
    if row == "memory":
        held = process.hello.get("weight_mib")
        return held and held / stored_mib
    if row == "peak":
        return peaks[name]
    try:
        answer = process.measure(row, number, args.scale)
    except EngineError as error:
        say(str(error))
        return None
    peaks[name] = max(peaks[name], answer["peak_mib"])
    return answer["amount"] / answer["cpu_seconds" if args.processor_time else "seconds"]


def _ratios(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds of ours over each other's."""
    return {
        row: {
            name: round(statistics.median(one / other for one, other in zip(values[OURS], others, strict=True)), 3)
            for name, others in values.items()
            if name != OURS and len(others) == len(values[OURS])
        }
        for row, values in found.items()
        if OURS in values
    }


def _print_row(row: str, values: dict[str, list[float]]) -> None:
    best = {name: (max if row in RATES else min)(each) for name, each in values.items()}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in best.items())
    ratios = ", ".join(f"{name} {ratio}" for name, ratio in _ratios({row: values}).get(row, {}).items())
    print(f"{row}: {shown}; ours over {ratios}" if ratios else f"{row}: {shown}", flush=True)


if __name__ == "__main__":
    main()
