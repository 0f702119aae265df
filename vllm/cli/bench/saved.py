"""The result of `vllm bench serve` in the file that upstream's tools read (--save-result)."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm.cli.bench.load import Outcome, metric_values, percentile
from vllm.exceptions import CliError


def num_good(outcomes: Sequence[Outcome], limits: dict[str, float]) -> int:
    """How many requests were within all `limits`, in milliseconds by metric."""
    return sum(each.error is None and _is_good(metric_values([each]), limits) for each in outcomes)


def _is_good(values: dict[str, list[float]], limits: dict[str, float]) -> bool:
    return all(1000 * seconds <= limit for name, limit in limits.items() for seconds in values[name])


def saved_result(args: argparse.Namespace, model: str, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Upstream's fields; with --save-detailed those of single requests, too."""
    done = [each for each in outcomes if each.error is None]
    num_input, num_output = (sum(getattr(each, name) for each in done) for name in ("prompt_tokens", "output_tokens"))
    per_second = 1 / seconds if seconds else 0.0
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer or model,
        "num_prompts": args.num_prompts,
        **dict(args.metadata or ()),
        "request_rate": "inf" if args.request_rate is None else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.concurrency,
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) * per_second,
        "request_goodput": num_good(outcomes, args.goodput) * per_second if args.goodput else None,
        "output_throughput": num_output * per_second,
        "total_token_throughput": (num_input + num_output) * per_second,
    }
    for name, values in metric_values(outcomes).items():
        if values and name in args.percentile_metrics:
            result |= _figures(name, [1000 * value for value in values], args.metric_percentiles)
    if args.save_detailed:
        first = min(each.began for each in outcomes)
        result |= {
            "input_lens": [each.prompt_tokens for each in outcomes],
            "output_lens": [each.output_tokens for each in outcomes],
            "ttfts": [each.token_times[0] - each.began if each.token_times else 0.0 for each in outcomes],
            "itls": [each.intervals for each in outcomes],
            "start_times": [each.began - first for each in outcomes],
            "generated_texts": [each.text for each in outcomes],
            "errors": [each.error or "" for each in outcomes],
        }
    return result


def _figures(name: str, values: list[float], percents: Sequence[float]) -> dict[str, float]:
    """In milliseconds, by upstream's names."""
    figures = {"mean": statistics.fmean(values), "median": statistics.median(values), "std": statistics.pstdev(values)}
    figures |= {f"p{percent:g}": percentile(values, percent) for percent in percents}
    return {f"{kind}_{name}_ms": value for kind, value in figures.items()}


def result_path(args: argparse.Namespace, model: str) -> Path:
    """--result-filename, or a name that says what was run and when, in --result-dir."""
    name = args.result_filename
    if name is None:
        rate = "inf" if args.request_rate is None else f"{args.request_rate:g}"
        concurrency = "" if args.concurrency is None else f"-concurrency{args.concurrency}"
        when = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{args.label or args.backend}-{rate}qps{concurrency}-{model.rpartition('/')[2]}-{when}.json"
    return Path(args.result_dir or "", name)


def save(args: argparse.Namespace, path: Path, result: dict[str, Any]) -> None:
    """Write the result, or with --append-result a further line. CliError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise CliError(f"--save-result: {path}: {error.strerror or error}") from None
