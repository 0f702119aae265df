"""Prompts of a scoring request: its query joined with each of its items.

Query and items are tokenised separately and their ids joined, so that an item's tokens do not depend on the query, all
prompts share their first tokens, and a cut falls between two tokens. A space between the parts belongs to the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.answers.prompts.marked_media import MARK, MarkedMedia
from vllm.exceptions import VLLMValidationError
from vllm.server.errors import ApiError
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tokenizers.truncation import special_tokens_around
from vllm.utils.checks import check_encodable, check_id_sequence, check_vocabulary, wrong_type
from vllm.v1.engine.input_processor import ProcessedPrompt


@dataclass(frozen=True)
class ScoringPrompt:
    """A prompt's ids, and how many of the query's were cut."""

    token_ids: list[int]
    num_cut: int


@dataclass(frozen=True)
class PromptBuilder:
    """Makes the prompts of one request.

    Attributes:
        tokenizer: the model's; None = ids only.
        add_special_tokens: add the tokenizer's special tokens on the sides where a prompt begins or ends with a text;
            never around ids.
        max_len: longest prompt, in tokens.
        max_total: limit of tokens of all prompts together.
        truncate_to: length to cut longer prompts to, at most `max_len`; None = too long is an error. Only the query's
            beginning is cut: special tokens, the item and the query's end stay.
        media: those for which texts have marks; None: there are none.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    item_first: bool
    add_special_tokens: bool
    max_len: int
    max_total: int
    truncate_to: int | None
    media: MarkedMedia | None = None

    def build(self, query: Any, items: Sequence[Any]) -> list[ScoringPrompt]:
        """One prompt per item; query and items are texts or lists of ids. Raises VLLMValidationError for other types
        and ids outside the vocabulary, ApiError for no or too many tokens."""
        names = ["query", *(f"items[{index}]" for index in range(len(items)))]
        query_ids, *item_ids = self._encode(list(zip(names, [query, *items], strict=True)))
        before, after = self._special_tokens()
        prompts = []
        total = 0
        for index, (item, ids) in enumerate(zip(items, item_ids, strict=True)):
            first, last = (item, query) if self.item_first else (query, item)
            head = before if isinstance(first, str) else []
            tail = after if isinstance(last, str) else []
            num_cut = self._num_cut(index, len(query_ids), len(ids), len(head) + len(tail))
            kept = query_ids[num_cut:]
            # Every prompt holds the query: a short request can make very many tokens.
            total += len(head) + len(kept) + len(ids) + len(tail)
            if total > self.max_total:
                message = (
                    f"the query and {len(items)} items make more than {self.max_total} tokens together; send fewer"
                )
                raise ApiError(400, message, "items", "too_many_tokens")
            joined = [*ids, *kept] if self.item_first else [*kept, *ids]
            prompts.append(ScoringPrompt([*head, *joined, *tail], num_cut))
        return prompts

    def pictured(self, media: MarkedMedia, query: Any, index: int, pair: tuple[Any, ProcessedPrompt]) -> Any:
        """The prompt of `build` for an item, with the pictures that it and the query have.

        Raises:
            VLLMValidationError: a picture cannot be used.
            ApiError: with its pictures the prompt is too long; what has some is not cut.
        """
        item, prompt = pair
        texts = [each for each in ((item, query) if self.item_first else (query, item)) if isinstance(each, str)]
        text, name = "".join(texts), f"items[{index}]"
        if not MARK.search(text):
            return prompt
        made = media.prompt(name, text, prompt.token_ids)
        limit = self.max_len if self.truncate_to is None else self.truncate_to
        if len(made.token_ids) > limit:
            message = (
                f"{name} makes a prompt of {len(made.token_ids)} tokens with its pictures, and there is room for "
                f"{limit}; what has pictures is not cut"
            )
            raise ApiError(400, message, "items", "context_length_exceeded")
        return made

    def _num_cut(self, index: int, num_query: int, num_item: int, num_special: int) -> int:
        total = num_query + num_item + num_special
        if total == 0:
            raise ApiError(400, f"items[{index}]: the prompt is empty", "items", "invalid_value")
        if self.truncate_to is None:
            if total > self.max_len:
                message = (
                    f"items[{index}] makes a prompt of {total} tokens, and the context holds {self.max_len} beside the "
                    "labels; truncate_prompt_tokens lets the query's beginning go"
                )
                raise ApiError(400, message, "items", "context_length_exceeded")
            return 0
        num_cut = max(total - self.truncate_to, 0)
        if num_cut and num_cut >= num_query:
            message = (
                f"items[{index}] has {num_item} tokens, which leaves no room for the end of the query within "
                f"{self.truncate_to} tokens (truncate_prompt_tokens); items are never cut"
            )
            raise ApiError(400, message, "items", "context_length_exceeded")
        return num_cut

    def _encode(self, parts: list[tuple[str, Any]]) -> list[list[int]]:
        """The ids of named parts, without special tokens."""
        texts = []
        for name, part in parts:
            if isinstance(part, str):
                if self.tokenizer is None:
                    message = f"{name} must be token ids: this server runs without a tokenizer"
                    raise VLLMValidationError(message, name, part)
                check_encodable(name, part)
                texts.append(part)
        encoded = iter(() if self.tokenizer is None else self.tokenizer.encode_batch(texts, add_special_tokens=False))
        return [
            self._without_marks(name, part, next(encoded)) if isinstance(part, str) else self._check_ids(name, part)
            for name, part in parts
        ]

    def _without_marks(self, name: str, text: str, ids: list[int]) -> list[int]:
        """The ids of a text, those of what stands for pictures in the places of its marks."""
        if self.media is None or self.tokenizer is None or not MARK.search(text):
            return ids
        return self.tokenizer.encode(self.media.written(name, text), add_special_tokens=False)

    def _check_ids(self, name: str, part: Any) -> list[int]:
        if not isinstance(part, list):
            raise wrong_type(name, part, "a string or a list of token ids")
        ids = check_id_sequence(name, part)
        check_vocabulary(name, ids, self.vocab_size)
        return ids

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer adds before and after a text."""
        if self.tokenizer is None or not self.add_special_tokens:
            return [], []
        return special_tokens_around(self.tokenizer)
