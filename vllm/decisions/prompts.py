"""All wording of prompts. A question is written after the input and before the place of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.decisions.types import Option, Question

PREDICATE_LABELS = (("Yes", "No"), ("yes", "no"), ("true", "false"), ("A", "B"))
"""What may stand for true and false, the preferred first."""

ANSWER_CUE = "Answer:"
"""Where a model without a chat template is to answer."""

VALUE_CUE = "Label:"
"""Begins an answer that is an option's own text, with a chat template and without."""

_LETTER, _NUMBER, _CODE = "Answer with its letter only.", "Answer with its number only.", "Answer with its code only."


def question_text(question: Question, labels: Sequence[str], order: Sequence[int]) -> str:
    """The question with its options, labelled in the order in which they are listed.

    Args:
        labels: one an option listed, or none: the answer is an option's own text.
        order: the options' indices.
    """
    options = [question.options[index] for index in order]
    head = [question.instructions.strip()] if question.instructions.strip() else []
    if not labels:
        return "\n".join([*head, _listed(options)])
    if question.type == "predicate":
        return "\n".join([*head, _predicate_cue(options, labels)])
    lines = [_line(f"{label}.", option) for label, option in zip(labels, options, strict=True)]
    return "\n".join([*head, *lines, _cue(labels)])


def _predicate_cue(options: Sequence[Option], labels: Sequence[str]) -> str:
    first, second = labels
    lines = [
        f"{label}: {option.description}\n" for label, option in zip(labels, options, strict=False) if option.description
    ]
    return "".join(lines) + f"Answer with {first} or {second} only."


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
