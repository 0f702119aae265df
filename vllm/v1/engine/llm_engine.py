"""The engine in the caller's process: add requests, step, take outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt, load_tokenizer
from vllm.v1.engine.output_processor import OutputProcessor


class LLMEngine:
    """Input processor, engine core and output processor in one process."""

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.tokenizer = load_tokenizer(self.model_config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.engine_core = EngineCore(config, use_tqdm)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, use_tqdm: bool = False) -> LLMEngine:
        """Build the configuration and the engine; ValueError: an argument that cannot be honoured."""
        if engine_args.data_parallel_size != 1:
            raise ValueError(
                f"data_parallel_size must be 1 for an engine in the caller's process, got "
                f"{engine_args.data_parallel_size}; replicas work behind a server (vllm serve --data-parallel-size N) "
                "or in a job (vllm score --backend ray --replicas N)"
            )
        return cls(engine_args.create_engine_config(), use_tqdm)

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, arrival_time: float | None = None, priority: int = 0
    ) -> None:
        """Queue one request.

        Args:
            request_id: a name that no unfinished request has.
            prompt: a string, a list of ids, or a TextPrompt / TokensPrompt dict.
            arrival_time: seconds on the monotonic clock; None = now.
            priority: lower runs earlier under the "priority" policy.

        Raises:
            VLLMValidationError: a bad prompt, parameter or id; nothing is queued then.
        """
        (processed,) = self.input_processor.process_prompts([prompt], [params])
        checked = self.input_processor.process_params(params, len(processed.token_ids))
        self.add_processed([request_id], [processed], [checked], arrival_time, [priority])

    def add_processed(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[ProcessedPrompt],
        params: Sequence[SamplingParams],
        arrival_time: float | None = None,
        priorities: Sequence[int] | None = None,
    ) -> None:
        """Queue requests that went through the input processor; all of them, or, on an error, none."""
        now = time.monotonic() if arrival_time is None else arrival_time
        priorities = priorities or [0] * len(prompts)
        added: list[str] = []
        try:
            for request_id, prompt, own, priority in zip(request_ids, prompts, params, priorities, strict=True):
                self.input_processor.check_request(request_id, own, priority)
                children = self.output_processor.add_request(request_id, prompt.text, prompt.token_ids, own, now)
                added.append(request_id)
                for request in self.input_processor.core_requests(children, prompt, now, priority):
                    self.engine_core.add_request(request)
        except BaseException:
            self.abort_request(added)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs due by output_kind. After an error only the step's requests are gone."""
        try:
            outputs = self.engine_core.step()
        except BaseException:
            self.output_processor.forget_missing(self.engine_core.scheduler.has_request)
            raise
        processed = self.output_processor.process_outputs(outputs)
        if processed.requests_to_abort:
            self.engine_core.abort_requests(processed.requests_to_abort)
        return processed.request_outputs

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Drop requests by the ids they were added with; unknown ids are ignored."""
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids))

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return self.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Requests not finished yet, by the ids they were added with."""
        return self.output_processor.num_unfinished_requests

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False (and nothing done) while requests run."""
        return self.engine_core.reset_prefix_cache()

    def collective_rpc(self, method: str | Callable, args: tuple = (), kwargs: dict | None = None) -> list[Any]:
        """Call a method of every worker; one result a worker."""
        return self.engine_core.collective_rpc(method, args, kwargs)
