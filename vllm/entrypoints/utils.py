"""The former place of with_cancellation."""

from vllm.entrypoints.serve.utils.api_utils import with_cancellation

__all__ = ["with_cancellation"]
