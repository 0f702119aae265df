"""Time that a cached prefix saves when a prompt's readings are requested.

    python benchmarks/prompt_readings.py                 # the embedded model, 8 prompts of 1,000 tokens

Prints one JSON line a case, seconds for all prompts (best of the repeats):

no_readings nothing cached, nothing read: the model alone
cold        nothing cached
plain       prompts cached by requests without readings: keys and values only, so everything is computed again
read        prompts cached by requests with readings: keys, values and final hidden states
tail_plain  as `plain`, but only the last 20 positions are read (`prompt_logprob_start`)
"""

from __future__ import annotations

import random
import time
from typing import Any

from common import add_counts, make_parser, print_result

CASES = ("no_readings", "cold", "plain", "read", "tail_plain")


def main() -> None:
    """Measure the cases in turns."""
    from vllm import LLM, SamplingParams

    parser = make_parser("What a cached prefix saves for prompt readings.", dtype=True)
    add_counts(parser, prompts=(8, ""), tokens=(1000, "tokens a prompt"), repeats=(3, "measured runs a case"))
    args = parser.parse_args()
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
            if case in ("plain", "tail_plain", "read"):
                run(prompts, whole if case == "read" else plain)
            measured = run(prompts, {"no_readings": plain, "tail_plain": tail}.get(case, whole))
            if repeat:  # the first round is a warm-up
                seconds[case].append(measured)
    for case, values in seconds.items():
        fields = {"prompts": args.prompts, "tokens": args.tokens, "dtype": args.dtype}
        print_result(case=case, seconds=round(min(values), 3), **fields)


if __name__ == "__main__":
    main()
