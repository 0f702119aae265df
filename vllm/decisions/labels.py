"""Which texts stand for the options, and their tokens after a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from vllm.decisions.prompts import PREDICATE_LABELS
from vllm.decisions.types import Question
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.plans.label_scoring import Label

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class LabelSpeller:
    """Labels as a given tokenizer spells them after the end of a prompt.

    Args:
        tail: the text between a question and its answer.
        predicate_labels: what may stand for true and false, the preferred first.
    """

    def __init__(
        self, tokenizer: Tokenizer, tail: str, predicate_labels: Sequence[Sequence[str]] = PREDICATE_LABELS
    ) -> None:
        self._tokenizer = tokenizer
        self._tail = tail
        self._predicate_labels = predicate_labels
        self._tail_ids = tokenizer.encode(tail, add_special_tokens=False)
        # A template ends where an answer begins; after a word an answer begins with a space.
        is_template = not tail or tail[-1].isspace() or self._tail_ids[-1] in tokenizer.all_special_ids
        has_space = tokenizer.unk_token_id not in tokenizer.encode(" ", add_special_tokens=False)
        self._space = " " if has_space and not is_template else ""
        self._known: dict[tuple[str, int], list[Label]] = {}

    def labels_for(self, question: Question) -> list[Label]:
        """A label for each place in a list of the question's options: of one token each where the tokenizer allows."""
        kind, count = question.type, len(question.options)
        if (kind, count) not in self._known:
            self._known[kind, count] = self._choose(kind, count)
        return self._known[kind, count]

    def value_labels(self, question: Question, place: str) -> list[Label]:
        """The options' texts as labels. Raises VLLMValidationError when two are the same tokens."""
        labels = [self._spell(option.text) for option in question.options]
        seen: dict[tuple[int, ...], str | None] = {}
        for label in labels:
            other = seen.setdefault(tuple(label.token_ids), label.text)
            if not label.token_ids or other is not label.text:
                message = f"{place}: the tokenizer cannot tell {other!r} and {label.text!r} apart; use read='labels'"
                raise VLLMValidationError(message, place, label.text)
            if self._is_unknown(label):
                message = f"{place}: the tokenizer has no tokens for {label.text!r}; use read='labels'"
                raise VLLMValidationError(message, place, label.text)
        return labels

    def _choose(self, kind: str, count: int) -> list[Label]:
        usable = None
        preferred = self._predicate_labels if kind == "predicate" else ()
        for texts in itertools.chain(preferred, _candidates(kind, count)):
            labels = [self._spell(text) for text in texts]
            if not _are_distinct(labels) or any(map(self._is_unknown, labels)):
                continue
            if all(len(label.token_ids) == 1 for label in labels):
                return labels
            usable = usable or labels
        if usable is None:
            message = f"this model's tokenizer cannot tell {count} labels apart, neither letters nor numbers"
            raise VLLMValidationError(message, "questions", count)
        return usable

    def _is_unknown(self, label: Label) -> bool:
        """Whether the tokenizer's token for what it does not know stands in it, whose reading says nothing of it."""
        return self._tokenizer.unk_token_id in label.token_ids

    def _spell(self, text: str) -> Label:
        spaced = self._space + text
        ids = self._tokenizer.encode(self._tail + spaced, add_special_tokens=False)
        num_tail = len(self._tail_ids)
        if ids[:num_tail] != self._tail_ids:
            # The label's beginning merges with the prompt's end, which is fixed: it is spelled by itself.
            return Label(text, self._tokenizer.encode(spaced, add_special_tokens=False))
        return Label(text, ids[num_tail:])


def _candidates(kind: str, count: int) -> Iterator[Sequence[str]]:
    """Sets of `count` labels, the preferred first. Within a set all are equally long, so that none begins another."""
    if kind == "score":
        yield [str(index) for index in range(count)]
    if count <= len(_LETTERS):
        yield _LETTERS[:count]
    if count < 10:
        yield [str(index + 1) for index in range(count)]
    if count <= len(_LETTERS):
        yield _LETTERS[:count].lower()
    yield [first + second for first in _LETTERS for second in _LETTERS][:count]
    width = len(str(count))
    yield [f"{index + 1:0{width}}" for index in range(count)]


def _are_distinct(labels: Sequence[Label]) -> bool:
    """Whether no label's tokens begin with those of another."""
    sequences = sorted(tuple(label.token_ids) for label in labels)
    pairs = itertools.pairwise(sequences)
    return all(sequences) and all(first != second[: len(first)] for first, second in pairs)
