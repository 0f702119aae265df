"""Counts of speculative decoding, as callers make and read them; this engine drafts no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestSpecDecodeMetrics:
    """Drafted and accepted tokens of one request.

    Attributes:
        num_spec_tokens: the most tokens that a step drafts.
        histogram: steps by the number of tokens accepted in them, [num_spec_tokens + 1].
        num_draft_tokens: tokens drafted in all.
        per_step_accepted: accepted tokens of each step observed with `detailed`.
        per_step_drafted: drafted tokens of each of these steps.
    """

    num_spec_tokens: int
    histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, num_spec_tokens: int) -> RequestSpecDecodeMetrics:
        """No step observed yet."""
        return cls(num_spec_tokens, [0] * (num_spec_tokens + 1))

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count one step.

        Raises:
            IndexError: more tokens accepted than a step drafts.
        """
        self.histogram[num_accepted] += 1
        self.num_draft_tokens += num_draft_tokens
        if detailed:
            self.per_step_accepted.append(num_accepted)
            self.per_step_drafted.append(num_draft_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Its fields by name."""
        return dict(vars(self))
