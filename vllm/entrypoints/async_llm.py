"""The engine for an event loop, with what `LLM` has beside generating."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from vllm.decisions.params import DecisionParams
from vllm.decisions.plan import DecisionPlan
from vllm.decisions.types import Decision
from vllm.exceptions import GenerationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_engine import AsyncEngine
from vllm.v1.engine.request_stream import RequestStream


class AsyncLLM(AsyncEngine):
    """See AsyncEngine."""

    async def decide(
        self,
        input: Any,
        questions: Any,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> Decision:
        """Answer typed questions about one input; a cancelled call aborts its requests.

        Args:
            input: a text, or a list of OpenAI's messages and tool calls.
            questions, **options: as for LLM.decide.
            request_id, priority, lora_request: as for `add_request`; without an id one is made.

        Raises:
            VLLMValidationError: as for LLM.decide, or a bad id or priority.
            EngineDeadError: the engine is dead.
        """
        params = DecisionParams(**options)
        # In a thread: templates and long inputs may be slow.
        plan = await asyncio.to_thread(DecisionPlan, self.model_config, self.tokenizer, input, questions, params)
        requests = plan.requests()
        if request_id is None:
            request_id = f"decision-{uuid.uuid4().hex}"
        for _, own in requests:
            self.input_processor.check_request(request_id, own, priority)
        prompts = await self.with_adapters([prompt for prompt, _ in requests], [lora_request] * len(requests))
        names = [f"{request_id}-{index}" for index in range(len(requests))]
        try:
            streams = [
                await self.add_checked(name, prompt, own, priority)
                for name, prompt, (_, own) in zip(names, prompts, requests, strict=True)
            ]
            outputs = [await _last(stream) for stream in streams]
        except BaseException:
            await asyncio.shield(self.abort(names))
            raise
        finished = [output for output in outputs if output is not None and output.finished]
        if len(finished) < len(outputs):
            raise GenerationError(f"request {request_id!r} was aborted")
        return plan.decision(finished)


async def _last(stream: RequestStream) -> RequestOutput | None:
    last = None
    async for output in stream:
        last = output
    return last
