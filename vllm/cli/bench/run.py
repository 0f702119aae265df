"""The benchmarks share a workload of random prompts, run several times, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.cli.bench.dataset import Prompt, Tokenize, add_dataset_arguments, check_dataset, make_prompts
from vllm.cli.bench.drafts import DraftCounts, counts_of_steps
from vllm.cli.collect_env import cpu_model
from vllm.cli.generation import add_engine_arguments, load_engine
from vllm.cli.other_flags import add_refused, add_unused
from vllm.exceptions import CliError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.flag_types import at_least
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


_REFUSED = {
    "--use-beam-search": "one sequence is generated a prompt",
    "--profile": "LLM.start_profile profiles",
    "--async-engine": "`vllm bench serve` measures a server",
    "--hf-max-batch-size": "this engine alone is measured",
    "--lora-path": "measure a server with --lora-modules by `vllm bench serve`",
    "--no-stream": "`vllm bench serve` has it",
}


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
    for flags, least, default, text in (
        ([prompts_flag], 1, num_prompts, "prompts that arrive together"),
        (["--num-ids"], 0, 0, "logprob_token_ids to read at each of them"),
        (["--warmup", "--num-iters-warmup"], 0, 1, "runs that do not count"),
        (["--repeats", "--num-iters"], 1, 3, "runs that count"),
    ):
        dest = "num_prompts" if flags[0] == prompts_flag else flags[0][2:].replace("-", "_")
        group.add_argument(*flags, dest=dest, metavar="N", type=at_least(least), default=default, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result, single runs included, as JSON")
    parser.add_argument("--output-json", metavar="FILE", type=Path, help="write it as upstream's tools read it")
    add_dataset_arguments(parser, input_len, output_len)
    parser.add_argument("--backend", type=_backend, default="vllm", help=argparse.SUPPRESS)
    parser.add_argument("--n", type=_one, default=1, help=argparse.SUPPRESS)
    add_refused(parser, _REFUSED)
    add_unused(parser, {"--disable-detokenize": "generated ids do not become texts"}, 0)
    add_engine_arguments(parser)


def _backend(text: str) -> str:
    if text != "vllm":
        raise argparse.ArgumentTypeError(f"must be vllm, this engine, got {text!r}")
    return text


def _one(text: str) -> int:
    if int(text) != 1:
        raise argparse.ArgumentTypeError(f"must be 1, got {text}: ask for more prompts, which cost the same")
    return 1


def measure(args: argparse.Namespace) -> tuple[LLMEngine, list[Sample]]:
    for path, flag in ((args.json, "--json"), (args.output_json, "--output-json")):
        check_json_path(path, flag)
    check_dataset(args)
    engine = load_engine(args)
    draw = random.Random(args.seed)
    vocab_size = engine.model_config.vocab_size
    if args.num_ids > vocab_size:
        raise CliError(f"--num-ids must be at most the vocabulary's {vocab_size}, got {args.num_ids}")
    ids = draw.sample(range(vocab_size), args.num_ids) or None
    samples = []
    for number in range(args.warmup + args.repeats):
        if number and args.dataset_name in ("sharegpt", "custom"):
            # The same prompts again.
            engine.reset_prefix_cache()
        prompts = asyncio.run(make_prompts(args, draw, args.num_prompts, vocab_size, _tokenizer(engine)))
        samples.append(_run_once(engine, prompts, ids))
    return engine, samples[args.warmup :]


def _tokenizer(engine: LLMEngine) -> Tokenize:
    async def tokenize(text: str) -> list[int]:
        if engine.tokenizer is None:
            raise CliError("--skip-tokenizer-init: the texts of a file need a tokenizer")
        return engine.tokenizer.encode(text)

    return tokenize


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
    if args.dataset_name != "random":
        about |= {"dataset_name": args.dataset_name, "input_len": None, "output_len": None}
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


def check_json_path(path: Path | None, flag: str = "--json") -> None:
    """Raise a CliError if the folder of the flag's file does not exist."""
    if path is not None and not path.parent.is_dir():
        raise CliError(f"{flag}: there is no folder {path.parent}")


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"--json {path}: {error.strerror or error}") from None


def _run_once(engine: LLMEngine, prompts: Sequence[Prompt], ids: list[int] | None) -> Sample:
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=prompt.output_len,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprob_token_ids=ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(index), prompt.content, params)
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
        sum(len(output.prompt_token_ids or ()) for output in outputs),
        output_tokens,
        counts_of_steps(
            [count for each in drafts for count in each.per_step_drafted],
            [count for each in drafts for count in each.per_step_accepted],
        ),
    )
