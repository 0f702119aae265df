"""Errors and usage in answers."""

from vllm.server.protocol import ErrorInfo, ErrorResponse, Usage

UsageInfo = Usage

__all__ = ["ErrorInfo", "ErrorResponse", "UsageInfo"]
