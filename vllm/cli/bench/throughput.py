"""How many prompts and tokens a second, when more is waiting than can run.

All prompts are queued at once. Every repeat draws new random prompts, so that none finds an earlier one in the prefix
cache; each request generates all of its tokens, whatever they are. Times are wall-clock seconds and begin after the
prompts were checked and queued.

example: vllm bench throughput --num-prompts 64 --input-len 128 --output-len 1 --num-ids 20
"""

from __future__ import annotations

import argparse
import statistics

from vllm.cli.bench.run import add_workload_arguments, draft_figures, measure, report, summary, write_json

NAME = "throughput"
HELP = "how many prompts and tokens a second"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser, "--num-prompts", num_prompts=64, input_len=128, output_len=32)


def run(args: argparse.Namespace) -> int:
    engine, samples = measure(args)
    figures = {
        "seconds": summary([sample.seconds for sample in samples]),
        "prompts_per_second": summary([args.num_prompts / sample.seconds for sample in samples]),
        "prompt_tokens_per_second": summary([sample.prompt_tokens / sample.seconds for sample in samples]),
        "output_tokens_per_second": summary([sample.output_tokens / sample.seconds for sample in samples]),
    }
    if args.num_ids:
        # One reading of all ids a generated token.
        rates = [sample.output_tokens * args.num_ids / sample.seconds for sample in samples]
        figures["ids_read_per_second"] = summary(rates)
    report(args, "throughput", engine, figures | draft_figures(samples))
    seconds = statistics.median([sample.seconds for sample in samples])
    num_tokens = statistics.median([sample.prompt_tokens + sample.output_tokens for sample in samples])
    theirs = {
        "elapsed_time": seconds,
        "num_requests": args.num_prompts,
        "total_num_tokens": num_tokens,
        "requests_per_second": args.num_prompts / seconds,
        "tokens_per_second": num_tokens / seconds,
    }
    write_json(args.output_json, theirs)
    return 0
