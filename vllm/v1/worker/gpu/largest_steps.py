"""The largest possible steps, run to measure their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

ExecuteModel = Callable[[SchedulerOutput], Any]

_NUM_IDS = 20


def run_largest_steps(runner: GPUModelRunner, execute_model: ExecuteModel, config: VllmConfig) -> None:
    """Run max_num_seqs requests with every filter of sampling and readings of generated and of prompt positions: once
    with max_num_batched_tokens of prompts, once each at the end of the longest context. Leaves the runner unchanged.

    Args:
        execute_model: runs a step on `runner` and waits for its results.
    """
    longest, scheduler = config.model_config.max_model_len, config.scheduler_config
    num_tokens = scheduler.max_num_batched_tokens
    num_requests = min(scheduler.max_num_seqs, num_tokens)
    shares = [num_tokens // num_requests + (index < num_tokens % num_requests) for index in range(num_requests)]
    # Custom processors must see users' requests only.
    custom, runner.sampler.custom = runner.sampler.custom, None
    try:
        with runner.scratch_cache():
            _run(execute_model, config, [min(share, longest) for share in shares], 0)
            _run(execute_model, config, [longest] * num_requests, longest - 1)
    finally:
        runner.sampler.custom = custom


def _run(execute_model: ExecuteModel, config: VllmConfig, lengths: list[int], computed: int) -> None:
    """A step of requests whose prompts have these lengths, of which `computed` tokens each are done."""
    params = _demanding_params(config)
    new: list[NewRequestData] = []
    for index, length in enumerate(lengths):
        # All write to the scratch cache's only block.
        blocks = [0] * -(-length // config.cache_config.block_size)
        first_row = 0 if not computed and length > 1 else None
        new.append(NewRequestData(f"largest-step-{index}", [0] * length, length, params, blocks, computed, first_row))
    counts = {each.req_id: each.num_prompt_tokens - computed for each in new}
    # Backwards, so that low slots are free first again.
    ended = [each.req_id for each in reversed(new)]
    try:
        execute_model(SchedulerOutput(new, CachedRequestData(), counts, sum(counts.values()), [], []))
    finally:
        execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, ended, []))


def _demanding_params(config: VllmConfig) -> SamplingParams:
    model, vocab_size = config.model_config, config.model_config.vocab_size
    ids = list(range(min(_NUM_IDS, vocab_size)))
    return SamplingParams(
        max_tokens=1,
        temperature=0.9,
        top_p=0.9,
        top_k=min(50, vocab_size),
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logprobs=vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, vocab_size),
        logprob_token_ids=ids,
        prompt_logprob_token_ids=ids,
    )
