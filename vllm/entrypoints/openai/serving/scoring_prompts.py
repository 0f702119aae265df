"""Prompts of a scoring request: a query put together with each of its items.

Query and items are tokenised each by itself and their ids joined, so that an item's tokens do not depend on the query,
all prompts begin with the same tokens, and a cut falls between two tokens. Where the second part would be joined to the
first by a space, the space belongs at its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.errors import ApiError
from vllm.exceptions import VLLMValidationError, shown
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import check_encodable, check_list, check_token_id, check_vocabulary, wrong_type

_PROBE = "a"


@dataclass(frozen=True)
class ScoringPrompt:
    """A prompt's ids, and how many of the query's were cut."""

    token_ids: list[int]
    num_cut: int


@dataclass(frozen=True)
class PromptBuilder:
    """How the prompts of a request are made.

    Attributes:
        tokenizer: the model's; None = ids only.
        vocab_size: bound of the ids.
        item_first: the query follows the item.
        add_special_tokens: put around a prompt what the tokenizer puts around a text, on those sides where it begins
            or ends with a text. Ids are taken as they are.
        max_len: longest prompt, in tokens.
        max_total: tokens that all prompts together may have.
        truncate_to: length that a longer prompt is cut to, at most `max_len`; None = it is an error. What goes is the
            query's beginning; special tokens, the item and the query's end stay.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    item_first: bool
    add_special_tokens: bool
    max_len: int
    max_total: int
    truncate_to: int | None

    def build(self, query: Any, items: Sequence[Any]) -> list[ScoringPrompt]:
        """One prompt an item.

        Args:
            query: a text or a list of ids.
            items: the same, each.

        Raises:
            VLLMValidationError: another type, or an id outside the vocabulary.
            ApiError: an empty prompt, one that is too long, one whose item alone is, or all together are.
        """
        query_ids, *item_ids = self._encode(
            [("query", query), *((f"items[{i}]", item) for i, item in enumerate(items))]
        )
        before, after = self._special_tokens()
        prompts = []
        total = 0
        for index, (item, ids) in enumerate(zip(items, item_ids, strict=True)):
            first, last = (item, query) if self.item_first else (query, item)
            head = before if isinstance(first, str) else []
            tail = after if isinstance(last, str) else []
            num_cut = self._num_cut(index, len(query_ids), len(ids), len(head) + len(tail))
            kept = query_ids[num_cut:]
            # Checked here, as the query may make far more of a request than was sent.
            total += len(head) + len(kept) + len(ids) + len(tail)
            if total > self.max_total:
                raise ApiError(
                    400,
                    f"the query and {len(items)} items make more than {self.max_total} tokens together; send fewer",
                    param="items",
                    code="too_many_tokens",
                )
            joined = [*ids, *kept] if self.item_first else [*kept, *ids]
            prompts.append(ScoringPrompt([*head, *joined, *tail], num_cut))
        return prompts

    def _num_cut(self, index: int, num_query: int, num_item: int, num_special: int) -> int:
        total = num_query + num_item + num_special
        if total == 0:
            raise ApiError(400, f"items[{index}]: the prompt is empty", param="items", code="invalid_value")
        if self.truncate_to is None:
            if total > self.max_len:
                raise ApiError(
                    400,
                    f"items[{index}] makes a prompt of {total} tokens, and the context holds {self.max_len} beside the "
                    "labels; truncate_prompt_tokens lets the query's beginning go",
                    param="items",
                    code="context_length_exceeded",
                )
            return 0
        num_cut = max(total - self.truncate_to, 0)
        if num_cut and num_cut >= num_query:
            raise ApiError(
                400,
                f"items[{index}] has {num_item} tokens, which leaves no room for the end of the query within "
                f"{self.truncate_to} tokens (truncate_prompt_tokens); items are never cut",
                param="items",
                code="context_length_exceeded",
            )
        return num_cut

    def _encode(self, parts: list[tuple[str, Any]]) -> list[list[int]]:
        """The ids of named parts, without special tokens around them."""
        texts = []
        for name, part in parts:
            if isinstance(part, str):
                if self.tokenizer is None:
                    raise VLLMValidationError(
                        f"{name} must be token ids: this server runs without a tokenizer", parameter=name, value=part
                    )
                check_encodable(name, part)
                texts.append(part)
        encoded = iter(
            self.tokenizer.encode_batch(texts, add_special_tokens=False) if self.tokenizer is not None else ()
        )
        return [next(encoded) if isinstance(part, str) else self._check_ids(name, part) for name, part in parts]

    def _check_ids(self, name: str, part: Any) -> list[int]:
        if not isinstance(part, list):
            raise wrong_type(name, part, "a string or a list of token ids")
        ids = [check_token_id(name, value) for value in check_list(name, part, "a list of token ids")]
        if ids and min(ids) < 0:
            raise VLLMValidationError(
                f"{name} must not be negative, got {shown(min(ids))}", parameter=name, value=min(ids)
            )
        check_vocabulary(name, ids, self.vocab_size)
        return ids

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        if self.tokenizer is None or not self.add_special_tokens:
            return [], []
        bare = self.tokenizer.encode(_PROBE, add_special_tokens=False)
        whole = self.tokenizer.encode(_PROBE)
        num_special = max(len(whole) - len(bare), 0)
        starts = (i for i in range(num_special + 1) if whole[i : i + len(bare)] == bare)
        start = next(starts, num_special)
        return whole[:start], whole[start + len(bare) :]
