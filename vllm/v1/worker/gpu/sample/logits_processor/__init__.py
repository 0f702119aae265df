"""Custom logits processors by slot; vllm.v1.sample.logits_processor has those by index."""

from vllm.v1.sample.logits_processor.slots import LogitsContext, LogitsProcRequestState
from vllm.v1.sample.logits_processor.slots import SlotLogitsProcessor as LogitsProcessor

__all__ = ["LogitsContext", "LogitsProcRequestState", "LogitsProcessor"]
