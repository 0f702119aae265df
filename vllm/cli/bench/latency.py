"""How long one batch takes from its arrival to its last token.

All prompts of a batch arrive together, and nothing else runs. Every repeat draws new random prompts, so that none finds
an earlier one in the prefix cache; each request generates all of its tokens, whatever they are. Times are wall-clock
seconds and begin after the prompts were checked and queued.

example: vllm bench latency --batch-size 8 --input-len 128 --output-len 32
"""

from __future__ import annotations

import argparse
import statistics

from vllm.cli.bench.run import add_workload_arguments, draft_figures, measure, report, summary, write_json

NAME = "latency"
HELP = "how long one batch takes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser, "--batch-size", num_prompts=1, input_len=128, output_len=32)


def run(args: argparse.Namespace) -> int:
    from vllm.cli.bench.load import percentile

    engine, samples = measure(args)
    figures = {
        "batch_seconds": summary([sample.seconds for sample in samples]),
        "first_token_seconds": summary([sample.first_token_seconds for sample in samples]),
        "output_tokens_per_second": summary([sample.output_tokens / sample.seconds for sample in samples]),
    }
    if args.dataset_name == "random" and args.output_len > 1:
        rest = [(sample.seconds - sample.first_token_seconds) / (args.output_len - 1) for sample in samples]
        figures["seconds_per_further_token"] = summary(rest)
    report(args, "latency", engine, figures | draft_figures(samples))
    seconds = [sample.seconds for sample in samples]
    percents = {str(percent): percentile(seconds, percent) for percent in (10, 25, 50, 75, 90, 99)}
    theirs = {"avg_latency": statistics.fmean(seconds), "latencies": seconds, "percentiles": percents}
    write_json(args.output_json, theirs)
    return 0
