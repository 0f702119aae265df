"""Custom logits processors: the interface, the adapter for single requests, and how classes are found."""

from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.logits_processor.loading import (
    LOGITSPROCS_GROUP,
    load_logits_processors,
    load_named_processors,
    validate_params,
)
from vllm.v1.sample.logits_processor.request import (
    AdapterLogitsProcessor,
    RequestLogitsProcessor,
    RequestProcessorsFailed,
    process_dict_updates,
)

# Upstream's tests and some of its users' import it by this name.
_load_logitsprocs_by_fqcns = load_named_processors

__all__ = [
    "LOGITSPROCS_GROUP",
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "RequestLogitsProcessor",
    "RequestProcessorsFailed",
    "load_logits_processors",
    "load_named_processors",
    "process_dict_updates",
    "validate_params",
]
