"""Pictures in queries and documents: marks in their texts, until these are prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.answers.prompts.content_forms import words_of_picture
from vllm.answers.prompts.picture_parts import SOURCE, picture_part
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
MARK = re.compile(f"{_BEGIN}[0-9]+{_END}")
"""It stands for a picture in a text."""


def looks_like_a_mark(name: str) -> VLLMValidationError:
    """The error of a text that has what only this module writes."""
    return VLLMValidationError(f"{name}: U+E002, digits and U+E003 stand for a picture here: leave one out", name)


class PairPictures:
    """The pictures of some queries and documents."""

    def __init__(
        self, processor: InputProcessor, cache_salt: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """`cache_salt` and `options` (mm_processor_kwargs): of the prompts that have pictures."""
        self._processor, self._options = processor, options
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        self._sources: list[PictureSource] = []
        self._loaded: list[tuple[Any, str | None, str]] = []

    @property
    def are_some(self) -> bool:
        """Whether there are any."""
        return bool(self._sources)

    def text_of(self, name: str, parts: Sequence[Any]) -> str:
        """A content's text: its parts one after the other, marks in place of pictures.

        Args:
            name: the content, in errors.

        Raises:
            VLLMValidationError: a part is neither a text nor a picture, the model reads no pictures, or there are more
                than it takes.
        """
        texts, before = [], len(self._sources)
        for index, part in enumerate(parts):
            place = f"{name}[{index}]"
            if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
                continue
            picture = picture_part(place, part) if isinstance(part, Mapping) else None
            if picture is None:
                raise VLLMValidationError(f"{place} must be a part of type 'text', or a picture", place)
            source: PictureSource = picture[SOURCE]
            if why := self._processor.model_config.why_no_images:
                raise VLLMValidationError(f"{source.name} is a picture, and only texts can be read: {why}", source.name)
            texts.append(f"{_BEGIN}{len(self._sources)}{_END}")
            self._sources.append(source)
        count, most = len(self._sources) - before, self._processor.model_config.max_images
        if count > most:
            raise VLLMValidationError(f"{name} has {count} pictures; limit_mm_per_prompt allows {most}", name, count)
        text = "".join(texts)
        if len(MARK.findall(text)) != count:
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

    async def load(self) -> None:
        """Fetch and decode them; errors as of PictureLoader."""
        if self._sources:
            loader = self._processor.picture_loader
            self._keep(await loader.load(self._sources, most=len(self._sources)))

    def load_now(self) -> None:
        """`load` for callers without an event loop; they may be as many as its memory holds."""
        for source in self._sources:
            self._keep(self._processor.picture_loader.load_now([source]))

    def _keep(self, loaded: LoadedPictures) -> None:
        names = [each.name for each in self._sources[len(self._loaded) :]]
        self._loaded += zip(loaded.images, loaded.uuids, names, strict=False)

    def words(self, own: str | None = None) -> str:
        """The text that stands for a picture in a prompt: `own`, or as the model's chat template writes it, or the
        model's word for it."""
        tokenizer = self._processor.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        return own or (words_of_picture(template) if isinstance(template, str) else None) or self._placeholder

    @property
    def _placeholder(self) -> str:
        return self._processor.picture_text or ""

    def prompt(
        self,
        name: str,
        text: str,
        ids: list[int] | None,
        words: str,
        params: Any = None,
        adds_special_tokens: bool = True,
    ) -> ProcessedPrompt:
        """A prompt with its pictures.

        Args:
            name: the document, in errors.
            text: with a mark for each picture, in their order.
            ids: of the text, with the ids of `words` in place of marks; None: the text is to be tokenised.
            words: what stands for a picture.
            params: of the request, for its length; None: of one that reads the end.

        Raises:
            VLLMValidationError: it is too long, the text has what stands for a picture, or a picture cannot be used.
        """
        if ids is None and self._placeholder in MARK.sub("", text):
            message = f"{name}: a text beside pictures has {self._placeholder!r}, which stands for one"
            raise VLLMValidationError(message, name)
        marks = MARK.findall(text)
        if len({*marks}) != len(marks) or any(int(mark[1:-1]) >= len(self._loaded) for mark in marks):
            raise looks_like_a_mark(name)
        own = [self._loaded[int(mark[1:-1])] for mark in marks]
        images, uuids, places = zip(*own, strict=True) if own else ((), (), ())
        loaded = LoadedPictures(images, uuids, places)
        begun: dict[str, Any] = (
            {"prompt": MARK.sub(lambda _: words, text)} if ids is None else {"prompt_token_ids": ids}
        )
        made = with_pictures({**begun, **self._salt}, loaded, self._options)
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
