"""Settings of the scheduler: how much a step holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.config.checks import at_least, one_of

POLICIES = ("fcfs", "priority")

_LARGE_DEVICE_BYTES = 70 * 2**30


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share a step.

    Attributes:
        max_num_seqs: requests in a step, and slots of the model runner.
        max_num_batched_tokens: tokens in a step.
        enable_chunked_prefill: split a prompt over steps when it does not fit.
        policy: "fcfs" or "priority" (lower value first).
        max_model_len: the model's, for callers who look for it here; None in a configuration of a caller's own.
        async_scheduling: begin a step before the results of the one before it are known; results are the same.
        num_steps_in_flight: steps that may have begun without results, each with its part of max_num_batched_tokens and
            of the requests: a request's next token waits for its last one, and others fill the gap.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    async_scheduling: bool = False
    num_steps_in_flight: int = 1
    max_model_len: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        one_of("scheduling_policy", self.policy, POLICIES)


def default_step_sizes(device_bytes: int | None, is_offline: bool) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) where nothing was asked for. Large steps fill a GPU; a server's are
    smaller, since a token waits for a whole step. `device_bytes` is the GPU's memory, None on a CPU."""
    if device_bytes is None:
        return 2048, 256
    if device_bytes < _LARGE_DEVICE_BYTES:
        return (8192 if is_offline else 2048), 256
    return (16384 if is_offline else 8192), 1024
