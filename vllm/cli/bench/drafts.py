"""Speculation in the benchmarks' reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.exceptions import CliError

if TYPE_CHECKING:
    from vllm.utils.server_client import ServerClient


@dataclass(frozen=True)
class DraftCounts:
    """Drafts, their tokens and those of them that were right, also by place in a draft."""

    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: Sequence[int] = ()

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """The counts since `earlier`."""
        before = [*earlier.accepted_by_position, *[0] * len(self.accepted_by_position)]
        return DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            [own - other for own, other in zip(self.accepted_by_position, before, strict=False)],
        )

    def figures(self) -> dict[str, float]:
        """The share of drafted tokens that were right, tokens that a draft brought, with the one after it, and the
        counts; empty without drafts."""
        if not self.num_drafts:
            return {}
        return {
            "acceptance_rate": self.accepted_tokens / self.draft_tokens,
            "acceptance_length": 1 + self.accepted_tokens / self.num_drafts,
            "num_drafts": self.num_drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    def rates_by_position(self) -> list[float]:
        """The share of all drafts whose token at each place was right."""
        return [count / self.num_drafts for count in self.accepted_by_position] if self.num_drafts else []


def counts_of_steps(drafted: Sequence[int], accepted: Sequence[int]) -> DraftCounts:
    """The counts of drafts with so many tokens, and so many right ones."""
    places = [sum(count > place for count in accepted) for place in range(max(drafted, default=0))]
    return DraftCounts(len(drafted), sum(drafted), sum(accepted), places)


async def counts_of_server(client: ServerClient) -> DraftCounts:
    """Since the server's start, of all its engines, by /metrics; nothing if it has none, or none of drafts."""
    from prometheus_client.parser import text_string_to_metric_families

    from vllm.v1.metrics.reader import ACCEPTED_BY_POSITION

    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(await client.text("/metrics")):
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:spec_decode_").removesuffix("_total")
                if f"spec_decode_{name}" == ACCEPTED_BY_POSITION and "position" in sample.labels:
                    place = int(sample.labels["position"])
                    by_position[place] = by_position.get(place, 0) + sample.value
                elif not sample.name.endswith("_created"):
                    totals[name] = totals.get(name, 0) + sample.value
    except (CliError, ValueError):
        return DraftCounts()
    drafts, drafted, accepted = (
        int(totals.get(f"num_{name}", 0)) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return DraftCounts(drafts, drafted, accepted, [int(by_position[place]) for place in sorted(by_position)])
