"""Processors of single requests as a processor of the batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.request import BoundProcessor, RequestLogitsProcessor


class RequestProcessorsFailed(Exception):
    """Processors of some requests raised, `errors` by index in the batch; all others have run, in place."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__("; ".join(f"index {i}: {type(error).__name__}: {error}" for i, error in errors.items()))
        self.errors = errors


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs a separate processor for each request. A subclass defines `new_req_logits_processor` and
    `is_argmax_invariant`; its constructor, if any, must call this class's."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.req_info: dict[int, BoundProcessor] = {}  # index -> the request's processor and its token ids

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The processor of a request that joins the batch; None when its logits stay as they are.

        An exception from here, like one from the processor, ends this request alone.
        """

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """As LogitsProcessor's. Raises RequestProcessorsFailed when some of the requests' processors did."""
        errors = self.apply_to_rows({index: logits[index] for index in self.req_info})
        if errors:
            raise RequestProcessorsFailed(errors)
        return logits

    def apply_to_rows(self, rows: Mapping[int, torch.Tensor]) -> dict[int, Exception]:
        """Process in place single rows of the batch, index -> float32 [V]; rows without a processor stay as they are.
        Returns what the requests' processors raised, by index."""
        errors: dict[int, Exception] = {}
        for index, row in rows.items():
            processor = self.req_info.get(index)
            try:
                if processor is not None:
                    processor.apply(row)
            except Exception as error:
                errors[index] = error
        return errors

    @property
    def acts_by_row(self) -> bool:
        """Whether `apply` is not overridden, so that `apply_to_rows` may replace it."""
        return type(self).apply is AdapterLogitsProcessor.apply

    def _bind(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> BoundProcessor | None:
        try:
            processor = self.new_req_logits_processor(params)
            return None if processor is None else BoundProcessor(processor, prompt_ids, output_ids)
        except Exception as error:
            return _failing(error)


def _failing(error: Exception) -> BoundProcessor:
    """Replaces a processor that could not be created: its request fails, and the others keep their indices."""

    def fail(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise error

    return BoundProcessor(fail, None, [])
