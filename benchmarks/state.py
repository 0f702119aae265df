"""Models with recurrent states against peers, in turns.

    python benchmarks/state.py --transformers
    python benchmarks/state.py --upstream ENVIRONMENT --against CHECKOUT
    python benchmarks/state.py --gguf FILE.gguf --llama-cpp ENVIRONMENT   # of a model of your own
    python benchmarks/state.py --processor-time    # for a busy machine: one thread, and its processor time
    python benchmarks/state.py --quick

The models are made here, of random weights in bfloat16, in the shapes of SHAPES. Rows: score (distinct prompts),
score_prefix (prompts with a common beginning), decode1, decode64 (see README.md). A round does a row's work once with
each engine, in alternating order; printed are medians of each engine and of the rounds' ratios. The last line is all of
it as JSON.
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
from experts import save_tokenizer
from teacher import measure
from workloads import EngineOptions

ROWS = ("score", "score_prefix", "decode1", "decode64")
OURS = "ours"

_COMMON = {
    "vocab_size": 49152,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# transformers' model type, and what differs from the common sizes.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # About 140 million weights; as LFM2-350M, attention in 6 of 16 layers.
    "lfm2": (
        "lfm2",
        {
            "intermediate_size": 2304,
            "block_auto_adjust_ff_dim": False,
            # Published checkpoints have these, and upstream reads them.
            "block_dim": 768,
            "conv_dim": 768,
            "conv_dim_out": 768,
            "num_hidden_layers": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    # As Qwen3.5 0.8B: three layers of the delta rule before each of attention.
    "qwen3_5": (
        "qwen3_5_text",
        {
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    # As Granite 4.0 H 350M, which has no experts: Mamba 2 but for one layer in ten.
    "granite_hybrid": (
        "granitemoehybrid",
        {
            "num_hidden_layers": 20,
            "layer_types": [("mamba", "attention")[index % 10 == 5] for index in range(20)],
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
    ),
}


def main() -> None:
    """Make the models, measure, print."""
    args = _parse_args()
    # An exception, so that the engines' processes are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for shape in ["file"] if args.gguf else args.shapes:
            folder = Path(name) / shape
            folder.mkdir()
            if not args.gguf:
                make_model(shape, folder)
            found[shape] = _measured(_engines(args, folder), args, Path(name))
    print_result(date=utc_now(), processor_time=args.processor_time, found=found)


def make_model(shape: str, folder: Path) -> None:
    """Save a random model of this shape, and a tokenizer."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type, fields = SHAPES[shape]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**(_COMMON | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    say(f"{shape}: {sum(each.numel() for each in model.parameters()) / 1e6:.0f} million weights")
    model.save_pretrained(folder)
    save_tokenizer(folder, _COMMON["vocab_size"])


def _parse_args() -> argparse.Namespace:
    parser = make_parser("Models with recurrent states against peers.", model=False)
    parser.add_argument("--upstream", metavar="ENV", help="upstream vLLM's environment: its folder, or its python")
    parser.add_argument("--transformers", action="store_true", help="transformers, in this environment")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another, built checkout of this package")
    parser.add_argument("--gguf", help="a model's file, in place of those made here; for --llama-cpp, too")
    parser.add_argument("--llama-cpp", metavar="ENV", help="the environment of llama_cpp, with --gguf")
    parser.add_argument("--shapes", type=some_of(SHAPES, "shape"), default=list(SHAPES), help=",".join(SHAPES))
    parser.add_argument("--rows", type=some_of(ROWS, "row"), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the work; default: %(default)s")
    parser.add_argument("--processor-time", action="store_true", help="one thread each, measured by processor time")
    parser.add_argument("--quick", action="store_true", help="one small round")
    args = parser.parse_args()
    if args.llama_cpp and not args.gguf:
        parser.error("--llama-cpp needs --gguf")
    if args.gguf and (args.upstream or args.transformers):
        parser.error("--upstream and --transformers load the models made here, not --gguf")
    if args.quick:
        args.rounds, args.scale = 1, min(args.scale, 0.1)
    return args


def _engines(args: argparse.Namespace, folder: Path) -> list[Engine]:
    cores = list(range(usable_cores()))[: 1 if args.processor_time else None]

    def engine(name: str, kind: str, python: str, **more: Any) -> Engine:
        return Engine(name, python, EngineOptions(kind, args.gguf or str(folder), "bfloat16", cores, **more))

    engines = [engine(OURS, "ours", sys.executable)]
    if args.against:
        engines.append(engine("before", "ours", sys.executable, checkout=str(args.against.resolve())))
    if args.upstream:
        engines.append(engine("upstream", "upstream", find_python(args.upstream)))
    if args.transformers:
        engines.append(engine("transformers", "transformers", sys.executable))
    if args.llama_cpp:
        engines.append(engine("llama.cpp", "llama.cpp", find_python(args.llama_cpp)))
    return engines


def _measured(engines: list[Engine], args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """row -> {"rates": engine -> median, "ratios": other engine -> median of ours over its}."""
    with contextlib.ExitStack() as stack:
        processes: dict[str, EngineProcess] = {}
        for engine in engines:
            try:
                processes[engine.name] = stack.enter_context(EngineProcess(engine, logs))
            except EngineError as error:
                say(str(error))
        answers = measure(processes, args.rows, args.rounds, args.scale)
    seconds = "cpu_seconds" if args.processor_time else "seconds"
    result: dict[str, Any] = {}
    for row in args.rows:
        rates = {
            name: [each["amount"] / each[seconds] for each in rows[row]]
            for name, rows in answers.items()
            if row in rows
        }
        ratios = {
            name: statistics.median(own / other for own, other in zip(rates[OURS], values, strict=True))
            for name, values in rates.items()
            if name != OURS and OURS in rates
        }
        result[row] = {"rates": {name: statistics.median(values) for name, values in rates.items()}, "ratios": ratios}
        shown = ", ".join(f"{name} {rate:.4g}" for name, rate in result[row]["rates"].items())
        over = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"{row}: {shown}; ours over {over}" if over else f"{row}: {shown}", flush=True)
    return result


if __name__ == "__main__":
    main()
