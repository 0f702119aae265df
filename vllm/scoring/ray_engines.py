"""Engines in actors of a Ray cluster, which score batches. One that is lost loses no batch."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring.replicas import engine_resources, load_scorer, rank_groups
from vllm.utils.ray_utils import call_within

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

MAX_LOSSES = 3  # of engines that score one batch, or of engines in a row that do not load
_PLACE_SECONDS = 300.0  # without an engine that has a place on the cluster
_HEAD_SECONDS = 40.0  # without an answer of the cluster's head; Ray ends the process after 60 or more, without a word
_ASK_SECONDS = 5.0  # between two questions to the head
_KILL_SECONDS = 5.0
_TICK_SECONDS = 1.0
_BATCHES_EACH = 2  # at once, so that an engine does not wait for its next one

_PLACE, _LOAD = "place", "load"

Batch = tuple[int, bytes]
"""A part's number, and what `FileJob.score` gets for it."""


class EnginesLostError(RuntimeError):
    """No engine can go on."""


class FileJob(Protocol):
    """The engines' task for a file; picklable."""

    @property
    def engine_args(self) -> EngineArgs:
        """Arguments of an engine."""

    def make_scorer(self, llm: LLM) -> Any:
        """The object that `score` gets first. CliError, ValueError, OSError: the model or the labels cannot be used."""

    def score(self, scorer: Any, part: int, items: bytes) -> Any:
        """A batch's result, which depends on the batch alone."""


@ray.remote(max_restarts=0, max_task_retries=0)
class ScoringEngine:
    """One engine."""

    def place(self) -> None:
        """Returns once the actor runs."""

    def load(self, job: FileJob) -> str | None:
        """Why these arguments cannot be used; None: they can."""
        self._job = job
        self._scorer, refusal = load_scorer(job.engine_args, job.make_scorer)
        return refusal

    def score(self, part: int, items: bytes) -> Any:
        """The batch's result."""
        return self._job.score(self._scorer, part, items)


@dataclass(eq=False)
class _Engine:
    actor: Any
    bundles: PlacementGroup | None  # of its ranks, where these are actors, too
    is_placed: bool = False
    is_loaded: bool = False
    batches: list[Batch] = field(default_factory=list)  # which it has, in their order


