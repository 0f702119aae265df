"""Cost of looking one token up in whole-vocabulary readings: by index, as a dict, and with `select`.

    python benchmarks/lookups.py                                    # the embedded model, 32 prompts
    python benchmarks/lookups.py --model FOLDER --prompts 8

Every way gets fresh outputs in every round, as the first access builds the arrays. Prints medians over the rounds, in
milliseconds for all prompts, and JSON.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from common import add_counts, make_parser, print_result, use_all_cores
from workloads import LABEL_IDS, make_workload

WAYS: dict[str, Callable[[Any], Any]] = {
    "select": lambda logprobs: logprobs.select(LABEL_IDS[:1]).logprobs,
    "index": lambda logprobs: logprobs[0][LABEL_IDS[0]].logprob,
    "whole_dict": lambda logprobs: dict(logprobs[0]),
}


def main() -> None:
    """Measure, print text and JSON."""
    parser = make_parser("Time of single lookups in whole-vocabulary readings.")
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
    print_result(prompts=len(prompts), milliseconds=milliseconds)


if __name__ == "__main__":
    main()
