"""Makes the scheduler's side of a connector."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.features.kv_connector.runner import ConnectedLayers
from vllm.v1.features.kv_connector.scheduler import Connections, RankAnswers, Side, StepMessage


def make_connections(config: VllmConfig, call: Callable[[Any, tuple], Any], scheduler: Any) -> Connections:
    """ValueError: the model keeps what a connector does not see."""
    worker = Side(
        lambda: RankAnswers(call(_take_answer, ())),
        lambda message: RankAnswers(call(_run_empty, (message,))),
        partial(call, _shut_down, ()),
    )
    # The last stage's ranks come first.
    of_stages = call(_layer_names, ())[:: config.parallel_config.tensor_parallel_size]
    return Connections(config, scheduler, list(chain(*reversed(of_stages))), worker)


def _layer_names(worker: Any) -> list[str]:
    return list(worker.model_runner.guest(ConnectedLayers).layer_names)


def _take_answer(worker: Any) -> Any:
    return worker.model_runner.guest(ConnectedLayers).take_answer()


def _run_empty(worker: Any, message: StepMessage) -> Any:
    return worker.model_runner.guest(ConnectedLayers).run_empty(message)


def _shut_down(worker: Any) -> None:
    worker.model_runner.guest(ConnectedLayers).shut_down()