class RayEngines:
    """`replicas` engines, each with `cpus` CPUs (None: as many as fit) or its GPUs; ranks that Ray places have as many
    each. One that is lost, with its process, a node or the way there, is replaced once there is room, and its batches
    go to any. A context manager: the actors end with it. ValueError: the cluster has no room for so many.
    """

    def __init__(self, job: FileJob, replicas: int, cpus: float | None) -> None:
        self._resources = engine_resources(job.engine_args, replicas, cpus)
        self._job, self._replicas = job, replicas
        self._engines: list[_Engine] = []
        self._calls: dict[Any, tuple[_Engine, str | Batch]] = {}
        self._again: deque[Batch] = deque()
        self._is_exhausted = False
        self._losses: Counter[int] = Counter()
        self._lost: set[int] = set()  # parts that a lost engine had
        self._failed_loads = 0
        self._placed_at = self._answered_at = time.monotonic()
        self._closing = threading.Event()

    def __enter__(self) -> RayEngines:
        threading.Thread(target=self._ask_head, name="vllm-ray-head", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        call_within(_KILL_SECONDS, _kill_all, self._engines)

    def results(self, batches: Iterator[Batch]) -> Iterator[Any]:
        """A result of each batch, as soon as there is one, in any order. CliError: the engines refuse the arguments;
        EnginesLostError: they cannot go on."""
        while len(self._engines) < self._replicas:
            self._start()
        while self._feed(batches):
            ready, _ = ray.wait(list(self._calls), timeout=_TICK_SECONDS)
            for call in ready:
                # Another call may have told that the engine is lost.
                if call in self._calls:
                    yield from self._take(call)
            self._check_cluster()

    def _start(self) -> None:
        options, bundles = dict(self._resources), None
        count, together = rank_groups(self._job.engine_args)
        if count > 1:
            # The engine's executor finds these, as it runs in them.
            bundles = placement_group([{"CPU": together * options["num_cpus"]}] * count, "PACK")
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(bundles, 0, True)
        engine = _Engine(ScoringEngine.options(**options).remote(), bundles)  # type: ignore[attr-defined]
        self._engines.append(engine)
        self._calls[engine.actor.place.remote()] = (engine, _PLACE)
        self._calls[engine.actor.load.remote(self._job)] = (engine, _LOAD)

    def _feed(self, batches: Iterator[Batch]) -> bool:
        """Give the engines what they have room for; whether a batch is left that has no result."""
        for count in range(_BATCHES_EACH):
            for engine in self._engines:
                # A result that was on its way is lost with the engine, too: only alone is a batch known to be at fault.
                if count and (self._again or (engine.batches and engine.batches[0][0] in self._lost)):
                    continue
                if engine.is_loaded and len(engine.batches) == count and (batch := self._next(batches)):
                    engine.batches.append(batch)
                    self._calls[engine.actor.score.remote(*batch)] = (engine, batch)
        return bool(self._again) or not self._is_exhausted or any(engine.batches for engine in self._engines)

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        if self._again:
            return self._again.popleft()
        batch = next(batches, None)
        self._is_exhausted = batch is None
        return batch

    def _take(self, call: Any) -> Iterator[Any]:
        engine, what = self._calls.pop(call)
        try:
            value = ray.get(call)
        except ray.exceptions.RayError as error:
            self._replace(engine, last_line(error))
            return
        if isinstance(what, tuple):
            engine.batches.remove(what)
            yield value
        elif what == _PLACE:
            engine.is_placed = True
        elif value is not None:
            raise CliError(value)
        else:
            engine.is_loaded, self._failed_loads = True, 0

    def _replace(self, engine: _Engine, reason: str) -> None:
        """Start another in place of a lost one."""
        self._calls = {call: of for call, of in self._calls.items() if of[0] is not engine}
        self._engines.remove(engine)
        call_within(_KILL_SECONDS, _kill_all, [engine])
        if engine.batches:
            # The others have waited behind it.
            self._lost.update(each for each, _ in engine.batches)
            part = engine.batches[0][0]
            self._losses[part] += 1
            if (losses := self._losses[part]) > MAX_LOSSES:
                raise EnginesLostError(f"{losses} engines were lost with batch {part}, the last one: {reason}")
        elif not engine.is_loaded:
            self._failed_loads += 1
            if self._failed_loads > MAX_LOSSES:
                raise EnginesLostError(f"{self._failed_loads} engines in a row did not load, the last one: {reason}")
        self._again.extend(engine.batches)
        self._start()

    def _ask_head(self) -> None:
        while not self._closing.wait(_ASK_SECONDS):
            with suppress(Exception):
                ray.nodes()
                self._answered_at = time.monotonic()

    def _check_cluster(self) -> None:
        now = time.monotonic()
        if now - self._answered_at > _HEAD_SECONDS:
            raise EnginesLostError(f"for {_HEAD_SECONDS:g} s its head has not answered")
        if any(engine.is_placed for engine in self._engines):
            self._placed_at = now
        elif now - self._placed_at > _PLACE_SECONDS:
            needed = " and ".join(f"{count:g} {name[4:-1].upper()}" for name, count in self._resources.items() if count)
            num_nodes, together = rank_groups(self._job.engine_args)
            ranks = num_nodes * together
            if ranks > 1:
                needed = f"{ranks} ranks with {needed} each" + f", {together} of them on a node" * (together > 1)
            raise EnginesLostError(f"for {_PLACE_SECONDS:g} s no node has had room for an engine ({needed})")


def last_line(error: Exception) -> str:
    """The end of a message of Ray's, after a traceback where there is one."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _kill_all(engines: Sequence[_Engine]) -> None:
    for engine in engines:
        ray.kill(engine.actor)
        if engine.bundles is not None:
            remove_placement_group(engine.bundles)
