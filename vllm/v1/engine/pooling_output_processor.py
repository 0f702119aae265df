"""Turns the core's outputs into PoolingRequestOutputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from vllm.pooling_outputs import PoolingOutput, PoolingRequestOutput, RequestError
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.output_processor import ProcessedOutputs, id_in_use_error
from vllm.v1.messages import EngineCoreOutput

if TYPE_CHECKING:
    # The offline engine needs no client of Prometheus.
    from vllm.v1.metrics.engine_metrics import EngineMetrics, News, SequenceRecord


class PoolingOutputProcessor:
    """The unfinished requests of a pooling model; methods as OutputProcessor's."""

    def __init__(self, metrics: EngineMetrics | None = None) -> None:
        self._token_ids: dict[str, list[int]] = {}
        self._metrics = metrics
        self._records: dict[str, SequenceRecord] = {}  # none without metrics

    def add_request(
        self, request_id: str, prompt: ProcessedPrompt, params: PoolingParams, arrival: float, priority: int = 0
    ) -> list[tuple[str, PoolingParams]]:
        if request_id in self._token_ids:
            raise id_in_use_error(request_id, request_id)
        self._token_ids[request_id] = prompt.token_ids
        if self._metrics is not None:
            from vllm.v1.metrics.engine_metrics import SequenceRecord

            self._records[request_id] = SequenceRecord(arrival, len(prompt.token_ids), 0, 0)
        return [(request_id, params)]

    def process_outputs(self, outputs: list[EngineCoreOutput], step_time: float | None = None) -> ProcessedOutputs:
        result = ProcessedOutputs()
        made: list[Any] = result.request_outputs
        news: list[News] = []
        for output in outputs:
            token_ids = self._token_ids.pop(output.request_id, None)
            if token_ids is None:
                continue  # aborted while the step ran
            data = torch.empty(0) if output.pooling_output is None else output.pooling_output
            error = None if output.error is None else RequestError("engine", output.error, retryable=True)
            num_cached = max(output.num_cached_tokens, 0)
            made.append(
                PoolingRequestOutput(output.request_id, PoolingOutput(data), token_ids, num_cached, True, error=error)
            )
            result.begun.append(output.request_id)
            result.ended.append(output.request_id)
            if self._metrics is not None:
                news.append((self._records.pop(output.request_id), output, "stop" if error is None else "error"))
        if self._metrics is not None:
            now = time.monotonic()
            self._metrics.observe_step(news, now if step_time is None else step_time, now)
        return result

    @property
    def unfinished_request_ids(self) -> list[str]:
        return list(self._token_ids)

    def has_unfinished_requests(self) -> bool:
        return bool(self._token_ids)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._token_ids)

    num_unfinished_sequences = num_unfinished_requests

    def outputs_so_far(self, request_ids: Iterable[str]) -> list[Any]:
        """A request has all of its output or nothing: those that are unfinished get none, with the reason."""
        error = RequestError("aborted", "the request was aborted", retryable=True)
        return [
            PoolingRequestOutput(each, PoolingOutput(torch.empty(0)), self._token_ids[each], 0, True, error=error)
            for each in request_ids
            if each in self._token_ids
        ]

    def abort_requests(self, request_ids: Iterable[str], reason: str = "abort") -> list[str]:
        aborted = [each for each in list(request_ids) if self._token_ids.pop(each, None) is not None]
        for each in aborted:
            self._records.pop(each, None)
        if self._metrics is not None:
            self._metrics.observe_dropped(len(aborted), reason)
        return aborted

    def forget_missing(self, is_known: Callable[[str], bool]) -> None:
        self.abort_requests([each for each in self._token_ids if not is_known(each)])
