"""Pictures and videos in texts: marks in their places, until these are prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.answers.prompts.content_forms import words_of_medium
from vllm.answers.prompts.conversations import SOURCE, checked_part, is_picture, is_picture_kind
from vllm.exceptions import VLLMValidationError
from vllm.inputs.media import LoadedPictures, PictureSource, with_pictures
from vllm.inputs.text_options import TextOptions
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.checks import wrong_type

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt

# The characters are nobody's.
_BEGIN, _END = "\ue002", "\ue003"
MARK = re.compile(f"{_BEGIN}([0-9]+){_END}")
"""It stands for a picture or a video in a text."""


def looks_like_a_mark(name: str) -> VLLMValidationError:
    """The error of a text that has what only marks have."""
    return VLLMValidationError(f"{name}: U+E002, digits and U+E003 stand for a picture here: leave one out", name)


class MarkedMedia:
    """The pictures and videos of some texts."""

    def __init__(
        self, processor: InputProcessor, cache_salt: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """`cache_salt` and `options` (mm_processor_kwargs): of the prompts that have pictures."""
        self._processor, self._options = processor, options
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        self._sources: list[PictureSource] = []
        self._loaded: list[tuple[Any, str | None, str, str]] = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._sources)

    def part(self, place: str, part: Any) -> str | None:
        """The mark of a part that is a picture or a video; None: it is none.

        Raises:
            VLLMValidationError: it is malformed, or the model reads none.
        """
        return self._text(place, part) if isinstance(part, Mapping) and is_picture_kind(part.get("type")) else None

    def text_of(self, name: str, parts: Sequence[Any]) -> str:
        """A content's text: its parts one after the other, marks in place of pictures and videos.

        Args:
            name: the content, in errors.

        Raises:
            VLLMValidationError: a part cannot be read, or there are more pictures or videos than the model takes.
        """
        if not all(isinstance(part, Mapping) for part in parts):
            raise wrong_type(name, parts, "a list of objects")
        before = len(self._sources)
        text = "".join([self._text(f"{name}[{index}]", part) for index, part in enumerate(parts)])
        self.check_count(name, before)
        if len(MARK.findall(text)) != len(self._sources) - before:
            raise looks_like_a_mark(name)
        return text

    def marked(self, name: str, value: Any) -> Any:
        """The text of {"content": [parts]}, with marks; anything else as it is. Errors as of `text_of`."""
        if isinstance(value, str) and MARK.search(value):
            raise looks_like_a_mark(name)
        if not isinstance(value, dict) or set(value) != {"content"}:
            return value
        if not isinstance(value["content"], list) or not value["content"]:
            raise wrong_type(f"{name}.content", value["content"], "a list of parts")
        return self.text_of(f"{name}.content", value["content"])

    def _text(self, place: str, part: Any) -> str:
        made = checked_part(place, part, self._processor.read_media)
        if not is_picture(made):
            return str(made["text"])
        self._sources.append(made[SOURCE])
        return f"{_BEGIN}{len(self._sources) - 1}{_END}"

    def check_count(self, name: str, start: int = 0) -> None:
        """VLLMValidationError: from number `start` on there are more than a prompt may have, which `name` is to be."""
        if self._sources[start:]:
            self._processor.picture_loader.check_count(self._sources[start:], name)

    async def load(self) -> None:
        """Fetch and decode them; errors as of PictureLoader."""
        if self._sources:
            self._keep(await self._processor.picture_loader.load(self._sources, of_a_prompt=False))

    def load_now(self) -> None:
        """`load` for callers without an event loop; they may be as many as its memory holds."""
        for source in self._sources:
            self._keep(self._processor.picture_loader.load_now([source]))

    def _keep(self, loaded: LoadedPictures) -> None:
        sources = self._sources[len(self._loaded) :]
        for image, uuid, source in zip(loaded.images, loaded.uuids, sources, strict=False):
            self._loaded.append((image, uuid, source.name, source.kind))

    def words(
        self, chat_template: str | None = None, own: Callable[[str], str | None] = lambda kind: None
    ) -> dict[str, str]:
        """The texts that stand for a picture and for a video in a prompt, by kind: `own` of the kind, or as the chat
        template (None: the model's) writes it, or the model's word for it."""
        tokenizer = self._processor.tokenizer
        template = chat_template or (None if tokenizer is None else tokenizer.chat_template)
        return {
            kind: own(kind) or (words_of_medium(template, kind) if isinstance(template, str) else None) or word
            for kind, word in self._processor.read_media.words.items()
        }

    def word(self, number: str, words: Mapping[str, str]) -> str:
        """One of `words`: that for the picture or the video whose mark has the number."""
        return words[self._sources[int(number)].kind]

    def written(self, name: str, text: str, words: Mapping[str, str] | None = None) -> str:
        """A text with `words` in the places of marks; None: those of `words()`.

        Raises:
            VLLMValidationError: it has what stands for one already, or a mark that is nobody's.
        """
        self._numbers(name, text)
        rest = MARK.sub("", text)
        for word in self._processor.read_media.words.values():
            if word in rest:
                raise VLLMValidationError(f"{name}: a text beside pictures has {word!r}, which stands for one", name)
        chosen = self.words() if words is None else words
        return MARK.sub(lambda mark: self.word(mark[1], chosen), text)

    def _numbers(self, name: str, text: str) -> list[int]:
        """The numbers of the marks in a text, in their order."""
        numbers = MARK.findall(text)
        if len({*numbers}) != len(numbers) or any(int(number) >= len(self._sources) for number in numbers):
            raise looks_like_a_mark(name)
        return [int(number) for number in numbers]

    def prompt(
        self,
        name: str,
        text: str,
        ids: list[int] | None = None,
        words: Mapping[str, str] | None = None,
        params: Any = None,
        adds_special_tokens: bool = True,
    ) -> ProcessedPrompt:
        """A prompt with its pictures and videos.

        Args:
            name: the document, in errors.
            text: with a mark for each of these, in their order.
            ids: of the text, with the ids of `words` in place of marks; None: the text is to be tokenised.
            words: by kind, what stands for one; None: `words()`.
            params: of the request, for its length; None: of one that reads the end.

        Raises:
            VLLMValidationError: it is too long, the text has what stands for a picture, or a picture cannot be used.
        """
        begun: dict[str, Any] = (
            {"prompt": self.written(name, text, words)} if ids is None else {"prompt_token_ids": ids}
        )
        own = [self._loaded[number] for number in self._numbers(name, text)]
        images, uuids, places, kinds = zip(*own, strict=True) if own else ((), (), (), ())
        made = with_pictures({**begun, **self._salt}, LoadedPictures(images, uuids, places, kinds), self._options)
        if params is None:
            is_pooling = self._processor.model_config.runner_type == "pooling"
            params = PoolingParams() if is_pooling else SamplingParams(max_tokens=0)
        try:
            (prompt,) = self._processor.process_prompts([made], [params], options=TextOptions(adds_special_tokens))
        except VLLMValidationError as error:
            if error.parameter in places:
                raise
            raise VLLMValidationError(f"{name}: {error.args[0]}", name, error.value) from None
        return prompt
