"""What the benchmarks share: a workload of random prompts, run several times, and its report."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.cli.bench.drafts import DraftCounts, counts_of_steps
from vllm.cli.collect_env import cpu_model
from vllm.cli.generation import add_engine_arguments, load_engine
from vllm.exceptions import CliError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.flag_types import at_least
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class Sample:
    """One run of the workload: seconds from the first step to the last token, and until every request had its first
    token; tokens of all requests."""

    seconds: float
    first_token_seconds: float
    prompt_tokens: int
    output_tokens: int
    drafts: DraftCounts


def add_workload_arguments(
    parser: argparse.ArgumentParser, prompts_flag: str, num_prompts: int, input_len: int, output_len: int
) -> None:
    group = parser.add_argument_group("workload")
    for flag, least, default, text in (
        (prompts_flag, 1, num_prompts, "prompts that arrive together"),
        ("--input-len", 1, input_len, "tokens a prompt"),
        ("--output-len", 1, output_len, "tokens to generate for each"),
        ("--num-ids", 0, 0, "logprob_token_ids to read at each of them"),
        ("--warmup", 0, 1, "runs that do not count"),
        ("--repeats", 1, 3, "runs that count"),
    ):
        dest = "num_prompts" if flag == prompts_flag else flag[2:].replace("-", "_")
        group.add_argument(flag, dest=dest, metavar="N", type=at_least(least), default=default, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result, single runs included, as JSON")
    add_engine_arguments(parser)


def measure(args: argparse.Namespace) -> tuple[LLMEngine, list[Sample]]:
    check_json_path(args.json)
    engine = load_engine(args)
    draw = random.Random(args.seed)
    vocab_size = engine.model_config.vocab_size
    if args.num_ids > vocab_size:
        raise CliError(f"--num-ids must be at most the vocabulary's {vocab_size}, got {args.num_ids}")
    params = SamplingParams(
        max_tokens=args.output_len,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprob_token_ids=draw.sample(range(vocab_size), args.num_ids) or None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    samples = []
    for _ in range(args.warmup + args.repeats):
        prompts = [draw.choices(range(vocab_size), k=args.input_len) for _ in range(args.num_prompts)]
        samples.append(_run_once(engine, prompts, params))
    return engine, samples[args.warmup :]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest of one figure over the runs, and the runs."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": list(values)}


def draft_figures(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Under speculation, DraftCounts' figures, and the shares by place in a draft; empty where a run had no drafts."""
    figures = [sample.drafts.figures() for sample in samples]
    if not all(figures):
        return {}
    found = {name: summary([each[name] for each in figures]) for name in figures[0]}
    rates = [sample.drafts.rates_by_position() for sample in samples]
    for place in range(min(map(len, rates))):
        found[f"acceptance_rate_{place}"] = summary([each[place] for each in rates])
    return found


def report(args: argparse.Namespace, kind: str, engine: LLMEngine, figures: dict[str, dict[str, Any]]) -> None:
    import torch

    config = engine.vllm_config
    about = {
        "benchmark": kind,
        "version": __version__,
        "model": Path(config.model_config.model).name,
        "dtype": config.model_config.dtype,
        "device": torch.cuda.get_device_name() if config.device_config.device == "cuda" else cpu_model(),
        "prefix_caching": config.cache_config.enable_prefix_caching,
        **{name: getattr(args, name) for name in ("num_prompts", "input_len", "output_len", "num_ids")},
        "warmup": args.warmup,
        "repeats": args.repeats,
    }
    print_about(about)
    print_figures(figures, ("median", "min", "max"), max(map(len, figures)))
    write_json(args.json, {**about, "figures": figures})


def print_about(about: dict[str, Any]) -> None:
    """Print what was measured, in one line; None: does not apply."""
    print(", ".join(f"{name} {value}" for name, value in about.items() if value is not None))


def print_figures(figures: dict[str, dict[str, Any]], columns: Sequence[str], width: int) -> None:
    """Print a line a figure, whose name has `width` columns, and the header."""
    print(" " * width, *(f"{column:>12}" for column in columns))
    for name, values in figures.items():
        print(f"{name:{width}}", *(f"{values[column]:12.4g}" for column in columns))


def check_json_path(path: Path | None) -> None:
    """Raise a CliError if the folder of --json does not exist."""
    if path is not None and not path.parent.is_dir():
        raise CliError(f"--json: there is no folder {path.parent}")


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"--json {path}: {error.strerror or error}") from None


def _run_once(engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams) -> Sample:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs: list[RequestOutput] = []
    started = time.monotonic()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    seconds = time.monotonic() - started
    first_token = started
    for output in outputs:
        if output.outputs[0].error is not None:
            raise RuntimeError(output.outputs[0].error)
        assert output.metrics is not None and output.metrics.first_token_time is not None
        first_token = max(first_token, output.metrics.first_token_time)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    drafts = [each for output in outputs if (each := output.outputs[0].spec_decode_metrics) is not None]
    return Sample(
        seconds,
        first_token - started,
        sum(map(len, prompts)),
        output_tokens,
        counts_of_steps(
            [count for each in drafts for count in each.per_step_drafted],
            [count for each in drafts for count in each.per_step_accepted],
        ),
    )
