"""AsyncLLM under its older name."""

from __future__ import annotations

from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
