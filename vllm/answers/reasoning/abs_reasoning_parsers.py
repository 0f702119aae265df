"""Parsers of reasoning: their base class, and the names that they are chosen by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

from vllm.answers.deltas import DeltaMessage, as_delta
from vllm.answers.events import as_content, as_reasoning, collect
from vllm.answers.reader import Machine, Reader, Step
from vllm.answers.registry import ParserManager, Registry
from vllm.answers.syntax.calls import framed_content


class ReasoningParser:
    """Reads one answer. A format is its markers; classes that others have written override `extract_reasoning` and
    `extract_reasoning_streaming` instead.

    Attributes:
        names: that --reasoning-parser knows it by.
        begins: markers, one of which begins the reasoning.
        ends: markers, one of which ends it.
        also_ends: further ones, which belong to what follows.
        ends_before_any: the marker that ends it where calls may follow, if `ends` are those before content.
        has_channels: answers are messages in channels, whose markup has words: they are always parted.
        frames: markup around the content, which is left out of it.
        drops: a text after the beginning that is none of the reasoning.
        drops_after: characters that do not begin the content after it.
        is_implicit: an answer without a beginning begins with reasoning.
        thinks: the same where the prompt is not known, as in `extract_reasoning`, unless thinking is switched off.
        template_marks: texts that chat templates of such models hold, each of them; for the choice by template.
    """

    names: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    also_ends: ClassVar[tuple[str, ...]] = ()
    ends_before_any: ClassVar[str] = ""
    has_channels: ClassVar[bool] = False
    frames: ClassVar[tuple[str, ...]] = ()
    drops: ClassVar[str] = ""
    drops_after: ClassVar[str] = ""
    is_implicit: ClassVar[bool] = False
    thinks: ClassVar[bool] = False
    template_marks: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, tokenizer: Any = None, *args: Any, chat_template_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """
        Args:
            tokenizer: of the model; formats here do without, but for what asks about token ids.
            chat_template_kwargs: of the request; `enable_thinking` or `thinking` says whether answers reason.
        """
        self.model_tokenizer = tokenizer
        self._machine: Machine | None = None
        # As `is_inside` of `read_reasoning`.
        self._is_inside = _switch(chat_template_kwargs)
        if self._is_inside is None and self.thinks:
            self._is_inside = True

    @property
    def reasoning_end_token_ids(self) -> set[int]:
        """Ids of tokens that end the reasoning."""
        return self._ids_of(self.ends) | self._ids_of(self.also_ends)

    @property
    def vocab(self) -> dict[str, int]:
        """The tokenizer's vocabulary."""
        return self.model_tokenizer.get_vocab()

    @classmethod
    def begins_inside(cls, prompt: str) -> bool | None:
        """Whether an answer begins within reasoning, as the prompt has its beginning; False: the prompt has its end,
        too; None: it has neither. `prompt`: what stands behind the last turn of others, whose words say nothing of
        it."""
        end = prompt.rstrip()
        if any(end.endswith(marker.rstrip()) for marker in cls.ends):
            return False
        begun = max((prompt.rfind(marker) for marker in cls.begins), default=-1)
        if any(end.endswith((marker + cls.drops).rstrip()) for marker in cls.begins):
            return True
        # A message that goes on.
        is_open = begun >= 0 and begun > max(prompt.rfind(marker) for marker in cls.ends)
        return True if is_open and not _has_turn_after(prompt[begun:]) else None

    @classmethod
    def pair_of(cls, prompt: str) -> tuple[str, str]:
        """The markers that answers to the prompt write: of several pairs the one whose beginning it has last."""
        places = [prompt.rfind(marker) for marker in cls.begins]
        index = places.index(max(places)) if len(cls.begins) == len(cls.ends) else 0
        return (cls.begins[index] if cls.begins else ""), cls.ends[index]

    def read_reasoning(self, reader: Reader, is_inside: bool | None) -> Iterator[Step]:
        """Read up to where the content begins. `is_inside`: see `begins_inside`."""
        reader.mark()
        yield from reader.skip_space()
        leading = reader.since_mark()
        found = yield from reader.skip(*self.begins)
        if found is None:
            reader.put_back(leading)
            if not (self.is_implicit if is_inside is None else is_inside):
                return
        if self.drops:
            yield from reader.skip(self.drops)
        found = yield from reader.text_until((*self.ends, *self.also_ends), as_reasoning)
        if found in self.also_ends:
            reader.put_back(found)
        while self.drops_after and (yield from reader.peek()) in tuple(self.drops_after):
            reader.take(1)
        reader.mark()

    def read(self, reader: Reader, is_inside: bool | None = None) -> Iterator[Step]:
        """Read a whole answer: reasoning and content."""
        yield from self.read_reasoning(reader, is_inside)
        yield from self.read_content(reader)

    def read_content(self, reader: Reader) -> Iterator[Step]:
        """Read what follows the reasoning, where no calls are looked for."""
        if self.frames:
            yield from framed_content(reader, self.frames)
        else:
            yield from reader.text_until((), as_content)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The reasoning and the content of a whole answer; None for a part that it does not have."""
        switch = _switch(getattr(request, "chat_template_kwargs", None))
        alone = self._is_inside if switch is None else switch
        has_end = any(marker in model_output for marker in self.ends)
        first = min((place for each in self.ends if (place := model_output.find(each)) >= 0), default=0)
        is_begun = any(marker in model_output[:first] for marker in self.begins)
        machine = Machine(lambda reader: self.read(reader, True if has_end and not is_begun else alone))
        answer = collect([*machine.feed(model_output), *machine.finish()])
        return answer.reasoning, answer.content

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """The delta of the answer's next piece; None: nothing yet."""
        if self._machine is None or current_text == delta_text:
            self._machine = Machine(lambda reader: self.read(reader, self._is_inside))
            if previous_text:
                self._machine.feed(previous_text)
        return as_delta(self._machine.feed(delta_text))

    def adjust_request(self, request: Any) -> Any:
        """The request as the parser wants it: markers that are special tokens must stand in the text."""
        if self.ends and getattr(request, "skip_special_tokens", None) is not False:
            request.skip_special_tokens = False
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last marker among the ids ends the reasoning; always with thinking switched off."""
        if self._is_inside is False:
            return True
        begins, ends = self._ids_of(self.begins), self.reasoning_end_token_ids
        if begins and ends:
            last = next((each for each in reversed(input_ids) if each in begins or each in ends), None)
            return last in ends
        return self._ends_in_text(input_ids)

    def _ends_in_text(self, input_ids: Sequence[int]) -> bool:
        text = self._text(input_ids)
        end = max((text.rfind(marker) for marker in self.ends), default=-1)
        return end >= 0 and end >= max((text.rfind(marker) for marker in self.begins), default=-1)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the newest ids end it."""
        return self.is_reasoning_end(list(delta_ids))

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids after the end of the reasoning; none without one."""
        for place in range(len(input_ids)):
            if self.is_reasoning_end(input_ids[: place + 1]):
                return input_ids[place + 1 :]
        return []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens between the markers, which count as none; 0 where the markers are no single tokens, or thinking is
        switched off."""
        begins, ends = self._ids_of(self.begins), self._ids_of(self.ends)
        if not begins or not ends or self._is_inside is False:
            return 0
        is_begun = any(each in begins for each in token_ids)
        depth = 1 if self._is_inside and not is_begun else 0
        count = 0
        for each in token_ids:
            if each in begins:
                depth += 1
            elif each in ends:
                depth = max(depth - 1, 0)
            else:
                count += depth > 0
        return count

    def _ids_of(self, markers: Sequence[str]) -> set[int]:
        """Ids of markers that are one token each; none if one is not."""
        vocab = self.vocab
        return {vocab[each] for each in markers} if all(each in vocab for each in markers) else set()

    def _text(self, ids: Sequence[int]) -> str:
        return self.model_tokenizer.decode(list(ids), skip_special_tokens=False)


def _switch(variables: dict[str, Any] | None) -> bool | None:
    """Whether the template's variables say that answers reason; None: they do not say."""
    own = [bool(value) for name, value in (variables or {}).items() if name in ("enable_thinking", "thinking")]
    return all(own) if own else None


def _has_turn_after(text: str) -> bool:
    """Whether another turn begins after a marker, which was a user's text then."""
    return any(mark in text for mark in ("<|im_end|>", "<|im_start|>", "<|eot_id|>", "<end_of_turn>", "[/INST]"))


class ReasoningParserManager(ParserManager[ReasoningParser]):
    """The parsers by name."""

    _registry: ClassVar[Registry[ReasoningParser]] = Registry(
        "vllm.answers.reasoning", "ReasoningParser", "reasoning parser"
    )

    @classmethod
    def get_reasoning_parser(cls, name: str) -> type[ReasoningParser]:
        """
        Raises:
            KeyError: no parser has the name; it says which names there are.
        """
        return cls._registry.get(name)

    @classmethod
    def import_reasoning_parser(cls, plugin_path: str) -> ModuleType:
        """Run a Python file that registers parsers.

        Raises:
            ValueError: it cannot be run.
        """
        return cls._registry.import_file(plugin_path)
