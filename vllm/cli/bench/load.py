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
    text: str = ""
    error: str | None = None

    @property
    def intervals(self) -> list[float]:
        """Seconds between two chunks with tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


async def run_load(
    client: ServerClient,
    calls: Sequence[Call],
    concurrency: int | None = None,
    request_rate: float | None = None,
    seed: int = 0,
    burstiness: float = 1.0,
) -> list[Outcome]:
    """Make all calls, at most `concurrency` at once; their outcomes, in the same order.

    Args:
        request_rate: calls a second, at gamma-distributed intervals drawn from `seed`; None = without intervals.
        burstiness: the shape of that distribution; 1 = exponential (a Poisson process).
    """
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
            is_poisson = burstiness == 1
            scale = 1 / (request_rate * burstiness)
            due += draw.expovariate(request_rate) if is_poisson else draw.gammavariate(burstiness, scale)
            await asyncio.sleep(due - time.monotonic())
            tasks.append(asyncio.create_task(make(call, due)))
    return list(await asyncio.gather(*tasks))


async def _outcome(client: ServerClient, call: Call, began: float) -> Outcome:
    outcome = Outcome(began)
    try:
        if call.body.get("stream"):
            await _read_stream(outcome, client.events(call.path, call.body))
        else:
            answer = await client.post(call.path, call.body)
            _count(outcome, answer)
            outcome.text = "".join(map(_text, answer.get("choices", ())))
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
        choices = chunk.get("choices", ())
        if any(_has_token(choice) for choice in choices):
            outcome.token_times.append(when)
        outcome.text += "".join(map(_text, choices))
        _count(outcome, chunk)


def _has_token(choice: dict[str, Any]) -> bool:
    # The first chunk of a chat has only the role, the last may have only the end. A completion's text may be empty: its
    # token is part of a character.
    return bool(choice["delta"].get("content")) if "delta" in choice else "text" in choice


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return part.get("content") or choice.get("text") or ""


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


_METRICS = {
    "e2el": "end_to_end_seconds",
    "ttft": "first_token_seconds",
    "tpot": "further_token_seconds",
    "itl": "inter_token_seconds",
}


def metric_values(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """The seconds of each metric, by upstream's names, of the requests that did not fail: to the first token, for a
    further one (a request's mean), between two chunks, and of the whole request."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    streams = [outcome for outcome in done if outcome.token_times]
    return {
        "e2el": [outcome.ended - outcome.began for outcome in done],
        "ttft": [outcome.token_times[0] - outcome.began for outcome in streams],
        "tpot": [
            (outcome.token_times[-1] - outcome.token_times[0]) / (outcome.output_tokens - 1)
            for outcome in streams
            if outcome.output_tokens > 1
        ],
        "itl": [seconds for outcome in streams for seconds in outcome.intervals],
    }


def latencies(
    outcomes: Iterable[Outcome], metrics: Iterable[str] = tuple(_METRICS), percents: Sequence[float] = PERCENTILES
) -> dict[str, dict[str, float]]:
    """Mean and percentiles of metrics, in seconds; without those that have no values."""
    values = metric_values(outcomes)
    return {
        _METRICS[name]: percentiles(values[name], percents) for name in _METRICS if name in metrics and values[name]
    }


def percentiles(values: Sequence[float], percents: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Mean and percentiles of at least one value."""
    return {"mean": statistics.fmean(values), **{f"p{each:g}": percentile(values, each) for each in percents}}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linearly interpolated, of at least one value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
