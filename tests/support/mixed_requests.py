"""Requests of every kind at once, and all that users see of their results."""

from __future__ import annotations

import itertools

import numpy as np

from vllm import SamplingParams

# Each letter after each other: what may come depends on the token before.
BAD_WORDS = [first + second for first in "abcdefgh" for second in "abcdefgh"]


def workload(generator: np.random.Generator) -> tuple[list, list[SamplingParams]]:
    """One request of each kind, in any order, over prompts that share their beginnings."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0, "logprob_token_ids": [3, 4, 9], "logprobs": 2},
        {"seed": 1, "logprobs": 3, "logprobs_mode": "processed_logprobs", "top_k": 20},
        {"seed": 2, "top_p": 0.8, "min_p": 0.01, "n": 2, "stop": ["e", "\u0001"]},
        {"seed": 3, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logprobs": 1},
        {"temperature": 0, "repetition_penalty": 2.0, "min_tokens": 5, "stop_token_ids": list(range(40, 120))},
        {"seed": 4, "bad_words": BAD_WORDS, "top_k": 2, "logprob_token_ids": [7]},
        {"seed": 5, "prompt_logprobs": 2, "logprobs": 0},
        {"max_tokens": 0, "prompt_logprobs": 1},
        {"seed": 6, "logit_bias": {50: 5.0}, "stop_token_ids": [50], "logprob_token_ids": [50]},
        {"seed": 7, "allowed_token_ids": [60, 61, 62], "logprob_entropy": True, "logprobs": 2},
        {"seed": 8, "logits_processors": [lambda prompt, output, logits: logits.roll(sum(output))]},
    ]
    generator.shuffle(kinds)
    prompts = [[5] * int(generator.choice([1, 16, 30])) + generator.integers(3, 250, 9).tolist() for _ in kinds]
    params = [SamplingParams(**{"max_tokens": int(generator.integers(1, 40)), **kind}) for kind in kinds]
    return prompts, params


def results(llm, prompts, params, aborted=()) -> list:
    """Everything that users see, as plain values."""
    engine, done = llm.llm_engine, {}
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}, own)
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            done[output.request_id] = output
        if step == 4:
            engine.abort_request(aborted)
    return [
        [plain(done[str(number)].prompt_logprobs)]
        + [(each.token_ids, each.text, each.finish_reason, each.stop_reason, plain(each.logprobs)) for each in outputs]
        for number in range(len(prompts))
        if str(number) not in aborted and (outputs := done[str(number)].outputs)
    ]


def plain(readings):
    if readings is None:
        return None
    fields = ("token_ids", "logprobs", "logits", "ranks", "lse", "start_indices")
    return [getattr(readings, field).tolist() for field in fields] + [np.nan_to_num(readings.entropy).tolist()]
