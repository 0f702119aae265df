"""Check that the engine's logprobs of sampled tokens are a trainer's."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.cli.bench.run import check_json_path, print_about
from vllm.cli.generation import add_engine_arguments, load_engine
from vllm.cli.selftest_report import about, conclude
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least, positive

if TYPE_CHECKING:
    from vllm.selftest.trainer import Deviation, Sampled

NAME = "trainer"
HELP = "the logprobs of sampled tokens are those of a trainer over the same weights"

__doc__ = """Are the sampler's logprobs the trainer's?

A loop such as GRPO samples with this engine, and computes the logprobs of what was sampled once more by transformers'
model. Their difference is an error of its importance ratios, exp(trainer's logprob - engine's), which would be 1.

The engine samples after random prompts of several lengths, in each of --dtypes; transformers' model of the same weights
then reads every sequence in each of --trainers. Shown is how far the ratios are from 1: of all sampled tokens, and by
the number of tokens before them. Where both compute in float32 none may be farther than 0.001.

The exit code is 0 if none is, 1 if one is.

example: vllm selftest trainer ./model --dtypes float32 bfloat16 --trainers float32 bfloat16 autocast
"""
_DTYPES = ("float32", "bfloat16", "float16")
_TRAINERS = (*_DTYPES, "autocast")
_ATTENTION = ("eager", "sdpa", "flash_attention_2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags, and those of the engine."""
    add = parser.add_argument_group("self-test").add_argument
    several: dict[str, Any] = {"nargs": "+", "default": ["float32", "bfloat16"]}
    add("--dtypes", choices=_DTYPES, help="the engine's, in turn", **several)
    trainers = 'the trainer\'s; "autocast": weights in float32, products in bfloat16'
    add("--trainers", choices=_TRAINERS, help=trainers, **several)
    add("--trainer-attention", choices=_ATTENTION, default="eager", help="transformers' attn_implementation")
    add("--num-prompts", metavar="N", type=at_least(1), default=4, help="of each length")
    add("--max-tokens", metavar="N", type=at_least(1), default=32, help="sampled after each prompt")
    add("--temperature", metavar="T", type=positive, default=1.0, help="of sampling, and of both logprobs")
    add("--json", metavar="FILE", type=Path, help="write the table as JSON")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    check_json_path(args.json)
    if args.dtype != "auto":
        raise CliError("--dtype: say which with --dtypes")
    args.skip_tokenizer_init = True
    started = time.monotonic()
    said, path, sampled = _sampled(args)
    print_about(said)
    rows = _compared(args, path, sampled)
    return conclude({**said, "rows": rows}, all(row["passed"] is not False for row in rows), started, args.json)


def _sampled(args: argparse.Namespace) -> tuple[dict[str, Any], str, dict[str, list[Sampled]]]:
    """About the model and the machine; the model's folder; what an engine of each dtype sampled."""
    from vllm.selftest.trainer import make_prompts, sample

    said: dict[str, Any] = {}
    path, found = "", {}
    for dtype in dict.fromkeys(args.dtypes):
        args.dtype = dtype
        engine = load_engine(args)
        config = engine.model_config
        if config.max_model_len <= args.max_tokens:
            raise CliError(f"--max-tokens must be below max_model_len={config.max_model_len}, got {args.max_tokens}")
        more = {"trainer_attention": args.trainer_attention, "temperature": args.temperature}
        said = about("trainer", config, **more)
        path = config.path
        prompts = make_prompts(engine, args.num_prompts, args.max_tokens, args.seed)
        found[dtype] = sample(engine, prompts, args.max_tokens, args.temperature, args.seed)
        del engine  # before the next one needs memory
    return said, path, found


def _compared(args: argparse.Namespace, path: str, sampled: dict[str, list[Sampled]]) -> list[dict[str, Any]]:
    """The table's rows, printed as they come."""
    from vllm.selftest.trainer import LIMIT, Trainer, compare

    print(f"{'engine':9} {'trainer':9} {'context':>10} {'tokens':>7} {'mean':>9} {'99 %':>9} {'worst':>9}  |ratio - 1|")
    rows = []
    for kind in dict.fromkeys(args.trainers):
        try:
            trainer = Trainer(path, kind, args.trust_remote_code, args.trainer_attention)
        except (ValueError, OSError, ImportError) as error:
            raise CliError(f"transformers cannot load the trainer's model: {error}") from error
        for dtype, sequences in sampled.items():
            for row in compare(sequences, trainer.logprobs(sequences, args.temperature)):
                is_bound = dtype == kind == "float32"
                passed = row.worst <= LIMIT if is_bound else None
                rows.append({"engine": dtype, "trainer": kind, **asdict(row), "passed": passed})
                print(f"{dtype:9} {kind:9} {_shown(row)}{_verdict(passed, LIMIT)}", flush=True)
    return rows


def _shown(row: Deviation) -> str:
    context = "all" if row.context is None else f"to {row.context}"
    return f"{context:>10} {row.tokens:7,} {row.mean:9.2e} {row.p99:9.2e} {row.worst:9.2e}"


def _verdict(passed: bool | None, limit: float) -> str:
    if passed is None:
        return ""
    return f"  at most {limit:g}" if passed else f"  MORE THAN {limit:g}"
