"""Pictures in a decision's input: marks in its texts, until a chat template has written these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.answers.prompts.content_forms import words_of_picture
from vllm.answers.prompts.picture_parts import SOURCE, picture_part
from vllm.decisions.content import is_list
from vllm.exceptions import VLLMValidationError
from vllm.inputs.media import LoadedPictures, PictureSource, with_pictures
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt


@dataclass(frozen=True, eq=False)
class DecisionPictures:
    """The pictures of one input, loaded.

    Attributes:
        marks: what stands for each in the input's texts.
    """

    processor: InputProcessor
    marks: Sequence[str]
    loaded: LoadedPictures

    def written(self, text: str, template: str | None) -> str:
        """The text with what stands for a picture in place of each mark: as the template writes it, or else the model's
        own word.

        Raises:
            VLLMValidationError: the text has the word already, or not all of the marks.
        """
        word = self.processor.picture_text or ""
        if word in text or [text.count(mark) for mark in self.marks] != [1] * len(self.marks):
            message = f"input: a text beside pictures has {word!r}, which stands for one, or a picture is not written"
            raise VLLMValidationError(message, "input")
        own = (template and words_of_picture(template)) or word
        for mark in self.marks:
            text = text.replace(mark, own)
        return text

    def prompts(self, prompts: Sequence[list[int]], cache_salt: str | None) -> list[ProcessedPrompt]:
        """Prompts of ids with all that stands for the pictures."""
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        made = [with_pictures({"prompt_token_ids": ids, **salt}, self.loaded) for ids in prompts]
        return self.processor.process_prompts(made, [SamplingParams(max_tokens=0)] * len(made))


def with_marks(value: Any, processor: InputProcessor) -> tuple[Any, list[str], list[PictureSource]]:
    """An input with a text part in place of each picture; the marks and the pictures, in their order. An input for a
    model that reads none is left alone.

    Raises:
        VLLMValidationError: a malformed picture; names its place.
    """
    if processor.model_config.why_no_images or not is_list(value):
        return value, [], []
    mark = "zqpicture"
    while mark in str(value):
        mark += "q"
    marks: list[str] = []
    sources: list[PictureSource] = []
    items = []
    for index, item in enumerate(value):
        for key in ("content", "output"):
            parts: Any = item.get(key) if isinstance(item, Mapping) else None
            if not is_list(parts):
                continue
            own = []
            for at, part in enumerate(parts):
                if not isinstance(part, Mapping) or part.get("type") != "input_image":
                    own.append(part)
                    continue
                picture = picture_part(f"input[{index}].{key}[{at}]", part)
                assert picture is not None
                marks.append(f"{mark}{len(marks)}z")
                sources.append(picture[SOURCE])
                own.append({"type": "input_text", "text": marks[-1]})
            item = {**item, key: own}
        items.append(item)
    return items, marks, sources
