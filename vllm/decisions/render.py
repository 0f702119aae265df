"""Prompts of a decision: the input and each question, as the model's chat template writes them, and their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.answers.prompts import render_texts
from vllm.decisions.conversation import Turn, after_examples, conversations, transcript
from vllm.decisions.prompts import ANSWER_CUE, EXAMPLES, example_question, example_text
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tokenizers.truncation import special_tokens_around

# Stands for the question while a template is run; no template treats it like anything but a word.
_PLACE = "QUESTIONxPLACExHERE"
_MARGIN = 32  # characters
_THINKS = re.compile(r"<(think|thinking|thought|reason|reasoning)>\s*$")


@dataclass(frozen=True)
class Frame:
    """The frame around every question of a decision.

    Attributes:
        head: text before it, with the input.
        tail: text after it; the answer follows.
        has_template: a chat template wrote it, special tokens included.
    """

    head: str
    tail: str
    has_template: bool

    def encode(self, tokenizer: Tokenizer, questions: Sequence[str]) -> list[list[int]]:
        """Each prompt's ids. What of the head does not depend on the question is encoded once."""
        first = [] if self.has_template else special_tokens_around(tokenizer)[0]
        rests = [question + self.tail for question in questions]
        whole = tokenizer.encode(self.head + rests[0], add_special_tokens=False)
        for end, start in self._cuts():
            head = tokenizer.encode(self.head[:end], add_special_tokens=False)
            between = self.head[start:]
            if head + tokenizer.encode(between + rests[0], add_special_tokens=False) == whole:
                break
        else:
            head, between = [], self.head
        ids = tokenizer.encode_batch([between + rest for rest in rests], add_special_tokens=False)
        return [[*first, *head, *own] for own in ids]

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Where the head may be cut between tokens: (end of the first part, start of the second)."""
        yield len(self.head), len(self.head)
        # A question may change how the head's last white space is spelled, but not a word this far before it.
        space = self.head.rfind(" ", 0, len(self.head) - _MARGIN)
        if space > 0:
            yield space, space
            # A tokenizer that puts a space before every text adds this one.
            yield space, space + 1


def make_frame(
    turns: Sequence[Turn],
    question: str,
    tokenizer: Tokenizer,
    chat_template: str | None,
    template_kwargs: Mapping[str, Any] | None,
    cue: str = "",
    has_examples: bool = False,
) -> Frame:
    """The frame of an input.

    Args:
        question: any of the questions; the frame is tried on it.
        chat_template: in place of the tokenizer's.
        cue: the beginning of the answer.
        has_examples: EXAMPLES stand before the input.

    Raises:
        VLLMValidationError: template_kwargs that cannot be, or a template that takes no conversation at all.
    """
    template = chat_template or tokenizer.chat_template
    examples = [(example_question(*own), f"{cue} {answer}") for *own, answer in EXAMPLES] if has_examples else []
    if examples and len(turns) == 1 and turns[0].role == "user":
        turns = [replace(turns[0], text=example_text(turns[0].text))]
    if template is None:
        texts = [*map("\n".join, examples), *filter(None, [transcript(turns)])]
        return Frame("".join(f"{each}\n\n" for each in texts), f"\n{cue or ANSWER_CUE}", False)
    turns = after_examples(turns, examples)
    options: dict[str, Any] = {
        "chat_template": chat_template,
        "chat_template_kwargs": {"enable_thinking": False, **(template_kwargs or {})},
    }
    texts = [each for turn in turns for each in (turn.text, turn.tool)]
    place = _PLACE
    while any(place in each for each in texts):
        place += "x"
    wanted = [_squeezed(each) for turn in turns for each in (turn.text, turn.tool) if turn.role != "call"]
    wanted += [turn.tool for turn in turns if turn.role == "call"]
    problem: VLLMValidationError | None = None
    ways = [
        *zip(*(conversations(turns, each, "developer" in str(template)) for each in (place, question)), strict=True)
    ]
    # A template may fail on a role, or leave messages of it out.
    for way in ways:
        try:
            marked, written = render_texts(list(way), tokenizer, **options)
        except VLLMValidationError as error:
            if error.parameter is not None and not error.parameter.startswith("messages"):
                raise
            problem = problem or error
            continue
        head, *tails = marked.split(place)
        is_whole = all(each in _squeezed(head) for each in wanted)
        if is_whole and len(tails) == 1 and _squeezed(head + question + tails[0]) == _squeezed(written):
            return Frame(head, _without_thinking(tails[0], template_kwargs) + cue, True)
    if problem is None:
        message = "the chat template does not write a user's message as it is, so that no question can be asked by it"
        problem = VLLMValidationError(message, "chat_template")
    raise problem


def _squeezed(text: str) -> str:
    """The text without white space, which templates may change."""
    return "".join(text.split())


def _without_thinking(tail: str, template_kwargs: Mapping[str, Any] | None) -> str:
    """The tail with an end to the thinking that a template has begun although nobody asked for it."""
    found = _THINKS.search(tail)
    if found is None or (template_kwargs or {}).get("enable_thinking"):
        return tail
    return f"{tail.rstrip()}\n\n</{found[1]}>\n\n"
