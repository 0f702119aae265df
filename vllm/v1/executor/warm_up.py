"""Steps of every kind before the first request. Triton compiles a kernel when it is first launched with arguments of
another class, which takes 0.5 to 3 s; without these steps requests would wait for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.executor.memory import run_requests
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = init_logger(__name__)

# One of each class of widths that reading kernels are compiled for.
_WIDTHS: tuple[dict[str, Any], ...] = (
    {"logprobs": 0},
    {"logprobs": 8},
    {"logprobs": 0, "logprob_token_ids": 8},
    {"logprobs": 0, "logprob_token_ids": 40},
)
_DRAWN: dict[str, Any] = {"temperature": 1.0}
_PROCESSED: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.1, "logit_bias": {0: 1.0}},
)
# More rows than a tile of few rows has.
_MANY_TOKENS = 40


def warm_up(runner: GPUModelRunner, config: VllmConfig) -> None:
    """Run requests of every kind, so that their kernels are compiled. Leaves the runner unchanged."""
    start = time.monotonic()
    longest = config.model_config.max_model_len
    # Custom processors must see users' requests only.
    custom, runner.sampler.custom = runner.sampler.custom, None
    plain, drawn = (SamplingParams(max_tokens=1, **fields) for fields in ({"temperature": 0.0}, _DRAWN))
    try:
        with runner.scratch_cache():
            for length, computed in ((1, 0), (2, 0), (_MANY_TOKENS, 0), (longest, longest - 1)):
                length = min(length, longest)
                run_requests(runner, config, [length], min(computed, length - 1), [plain])
            if not runner.records_steps:
                return  # it samples nothing
            for params in _sampling_kinds(config.model_config.vocab_size):
                # Behind another row of logits, or of the copies that are processed, a row is aligned otherwise if the
                # vocabulary is odd.
                for batch in ([params], [plain, params], [drawn, params]):
                    if len(batch) <= runner.states.max_num_reqs:
                        run_requests(runner, config, [1] * len(batch), 0, batch)
            for params in _prompt_kinds(config.model_config.vocab_size):
                run_requests(runner, config, [min(3, longest)], 0, [params])
    finally:
        runner.sampler.custom = custom
    logger.info("Kernels are ready after %.1f s", time.monotonic() - start)


def _sampling_kinds(vocab_size: int) -> Iterator[SamplingParams]:
    for fields in ({}, *_PROCESSED):
        yield SamplingParams(max_tokens=1, **_DRAWN, **fields)
    for widths, entropy, drawn in itertools.product(_WIDTHS, (False, True), ({"temperature": 0.0}, _DRAWN)):
        yield SamplingParams(max_tokens=1, logprob_entropy=entropy, **drawn, **_with_ids(widths, vocab_size))


def _prompt_kinds(vocab_size: int) -> Iterator[SamplingParams]:
    for widths, entropy in itertools.product(_WIDTHS, (False, True)):
        reads = {f"prompt_{name}": value for name, value in _with_ids(widths, vocab_size).items()}
        yield SamplingParams(max_tokens=1, temperature=0.0, logprob_entropy=entropy, **reads)


def _with_ids(widths: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Lists of ids in place of their lengths, and no more than there are."""
    fields = {name: min(width, vocab_size) for name, width in widths.items()}
    if "logprob_token_ids" in fields:
        fields["logprob_token_ids"] = list(range(fields["logprob_token_ids"]))
    return fields
