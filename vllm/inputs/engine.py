"""The engine's own prompts, under upstream's present path."""

from vllm.inputs.data import EngineInput, TokensInput, tokens_input

__all__ = ["EngineInput", "TokensInput", "tokens_input"]
