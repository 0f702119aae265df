"""Requests whose results are compared, others to run them with, and the results as arrays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

MAX_TOKENS = 8
NUM_IDS = 20

Result = dict[str, np.ndarray]
"""All arrays of one request's output, by name."""

_READINGS = ("token_ids", "logprobs", "logits", "ranks", "lse", "entropy", "start_indices")
_request_ids = map("selftest-{}".format, itertools.count())


class Probe(NamedTuple):
    """A request: `kind` names its parameters."""

    prompt: list[int]
    kind: str
    params: SamplingParams


def make_probes(vocab_size: int, max_model_len: int, block_size: int, rng: random.Random) -> list[Probe]:
    """Random prompts with parameters of every kind in turn. Lengths: one token, whole blocks, one token more or less,
    more than one segment of attention (256 tokens)."""
    longest = max_model_len - MAX_TOKENS
    lengths = (300, 50, 77, block_size, 5, 3 * block_size - 1, block_size + 1, block_size - 1, 23, 2 * block_size, 1)
    kinds = itertools.cycle(_kinds(vocab_size, rng).items())
    return [
        make_probe(rng.choices(range(vocab_size), k=max(1, min(length, longest))), *next(kinds)) for length in lengths
    ]


def make_others(
    probes: Sequence[Probe], vocab_size: int, max_model_len: int, count: int, rng: random.Random
) -> list[Probe]:
    """Requests of other lengths and kinds; every third begins like a probe, so that they share blocks."""
    kinds = list(_kinds(vocab_size, rng).items())
    longest = max_model_len - MAX_TOKENS
    others = []
    for index in range(count):
        prompt = rng.choices(range(vocab_size), k=rng.randint(1, min(64, longest)))
        if index % 3 == 0:
            model = rng.choice(probes).prompt
            prompt = (model[: rng.randint(1, len(model))] + prompt)[:longest]
        others.append(make_probe(prompt, *rng.choice(kinds)))
    return others


def make_probe(prompt: list[int], kind: str, fields: dict[str, Any]) -> Probe:
    params = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False, **fields}
    return Probe(prompt, kind, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **params))


def _kinds(vocab_size: int, rng: random.Random) -> dict[str, dict[str, Any]]:
    def ids() -> list[int]:
        return rng.sample(range(vocab_size), min(NUM_IDS, vocab_size))

    def seed() -> int:
        return rng.randrange(2**32)

    topk = min(5, vocab_size)
    return {
        "greedy, all logits": {"temperature": 0, "logprobs": -1},
        "scored ids, entropy": {"max_tokens": 0, "logprob_token_ids": ids(), "logprob_entropy": True},
        "prompt top-k and ids": {"temperature": 0, "prompt_logprobs": 3, "prompt_logprob_token_ids": ids()},
        "greedy, ids": {"temperature": 0, "logprob_token_ids": ids()},
        "top-p, all logits": {"temperature": 0.8, "top_p": 0.9, "seed": seed(), "logprobs": -1},
        "top-k and top-p, processed": {
            "temperature": 1.2, "top_k": rng.randint(2, 40), "top_p": 0.8, "seed": seed(), "logprobs": topk,
            "logprobs_mode": "processed_logprobs",
        },
        "min-p and penalties, two samples": {
            "n": 2, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.3,
            "seed": seed(), "logprobs": topk, "logprobs_mode": "processed_logits",
        },
        "one token, top-k": {"temperature": 0, "max_tokens": 1, "logprobs": topk},
        "drawn, prompt read": {"seed": seed(), "logit_bias": {ids()[0]: 2.5}, "prompt_logprobs": 0, "logprobs": topk},
    }  # fmt: skip


def run_probes(
    engine: LLMEngine, probes: Sequence[Probe], arrivals: Sequence[int] | None = None
) -> list[RequestOutput]:
    """Run requests together in an idle engine; outputs come in their order. `arrivals`: the step before which each is
    queued, in any order; None = all before the first. A RuntimeError if the model failed on one."""
    ids = [next(_request_ids) for _ in probes]
    queued = sorted(range(len(probes)), key=(arrivals or [0] * len(probes)).__getitem__)
    found: dict[str, RequestOutput] = {}
    step = 0
    try:
        while queued or engine.has_unfinished_requests():
            while queued and (arrivals is None or arrivals[queued[0]] <= step):
                index = queued.pop(0)
                engine.add_request(ids[index], probes[index].prompt, probes[index].params)
            for output in engine.step():
                error = next((each.error for each in output.outputs if each.error is not None), None)
                if error is not None:
                    raise RuntimeError(error)
                found[output.request_id] = output
            step += 1
    finally:
        engine.abort_request(ids)
    return [found[request_id] for request_id in ids]


def result_of(output: RequestOutput) -> Result:
    result: Result = {}
    for index, completion in enumerate(output.outputs):
        name = f"outputs[{index}]"
        result[f"{name}.token_ids"] = np.asarray(completion.token_ids, dtype=np.int32)
        result.update(_readings(f"{name}.logprobs", completion.logprobs))
        if completion.cumulative_logprob is not None:
            result[f"{name}.cumulative_logprob"] = np.asarray([completion.cumulative_logprob], dtype=np.float64)
    result.update(_readings("prompt_logprobs", output.prompt_logprobs))
    return result


def _readings(name: str, readings: FlatLogprobs | None) -> Result:
    return {} if readings is None else {f"{name}.{part}": getattr(readings, part) for part in _READINGS}
