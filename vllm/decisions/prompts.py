"""All wording of prompts. A question is written after the input and before the place of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.decisions.types import Option, Question

PREDICATE_LABELS = (("Yes", "No"), ("yes", "no"), ("true", "false"), ("A", "B"))
"""The pairs that may stand for true and false, the preferred first."""

WORD_PREDICATE_LABELS = PREDICATE_LABELS[1:]
"""The same for a model that answers in words, as its examples are spelled."""

ANSWER_CUE = "Answer:"
"""Where a model without a chat template is to answer."""

VALUE_CUE = "Label:"
"""Begins an answer that is an option's own text, with a chat template and without."""

EXAMPLES = (
    ("I look after the patients in the ward at night.", "Which job is it?", "nurse"),
    ("It has rained since Monday.", "What is the weather like?", "rainy"),
    ("I walked thirty miles and my legs hurt.", "How does the walker feel?", "tired"),
)
"""Texts, questions and answers that show a model that answers in words what is asked of it."""

ROOM_FOR_EXAMPLES = 256
"""Where prompts may have fewer tokens, the examples, about 100, are left out."""

_WORD_MODELS = range(10_000_000, 400_000_000)
"""Weights of models that answer in words but not by letter; those of fewer do neither."""

_LETTER, _NUMBER, _CODE = "Answer with its letter only.", "Answer with its number only.", "Answer with its code only."


def answers_in_words(num_weights: int) -> bool:
    """Whether a model of this size is asked for the options' texts, after examples and without a list of the
    options, of which it would repeat one."""
    return num_weights in _WORD_MODELS


def example_text(text: str) -> str:
    """The text of an example, and an input that follows examples."""
    return f"Text: {text}"


def example_question(text: str, question: str) -> str:
    """An example up to where its answer begins."""
    return f"{example_text(text)}\n\n{question}"


def question_text(question: Question, labels: Sequence[str], order: Sequence[int], in_words: bool = False) -> str:
    """The question with its options, labelled in the order in which they are listed.

    Args:
        labels: one an option listed, or none: the answer is an option's text.
        order: the options' indices.
        in_words: the model answers in words: options without descriptions are not listed if there are no labels.
    """
    options = [question.options[index] for index in order]
    head = [question.instructions.strip()] if question.instructions.strip() else []
    if question.type == "predicate" and in_words:
        return _predicate_in_words(head, options, labels or [option.text for option in options])
    if not labels:
        if in_words and head and not any(option.description for option in options):
            return head[0]
        return "\n".join([*head, _listed(options)])
    if question.type == "predicate":
        return "\n".join([*head, _predicate_cue(options, labels)])
    lines = [_line(f"{label}.", option) for label, option in zip(labels, options, strict=True)]
    return "\n".join([*head, *lines, _cue(labels)])


def _predicate_cue(options: Sequence[Option], labels: Sequence[str]) -> str:
    return "\n".join([*_described(options, labels), f"Answer with {labels[0]} or {labels[1]} only."])


def _predicate_in_words(head: Sequence[str], options: Sequence[Option], labels: Sequence[str]) -> str:
    lines = _described(options, labels)
    return ("\n" if lines else " ").join([*head, *lines, f"{labels[0].capitalize()} or {labels[1]}?"])


def _described(options: Sequence[Option], labels: Sequence[str]) -> list[str]:
    pairs = zip(labels, options, strict=True)
    return [f"{label}: {option.description}" for label, option in pairs if option.description]


def _listed(options: Sequence[Option]) -> str:
    if any(option.description for option in options):
        return "\n".join(_line("-", option) for option in options)
    return f"({', '.join(option.text for option in options)})"


def _line(mark: str, option: Option) -> str:
    return f"{mark} {option.text}" + (f" ({option.description})" if option.description else "")


def _cue(labels: Sequence[str]) -> str:
    if labels[0].isdigit():
        return _NUMBER
    return _LETTER if len(labels[0]) == 1 else _CODE
