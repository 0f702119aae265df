"""A parser that two properties make: reasoning between two tokens."""

from __future__ import annotations

from typing import Any

from vllm.answers.reasoning.abs_reasoning_parsers import ReasoningParser


class BaseThinkingReasoningParser(ReasoningParser):
    """A subclass has `start_token` and `end_token`, constants; an answer without the first begins with reasoning."""

    is_implicit = True
    thinks = True

    def __init_subclass__(cls) -> None:
        """The tokens are the class's markers, which are asked for before there is an instance."""
        super().__init_subclass__()
        blank = object.__new__(cls)
        try:
            start, end = blank.start_token, blank.end_token
        except Exception:  # a subclass that is no format, or whose properties need an instance
            return
        if start and end:
            cls.begins, cls.ends = (start,), (end,)

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            ValueError: no tokenizer, or an empty token.
            RuntimeError: the tokenizer does not have the tokens.
        """
        super().__init__(tokenizer, *args, **kwargs)
        name = type(self).__name__
        if tokenizer is None:
            raise ValueError(f"{name}: the model tokenizer must be passed")
        if not self.start_token or not self.end_token:
            raise ValueError(f"{name}: start_token and end_token must be defined by the subclass")
        vocab = self.vocab
        if self.start_token not in vocab or self.end_token not in vocab:
            raise RuntimeError(f"{name} could not locate think start/end tokens in the tokenizer")
        self.start_token_id, self.end_token_id = vocab[self.start_token], vocab[self.end_token]

    @property
    def start_token(self) -> str:
        """Begins the reasoning."""
        raise NotImplementedError("start_token")

    @property
    def end_token(self) -> str:
        """Ends it."""
        raise NotImplementedError("end_token")

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """As of other parsers; reasoning that is empty is an empty text."""
        reasoning, content = super().extract_reasoning(model_output, request)
        return reasoning or "", content
