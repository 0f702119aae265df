"""What it takes to look one token up where the whole vocabulary was read: by index, and from the arrays.

    python benchmarks/lookups.py                                    # the embedded model, 32 prompts
    python benchmarks/lookups.py --model FOLDER --prompts 8

Each way gets fresh outputs of the same prompts in every round, since a look at one leaves its arrays put together. The
last line of stdout is the result as JSON: the median of the rounds in milliseconds, all prompts together.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import add_counts, describe_machine, make_parser, use_all_cores
from workloads import LABEL_IDS, make_workload

WAYS: dict[str, Callable[[Any], Any]] = {
    "select": lambda logprobs: logprobs.select(LABEL_IDS[:1]).logprobs,
    "index": lambda logprobs: logprobs[0][LABEL_IDS[0]].logprob,
    "whole_dict": lambda logprobs: dict(logprobs[0]),
}


def main() -> None:
    """Measure, print a line for people and one for programs."""
    parser = make_parser("time single lookups in whole-vocabulary readings")
    add_counts(parser, prompts=(32, ""), rounds=(5, ""))
    args = parser.parse_args()
    use_all_cores()
    from vllm import LLM, SamplingParams

    llm = LLM(args.model, seed=0, max_logprobs=-1)
    prompts = [{"prompt_token_ids": ids} for ids in make_workload("score", 0, args.prompts / 256).prompts]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(-1, args.rounds):
        for way, look in WAYS.items():
            outputs = llm.generate(prompts, params, use_tqdm=False)
            began = time.perf_counter()
            found = [look(output.outputs[0].logprobs) for output in outputs]
            spent = time.perf_counter() - began
            assert len(found) == len(prompts)
            del found  # a million objects, not to be freed while the next way is timed
            if number >= 0:
                seconds[way].append(spent)
    milliseconds = {way: round(1e3 * statistics.median(each), 2) for way, each in seconds.items()}
    print(f"{len(prompts)} prompts: " + ", ".join(f"{way} {value} ms" for way, value in milliseconds.items()))
    print(json.dumps({"prompts": len(prompts), "milliseconds": milliseconds, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
