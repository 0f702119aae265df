"""What shares a step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.checks import at_least, one_of

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share a step.

    Attributes:
        max_num_seqs: requests in a step, and slots of the model runner.
        max_num_batched_tokens: tokens in a step.
        enable_chunked_prefill: split a prompt over steps when it does not fit.
        policy: "fcfs" or "priority" (lower value first).
        async_scheduling: begin a step before the results of the one before it are known; results are the same.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        one_of("scheduling_policy", self.policy, POLICIES)
