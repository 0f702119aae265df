"""Errors, usage and deltas in answers."""

from vllm.server.protocol import ChatDelta, ErrorInfo, ErrorResponse, StreamOptions, Usage

DeltaMessage = ChatDelta
UsageInfo = Usage

__all__ = ["DeltaMessage", "ErrorInfo", "ErrorResponse", "StreamOptions", "UsageInfo"]
