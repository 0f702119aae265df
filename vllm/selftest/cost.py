"""What batch invariance costs: small workloads in two engines in turn, one with VLLM_BATCH_INVARIANT=1."""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.selftest.probes import Probe, run_probes

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

WORKLOADS = {"scoring": "12 prompts of 40 tokens, 2 ids", "decode": "8 sequences, 16 tokens"}


def measure_cost(default: LLMEngine, invariant: LLMEngine, repeats: int) -> dict[str, dict[str, Any]]:
    """Time each workload `repeats` (>= 1) times in both idle engines, in alternating order, after one warm-up of each.
    By workload: its description, seconds of each run, and the runs' ratios, invariant to default."""
    engines = (default, invariant)
    draws = (random.Random(0), random.Random(0))
    result = {}
    for name, words in WORKLOADS.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for repeat in range(repeats + 1):
            for which in (0, 1) if repeat % 2 else (1, 0):
                requests = _requests(name, engines[which], draws[which])
                started = time.perf_counter()
                run_probes(engines[which], requests)
                seconds[which].append(time.perf_counter() - started)
        without, with_ = (each[1:] for each in seconds)
        ratios = [slow / fast for slow, fast in zip(with_, without, strict=True)]
        result[name] = {
            "workload": words,
            "default_seconds": without,
            "invariant_seconds": with_,
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        }
    return result


def _requests(workload: str, engine: LLMEngine, rng: random.Random) -> list[Probe]:
    """Fresh random prompts, so that none is cached."""
    vocabulary = range(engine.model_config.vocab_size)
    count, length, max_tokens, ids = 8, 4, 16, None
    if workload == "scoring":
        count, length, max_tokens = 12, 40, 1
        ids = rng.sample(vocabulary, min(2, len(vocabulary)))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprob_token_ids=ids,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    length = max(1, min(length, engine.model_config.max_model_len - max_tokens))
    return [Probe(rng.choices(vocabulary, k=length), workload, params) for _ in range(count)]
