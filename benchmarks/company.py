"""Does a request's result depend on its company? The same 32 requests alone, together, shuffled, preempted, cached.

    python benchmarks/company.py                        # the embedded model, bfloat16
    python benchmarks/company.py --dtype float32 --model FOLDER

Prints one JSON line a way of running them: the largest difference of a logprob from the request alone, and how many
ranks and generated tokens differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NUM_REQUESTS = 32


class Difference(NamedTuple):
    """Of all requests run in some way from the same requests alone."""

    way: str
    logprob: float  # largest absolute difference
    ranks: int  # entries whose rank differs
    tokens: int  # requests whose generated tokens differ
    preemptions: int
    cached_tokens: int


def make_requests(vocab_size: int, longest: int, seed: int = 0) -> tuple[list[list[int]], list[Any]]:
    """32 prompts of up to `longest` tokens, a third of them with a common beginning, and parameters of every kind."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(longest // 2)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprob_token_ids": rng.sample(range(vocab_size), 20)},
        {"temperature": 0, "logprobs": 5, "prompt_logprobs": 2},
        {"seed": 3, "logprobs": 2, "logprob_token_ids": [1, 2, 3], "top_p": 0.9},
        {"seed": 4, "logprobs": 3, "repetition_penalty": 1.3, "logprobs_mode": "processed_logprobs", "top_k": 40},
        {"max_tokens": 0, "prompt_logprob_token_ids": [5, 6], "logprob_token_ids": [7, 8], "logprob_entropy": True},
        {"seed": 5, "logprobs": 0, "logit_bias": {9: 3.0}, "min_p": 0.02, "prompt_logprobs": 0},
    ]
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, longest // 2))]
        prompts.append([*(shared if index % 3 == 0 else ()), *own])
        fields = {"max_tokens": rng.randint(1, 12), "ignore_eos": True, **kinds[index % len(kinds)]}
        params.append(SamplingParams(**fields))
    return prompts, params


def measure(make_llm: Callable[..., Any], vocab_size: int, longest: int) -> Iterator[Difference]:
    """Run the requests in every way.

    Args:
        make_llm: an engine for the given engine arguments.
        longest: tokens of the longest prompt.
    """
    prompts, params = make_requests(vocab_size, longest)
    llm = make_llm()
    alone = []
    for prompt, own in zip(prompts, params, strict=True):
        llm.reset_prefix_cache()
        alone += llm.generate([prompt], own, use_tqdm=False)

    def run(way: str, engine: Any, order: list[int]) -> Difference:
        outputs = engine.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
        pairs = [(alone[index], output) for index, output in zip(order, outputs, strict=True)]
        preemptions = engine.llm_engine.engine_core.scheduler.num_preemptions
        cached = sum(output.num_cached_tokens for output in outputs)
        return Difference(way, *_difference(pairs), preemptions, cached)

    order = list(range(NUM_REQUESTS))
    llm.reset_prefix_cache()
    yield run("together", llm, order)
    yield run("cached", llm, order)
    llm.reset_prefix_cache()
    yield run("shuffled", llm, random.Random(1).sample(order, NUM_REQUESTS))
    blocks = -(-(longest + 12) // 16) + 2
    yield run("preempted", make_llm(num_gpu_blocks_override=blocks), order)
    yield run("chunked by 7", make_llm(max_num_batched_tokens=7), order)


def _difference(pairs: list[tuple[Any, Any]]) -> tuple[float, int, int]:
    import numpy as np

    largest, ranks, tokens = 0.0, 0, 0
    for one, other in pairs:
        if one.outputs[0].token_ids != other.outputs[0].token_ids:
            tokens += 1
            continue
        for first, second in (
            (one.outputs[0].logprobs, other.outputs[0].logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            if first is None:
                continue
            if not np.array_equal(first.token_ids, second.token_ids):
                ranks += len(first.token_ids)
                continue
            largest = max(largest, float(np.abs(first.logprobs - second.logprobs).max(initial=0)))
            ranks += int((first.ranks != second.ranks).sum())
    return largest, ranks, tokens


def main() -> None:
    """Measure on a real model."""
    parser = argparse.ArgumentParser(description="Does a request's result depend on its company?")
    parser.add_argument("--model", help="folder or .gguf; default: the embedded model")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    args = parser.parse_args()
    from vllm import LLM

    def make_llm(**fields: Any) -> Any:
        return LLM(args.model, dtype=args.dtype, max_model_len=512, max_logprobs=-1, **fields)

    vocab_size = make_llm().llm_engine.model_config.vocab_size
    for difference in measure(make_llm, vocab_size, longest=120):
        print(json.dumps({"dtype": args.dtype, **difference._asdict()}), flush=True)


if __name__ == "__main__":
    main()
