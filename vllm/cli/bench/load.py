"""The load that `vllm bench serve` puts on a server, and what it measures."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.exceptions import CliError
from vllm.utils.server_client import ServerClient

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Call:
    """A request; it streams if its body says so."""

    path: str
    body: dict[str, Any]


@dataclass
class Outcome:
    """The result of a call. Times are seconds on the monotonic clock, token counts the server's."""

    began: float  # when it was due; under a request rate it is sent later if the client falls behind
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)  # of each chunk with tokens; empty unless it streams
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


async def run_load(
    client: ServerClient,
    calls: Sequence[Call],
    concurrency: int | None = None,
    request_rate: float | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Make all calls, at most `concurrency` at once; their outcomes, in the same order. `request_rate`: calls a second,
    at exponentially distributed intervals (a Poisson process) drawn from `seed`; None = without intervals."""
    draw = random.Random(seed)
    slots = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    due, tasks = time.monotonic(), []

    async def make(call: Call, when: float | None) -> Outcome:
        async with slots:
            return await _outcome(client, call, time.monotonic() if when is None else when)

    for call in calls:
        if request_rate is None:
            tasks.append(asyncio.create_task(make(call, None)))
        else:
            due += draw.expovariate(request_rate)
            await asyncio.sleep(due - time.monotonic())
            tasks.append(asyncio.create_task(make(call, due)))
    return list(await asyncio.gather(*tasks))


async def _outcome(client: ServerClient, call: Call, began: float) -> Outcome:
    outcome = Outcome(began)
    try:
        if call.body.get("stream"):
            await _read_stream(outcome, client.events(call.path, call.body))
        else:
            _count(outcome, await client.post(call.path, call.body))
            outcome.ended = time.monotonic()
    except CliError as error:
        outcome.error = str(error)
    return outcome


async def _read_stream(outcome: Outcome, events: AsyncIterator[bytes]) -> None:
    # Decoded at the end: the client often shares its machine with the server.
    received = [(time.monotonic(), data) async for data in events]
    outcome.ended = time.monotonic()
    for when, data in received:
        chunk = msgspec.json.decode(data)
        if any(_has_token(choice) for choice in chunk.get("choices", ())):
            outcome.token_times.append(when)
        _count(outcome, chunk)


def _has_token(choice: dict[str, Any]) -> bool:
    # The first chunk of a chat has only the role, the last may have only the end. A completion's text may be empty: its
    # token is part of a character.
    return bool(choice["delta"].get("content")) if "delta" in choice else "text" in choice


def _count(outcome: Outcome, answer: dict[str, Any]) -> None:
    usage = answer.get("usage") or {}
    outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)
    outcome.output_tokens = usage.get("completion_tokens", outcome.output_tokens)


def rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Requests and tokens a second from the first call to the last answer, over the calls that did not fail."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max(outcome.ended for outcome in done) - min(outcome.began for outcome in outcomes) if done else 0.0
    amounts = {
        "requests_per_second": len(done),
        "prompt_tokens_per_second": sum(outcome.prompt_tokens for outcome in done),
        "output_tokens_per_second": sum(outcome.output_tokens for outcome in done),
    }
    return {"seconds": seconds, **{name: amount / seconds if done else 0.0 for name, amount in amounts.items()}}


def latencies(outcomes: Iterable[Outcome]) -> dict[str, dict[str, float]]:
    """Percentiles in seconds of a request's whole time, time to first token, mean time for a further token, and of the
    time between two chunks of a stream; without those that have no values."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    streams = [outcome for outcome in done if outcome.token_times]
    values = {
        "end_to_end_seconds": [outcome.ended - outcome.began for outcome in done],
        "first_token_seconds": [outcome.token_times[0] - outcome.began for outcome in streams],
        "further_token_seconds": [
            (outcome.token_times[-1] - outcome.token_times[0]) / (outcome.output_tokens - 1)
            for outcome in streams
            if outcome.output_tokens > 1
        ],
        "inter_token_seconds": [
            later - earlier
            for outcome in streams
            for earlier, later in zip(outcome.token_times, outcome.token_times[1:], strict=False)
        ],
    }
    return {name: percentiles(each) for name, each in values.items() if each}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean and linearly interpolated percentiles of at least one value."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"mean": statistics.fmean(values), **{f"p{percent}": cuts[percent - 1] for percent in PERCENTILES}}
