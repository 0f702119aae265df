"""LLMEngine, under upstream's path."""

from __future__ import annotations

from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
