"""What a cached prefix saves when a prompt's readings are asked for.

    python benchmarks/prompt_readings.py                 # the embedded model, 8 prompts of 1,000 tokens

Prints one JSON line a case, seconds for all prompts (best of the repeats):

cold        nothing is cached
plain       the prompts are cached by requests that read nothing: keys and values alone, so all is computed again
read        the prompts are cached by requests that read them: keys, values and final hidden states
tail_plain  as `plain`, but only the last 20 positions are read (`prompt_logprob_start`)
no_readings nothing is cached and nothing is read: the model alone
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from common import add_counts, describe_machine, make_parser

CASES = ("no_readings", "cold", "plain", "read", "tail_plain")


def main() -> None:
    """Measure the cases in turns."""
    from vllm import LLM, SamplingParams

    args = _parse_args()
    llm = LLM(args.model, dtype=args.dtype)
    vocab_size = llm.llm_engine.model_config.vocab_size
    plain = SamplingParams(temperature=0, max_tokens=1)
    whole = SamplingParams(max_tokens=0, prompt_logprobs=0)
    tail = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=args.tokens - 21)

    def run(prompts: list[list[int]], params: Any) -> float:
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if params.reads_prompt:
            assert sum(len(output.prompt_logprobs.logprobs) for output in outputs) >= 20 * args.prompts
        return time.perf_counter() - began

    rng = random.Random(0)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for repeat in range(args.repeats + 1):
        for case in CASES:
            prompts = [[rng.randrange(3, vocab_size) for _ in range(args.tokens)] for _ in range(args.prompts)]
            llm.reset_prefix_cache()
            if case in ("plain", "tail_plain"):
                run(prompts, plain)
            elif case == "read":
                run(prompts, whole)
            measured = run(prompts, {"no_readings": plain, "tail_plain": tail}.get(case, whole))
            if repeat:  # the first round warms up
                seconds[case].append(measured)
    for case in CASES:
        fields = {"case": case, "seconds": round(min(seconds[case]), 3), "prompts": args.prompts, "tokens": args.tokens}
        print(json.dumps({**fields, "dtype": args.dtype, "machine": describe_machine()}), flush=True)


def _parse_args() -> argparse.Namespace:
    parser = make_parser("What a cached prefix saves for prompt readings.", dtype=True)
    add_counts(parser, prompts=(8, ""), tokens=(1000, "tokens a prompt"), repeats=(3, "measured runs a case"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
