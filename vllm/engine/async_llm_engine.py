"""AsyncLLM under its older name."""

from __future__ import annotations

from vllm.entrypoints.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
