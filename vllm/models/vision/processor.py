"""From pictures, videos and a prompt to what the engine takes: transformers' own processor of the model."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import math
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.images import DATA, KINDS, OPTIONS, UUIDS, GivenImages, Picture, PromptImages
from vllm.inputs.picture_rows import ROWS, GivenRows
from vllm.inputs.videos import GivenVideo, Video
from vllm.models.vision.families import PictureFamily, picture_family
from vllm.models.vision.tower import ROW_KINDS
from vllm.utils.checks import asks_for_nothing

# Processors of retrievers put texts around pictures and questions, which the prompts here have already.
_OF_RETRIEVERS = {"ColPaliProcessor": "PaliGemmaProcessor", "ColQwen2Processor": "Qwen2VLProcessor"}
_KIND_NUMBERS = {"image": 1, "video": 2}  # transformers' mm_token_type_ids
_PIXELS_A_ROW, _PATCHES_A_ROW = 1 << 10, 1 << 4  # at most, of a row of a tower
_KEPT_BYTES = 256 << 20  # of processed pictures that are kept for further prompts


class Processed(NamedTuple):
    """A picture or a video after the processor.

    Attributes:
        digest: names its content and how it was processed.
        text: what stands for it in a prompt, with a token for each row.
        ids: the tokens of `text`.
        rows: int64 [N], those of `ids` that stand for rows.
        values: the tower's arguments.
        kind: "image" or "video".
        is_numbered: whether its number in the prompt is written before it.
    """

    digest: str
    text: str
    ids: list[int]
    rows: np.ndarray
    values: dict[str, Tensor]
    kind: str = "image"
    is_numbered: bool = False

    @property
    def num_bytes(self) -> int:
        """The values' size in bytes."""
        return sum(value.numel() * value.element_size() for value in self.values.values())


class _KeptPictures:
    """Processes pictures, and keeps those of the latest prompts; threads may do so side by side."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._defaults = dict(model_config.mm_processor_kwargs or {})
        self._longest = model_config.max_model_len
        self._kept: OrderedDict[str, Processed] = OrderedDict()
        self._num_kept_bytes = 0
        self._lock = threading.Lock()

    def process(self, given: GivenImages, cache_salt: str | None = None) -> list[Processed]:
        """
        Args:
            cache_salt: prompts share the names of pictures with those of the same salt alone.

        Raises:
            VLLMValidationError: a picture or an option cannot be used; it has the picture's place, where that is known.
        """
        options = self._defaults | dict(given.options)
        found: list[Processed] = []
        places = given.places or (None,) * len(given.items)
        num_rows = 0
        for item, kind, name, place in zip(given.items, given.kinds, given.names, places, strict=True):
            if num_rows > self._longest:  # the rest would take memory, however small the files are
                message = (
                    f"{DATA}: {len(found)} of {len(given.items)} have {num_rows} tokens: "
                    f"the model's maximum context length is {self._longest} tokens"
                )
                raise VLLMValidationError(message, DATA, num_rows)
            try:
                found.append(self._one(item, kind, name, options, cache_salt))
            except VLLMValidationError as error:
                if place is None or (given.options and error.parameter == OPTIONS):
                    raise
                field, _, message = str(error.args[0]).partition(": ")
                message = message if message and " " not in field else str(error.args[0])
                raise VLLMValidationError(f"{place}: {message}", place, error.value) from error
            num_rows += len(found[-1].rows)
        return found

    def _one(
        self, item: Any, kind: str, name: str | None, options: dict[str, Any], cache_salt: str | None
    ) -> Processed:
        medium: Any = None
        if kind == "video":
            self._add_video_part()
        if isinstance(item, Mapping):
            medium = self._given_rows(item)
        elif item is not None or name is None:
            medium = _as_video(item) if kind == "video" else _as_image(item)
        known_as = json.dumps(options, sort_keys=True, default=str)
        content = hashlib.blake2b(known_as.encode(), digest_size=16)
        if name is not None or medium is None:
            name = name or ""
            content.update(f"name of {kind} {cache_salt!r}".encode() + name.encode("utf-8", "surrogatepass"))
        elif isinstance(medium, Video):
            content.update(f"{medium.frames.shape} {medium.metadata} {medium.options}".encode())
            content.update(medium.frames.tobytes())
        elif isinstance(medium, GivenRows):
            content.update(b"rows" + medium.digest)
        else:
            try:
                pixels = medium.tobytes()  # loads the picture; those of a palette are numbers of its colours
            except (OSError, ValueError) as error:
                raise VLLMValidationError(f"{DATA}: the picture cannot be read: {error}", DATA) from error
            colours = medium.getpalette("RGBA"), medium.info.get("transparency")
            content.update(f"{medium.mode} {medium.size} {colours}".encode() + pixels)
        digest = content.hexdigest()
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return kept
        if medium is None:
            what = "video" if kind == "video" else "picture"
            message = f"{UUIDS}: the {what} {shown(name)} is not known (any more): send it again with its name"
            raise VLLMValidationError(message, UUIDS, name)
        if isinstance(medium, Video):
            made = self._processed_video(medium, digest, options)
        elif isinstance(medium, GivenRows):
            made = self._of_rows(medium, digest)
        else:
            made = self._processed(medium, digest, options, known_as)
        with self._lock:
            self._keep(made)
        return made

    def _processed(self, image: Any, digest: str, options: dict[str, Any], known_as: str) -> Processed:
        raise NotImplementedError

    def _given_rows(self, given: Mapping[str, Any]) -> GivenRows:
        """Errors as of `process`."""
        raise NotImplementedError

    def _of_rows(self, given: GivenRows, digest: str) -> Processed:
        """Errors as of `process`."""
        raise NotImplementedError

    def _add_video_part(self) -> None:
        """VLLMValidationError: videos are not read."""
        raise VLLMValidationError(f"{DATA}: 'video' is not read by this model: it takes pictures alone", DATA)

    def _processed_video(self, video: Video, digest: str, options: dict[str, Any]) -> Processed:
        raise NotImplementedError

    def _keep(self, made: Processed) -> None:
        if (other := self._kept.pop(made.digest, None)) is not None:
            self._num_kept_bytes -= other.num_bytes
        self._kept[made.digest] = made
        self._num_kept_bytes += made.num_bytes
        while self._num_kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._num_kept_bytes -= self._kept.popitem(last=False)[1].num_bytes


class PictureProcessor(_KeptPictures):
    """Processes the pictures of prompts that have places for them."""

    def __init__(self, model_config: ModelConfig, hf_tokenizer: Any) -> None:
        """ValueError: the model's processor cannot be built."""
        super().__init__(model_config)
        folder = Path(model_config.path)
        self.family = picture_family(model_config.hf_config, folder)
        self._processor = _make_processor(self.family, folder, hf_tokenizer)
        self._tokenizer = hf_tokenizer
        self._arguments = set(inspect.signature(self.family.base.get_image_features).parameters)
        self._of_positions: set[str] = set()
        if self.family.has_axes:
            self._of_positions = set(inspect.signature(self.family.base.get_rope_index).parameters)
            self._arguments |= self._of_positions
        self._further_options = set(inspect.signature(self._processor._process_images).parameters)
        self._folder = folder
        self._latest_options: tuple[str, dict[str, Any]] = ("", {})
        self._row_width = self.family.parts_of_a_row * model_config.input_embedding_size
        self._dtype = model_config.dtype
        # Some have a word of their own for a picture, beside the one for a row.
        self._placeholder: str = getattr(self._processor, "image_placeholder_token", self._processor.image_token)
        self.words: dict[str, str] = {"image": self._placeholder}
        """The words that stand for a picture in a prompt and, where videos are read, for one of these, by kind."""
        if self.family.reads_videos:
            self.words["video"] = self._processor.video_token
        self._word_ids: dict[int, str] = {}
        for kind, word in self.words.items():
            word_ids = hf_tokenizer.encode(word, add_special_tokens=False)
            if len(word_ids) == 1:  # a video's may be a text like any other, which ids cannot tell
                self._word_ids[word_ids[0]] = kind
        self._shapes, self._text = self._tried(folder)

    def _tried(self, folder: Path) -> tuple[dict[str, tuple[int, ...]], str | None]:
        """The names of all that the processor says of a picture, with the shapes of that by which tokens have
        positions, and what it puts in the place of each; None: it depends on the picture's size. ValueError: it makes
        nothing of one."""
        from PIL import Image

        known_as = json.dumps(self._defaults, sort_keys=True, default=str)
        try:
            data, text = self._data_of(Image.new("RGB", (64, 64)), self._defaults, known_as)
            _, of_other = self._data_of(Image.new("RGB", (128, 32)), self._defaults, known_as)
        except VLLMValidationError:
            raise
        except Exception as error:  # the processor's code may do otherwise than most
            name = type(self._processor).__mro__[1].__name__
            raise ValueError(
                f"{folder.name}: transformers' {name} makes nothing of a picture alone: {error!r}; "
                "pass language_model_only=True"
            ) from error
        shapes = {name: tuple(_as_tensor(data[name]).shape) for name in self._of_positions & data.keys()}
        return dict.fromkeys(data, ()) | shapes, text if text == of_other else None

    def _processed(self, image: Any, digest: str, options: dict[str, Any], known_as: str) -> Processed:
        try:
            data, text = self._data_of(image, options, known_as)
        except VLLMValidationError:
            raise
        except Exception as error:  # the processor's code may refuse a picture or an option in any way
            field = OPTIONS if options else DATA
            raise VLLMValidationError(f"{field}: the picture cannot be processed: {error}", field) from error
        values = {name: _as_tensor(value) for name, value in data.items() if name in self._arguments}
        with self._lock:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        rows = self._rows_of(ids)
        if self.family.marker_ids:
            order = {token: index for index, token in enumerate(self.family.row_ids)}
            values[ROW_KINDS] = torch.tensor([order[ids[row]] for row in rows.tolist()])
        return Processed(digest, text, ids, rows, values, is_numbered=self._numbers(self._merged(options, known_as)))

    def _numbers(self, merged: Mapping[str, Any]) -> bool:
        """Whether the processor writes their numbers before a prompt's pictures."""
        asked = merged["images_kwargs"].get("use_image_id", merged.get("use_image_id"))
        usual = getattr(self._processor, "default_use_image_id", False)
        return hasattr(self._processor, "_prepend_local_ids") and bool(usual if asked is None else asked)

    def _number_before(self, picture: Processed, number: int) -> str:
        """The text before a picture or a video of a prompt, the one with this number of its kind."""
        if not picture.is_numbered:
            return ""
        word = self.words[picture.kind]
        texts: list[str] = self._processor._prepend_local_ids([word * (number + 1)], [""] * (number + 1), word)
        return texts[number]

    def _data_of(self, image: Any, options: dict[str, Any], known_as: str) -> tuple[Mapping[str, Any], str]:
        """transformers' values of a picture, and what stands for it in a prompt."""
        merged = self._merged(options, known_as)
        if image.mode != "RGB" and not getattr(self._processor.image_processor, "do_convert_rgb", False):
            image = image.convert("RGB")
        images, *_ = self._processor.prepare_inputs_layout(images=[image], **merged)
        # Some options of a whole processor are about pictures, too.
        own = {name: merged[name] for name in self._further_options if name in merged}
        data, (text,) = self._processor._process_images(images, **own, **merged["images_kwargs"])
        return data, text

    def _given_rows(self, given: Mapping[str, Any]) -> GivenRows:
        return GivenRows.of(given, self._row_width, self._longest, self._dtype)

    def _of_rows(self, given: GivenRows, digest: str) -> Processed:
        text, count = self._text_of_rows(given), len(given.rows)
        found, ids, places = text.count(self._tokenizer.convert_ids_to_tokens(self.family.row_id)), [], np.empty(0)
        if found <= count:  # others may be long
            with self._lock:
                ids = self._tokenizer.encode(text, add_special_tokens=False)
            places = self._rows_of(ids)
            found = len(places)
        if found != count:
            message = (
                f"{ROWS} has {count} rows, and the model's processor puts {found} tokens in the place of a picture of "
                "which this is said: pass what it says of the picture's size, such as image_grid_thw, beside the rows"
            )
            raise VLLMValidationError(message, ROWS, count)
        positions = {name: value for name, value in given.fields.items() if name in self._of_positions}
        made = Processed(digest, text, ids, places, {ROWS: given.rows, **positions})
        try:
            self.locate(ids, [made])
        except Exception as error:  # transformers' code takes sizes as they are
            message = f"{ROWS}: {', '.join(positions)} is no size of a picture with {count} rows: {error!r}"
            raise VLLMValidationError(message, ROWS) from error
        return made

    def _text_of_rows(self, given: GivenRows) -> str:
        """The text that stands in a prompt for the picture of these rows."""
        fields = given.fields
        lacking, unknown = self._of_positions & self._shapes.keys() - fields.keys(), fields.keys() - self._shapes.keys()
        names = ", ".join(sorted(self._shapes))
        if lacking or unknown:
            problem = f"needs {min(lacking)}" if lacking else f"has an unknown field {shown(min(unknown))}"
            raise VLLMValidationError(f"{ROWS} {problem}: the model's processor says {names} of a picture", ROWS)
        if not fields:
            if self._text is None:
                message = f"{ROWS} needs what the model's processor says of the picture's size, one of {names}"
                raise VLLMValidationError(message, ROWS)
            return self._text
        for name, value in fields.items():
            if name in self._of_positions and value.shape != self._shapes[name]:
                message = f"{ROWS}: {name} must have the shape {list(self._shapes[name])}, got {list(value.shape)}"
                raise VLLMValidationError(message, ROWS)
            most = _PIXELS_A_ROW if name == "image_sizes" else _PATCHES_A_ROW
            if math.prod(value.flatten().tolist()) > most * len(given.rows):
                raise VLLMValidationError(f"{ROWS} has {len(given.rows)} rows, too few for a picture of its size", ROWS)
        known_as = json.dumps(self._defaults, sort_keys=True, default=str)
        options = self._merged(self._defaults, known_as)["images_kwargs"]
        try:
            return str(self._processor.replace_image_token(fields, image_idx=0, **options))
        except Exception as error:  # the processor's code may need anything of a picture
            message = f"{ROWS}: {', '.join(fields)} is not enough for the model's processor, which says: {error!r}"
            raise VLLMValidationError(message, ROWS) from error

    def _processed_video(self, video: Video, digest: str, options: dict[str, Any]) -> Processed:
        try:
            own = options | video.options
            known_as = f"video {json.dumps(own, sort_keys=True, default=str)}"
            merged = self._merged(own, known_as)["videos_kwargs"]
            data, (text,) = self._processor._process_videos(
                [video.frames], **merged, video_metadata=[dict(video.metadata)]
            )
        except VLLMValidationError:
            raise
        except Exception as error:  # as of pictures
            field = OPTIONS if options else DATA
            raise VLLMValidationError(f"{field}: the video cannot be processed: {error}", field) from error
        if (pixels := data.get("pixel_values_videos")) is not None and not self.family.has_video_tower:
            data = {"pixel_values": pixels.flatten(0, 1)}
        known = self._arguments | set(self.family.video_arguments)
        values = {name: _as_tensor(value) for name, value in data.items() if name in known}
        with self._lock:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Processed(digest, text, ids, self._rows_of(ids), values, "video")

    def _add_video_part(self) -> None:
        """Let the processor have its part for videos, which asks for libraries of its own.

        Raises:
            VLLMValidationError: there is none, or a library is missing.
        """
        if not self.family.reads_videos:
            raise VLLMValidationError(
                f"{DATA}: 'video' is not read: {self.family.name} takes pictures alone here", DATA
            )
        if self._processor.video_processor is not None:
            return
        if importlib.util.find_spec("torchvision") is None:
            raise VLLMValidationError(f"{DATA}: reading videos needs torchvision: pip install torchvision", DATA)
        module: Any = sys.modules[type(self._processor).__mro__[1].__module__]
        if getattr(module, "num2words", None) is str and importlib.util.find_spec("num2words") is None:
            raise VLLMValidationError(f"{DATA}: videos of this model need num2words: pip install num2words", DATA)
        from transformers import AutoVideoProcessor

        try:
            self._processor.video_processor = AutoVideoProcessor.from_pretrained(self._folder)
        except Exception as error:
            problem = str(error).replace(str(self._folder), self._folder.name)
            raise VLLMValidationError(f"{DATA}: the video processor cannot be built: {problem}", DATA) from error

    def _rows_of(self, ids: Sequence[int]) -> np.ndarray:
        return np.flatnonzero(np.isin(np.asarray(ids), self.family.all_row_ids))

    def _merged(self, options: Mapping[str, Any], known_as: str) -> dict[str, Any]:
        """transformers' options by the part that they are for; those of the latest prompt are kept, as it checks each
        of them for milliseconds. VLLMValidationError: it would leave one out."""
        latest, merged = self._latest_options
        if latest != known_as:
            merged = self._processor._merge_kwargs(
                tokenizer_init_kwargs=self._tokenizer.init_kwargs, return_tensors="pt", **options
            )
            known = merged.keys() | {name for part in merged.values() if isinstance(part, dict) for name in part}
            if unknown := sorted(name for name in options.keys() - known if not asks_for_nothing(options[name])):
                message = f"{OPTIONS}: {shown(unknown[0])} is no option of the model's processor"
                raise VLLMValidationError(message, OPTIONS, unknown[0])
            for name in sorted(options.keys() & self._arguments):
                if options[name] != (own := getattr(self.family.config, name, None)):
                    message = (
                        f"{OPTIONS}: {name} is the tower's, too, and {own!r} there: set it by hf_overrides as well"
                    )
                    raise VLLMValidationError(message, OPTIONS, options[name])
            self._latest_options = known_as, merged
        return merged

    # -- prompts -------------------------------------------------------------------------------------------------

    def expand_text(self, text: str, pictures: Sequence[Processed]) -> tuple[str, list[Processed]]:
        """The prompt with all that stands for its pictures and videos, and these in its order.

        Raises:
            VLLMValidationError: it has another number of placeholders than pictures, or videos.
        """
        text = self._laid_out(text, _count(pictures, "image"))
        self._check_counts({kind: text.count(word) for kind, word in self.words.items()}, pictures)
        kinds = {word: kind for kind, word in self.words.items()}
        left, order = _queues(pictures), list[Processed]()

        def put(found: re.Match[str]) -> str:
            picture = next(left[kinds[found.group()]])
            before = self._number_before(picture, _count(order, picture.kind))
            order.append(picture)
            return before + picture.text

        return re.sub("|".join(map(re.escape, kinds)), put, text), order

    def _laid_out(self, text: str, count: int) -> str:
        """As some processors put it around pictures."""
        from PIL import Image

        if not count:
            return text
        blank = Image.new("RGB", (8, 8))
        merged = self._merged(self._defaults, json.dumps(self._defaults, sort_keys=True, default=str))
        (found,) = self._processor.prepare_inputs_layout(images=[blank] * count, text=[text], **merged)[1]
        return str(found)

    def expand_ids(self, ids: Sequence[int], pictures: Sequence[Processed]) -> tuple[list[int], list[Processed]]:
        """As `expand_text`. A prompt that is expanded already is left alone."""
        counts = dict.fromkeys(self.words, 0) | {kind: ids.count(token) for token, kind in self._word_ids.items()}
        is_short = all(count == _count(pictures, kind) for kind, count in counts.items())
        # The text that stands for a picture may have the word for one in it.
        is_short = is_short and not self._word_ids.keys().isdisjoint(self.family.all_row_ids)
        if not is_short and len(self._rows_of(ids)) == sum(len(each.rows) for each in pictures):
            return list(ids), self._in_order(ids, pictures)
        self._check_counts(counts, pictures)
        num_images = counts["image"]
        after_last, at_end = self._ids_of_layout(num_images)
        result: list[int] = []
        left, order = _queues(pictures), list[Processed]()
        for token in ids:
            kind = self._word_ids.get(token)
            if kind is None:
                result.append(token)
                continue
            picture = next(left[kind])
            if before := self._number_before(picture, _count(order, kind)):
                with self._lock:
                    result += self._tokenizer.encode(before, add_special_tokens=False)
            order.append(picture)
            result += picture.ids
            if kind == "image":
                num_images -= 1
                result += [] if num_images else after_last
        return result + at_end, order

    def _in_order(self, ids: Sequence[int], pictures: Sequence[Processed]) -> list[Processed]:
        """The pictures and videos of an expanded prompt in its order: of two that may be next, the one whose tokens
        are there."""
        left = {kind: [each for each in pictures if each.kind == kind] for kind in ("video", "image")}
        places, order, begin = self._rows_of(ids).tolist(), list[Processed](), 0
        while begin < len(places):
            heads = [queue[0] for queue in left.values() if queue]
            starts = [places[begin] - int(head.rows[0]) for head in heads]
            found = next(
                (
                    head
                    for head, start in zip(heads, starts, strict=True)
                    if list(ids[max(start, 0) : start + len(head.ids)]) == head.ids
                ),
                heads[-1],
            )
            order.append(left[found.kind].pop(0))
            begin += len(found.rows)
        return order

    def _ids_of_layout(self, count: int) -> tuple[list[int], list[int]]:
        """The ids that the processor puts behind a prompt's last picture, and at the prompt's end."""
        text, mark = self._placeholder * count, "zq"
        laid_out = self._laid_out(text + mark, count)
        before, _, at_end = laid_out.partition(mark)
        if laid_out == text + mark or not before.startswith(text):
            return [], []
        encode = self._tokenizer.encode
        with self._lock:
            first, last = (encode(each, add_special_tokens=False) for each in (before.removeprefix(text), at_end))
        return first, last

    def _check_counts(self, counts: Mapping[str, int], pictures: Sequence[Processed]) -> None:
        for kind, count in counts.items():
            wanted = _count(pictures, kind)
            if count != wanted:
                message = (
                    f"{DATA} has {wanted} {KINDS[kind]}, and the prompt says where to put {count}: it must have "
                    f"{self.words[kind]} for each"
                )
                raise VLLMValidationError(message, DATA, wanted)

    def locate(self, ids: Sequence[int], pictures: Sequence[Processed]) -> PromptImages:
        """The pictures and videos of an expanded prompt, which are in its order.

        Raises:
            VLLMValidationError: its tokens for rows are not as many as these have.
        """
        places = self._rows_of(ids)
        counts = [len(each.rows) for each in pictures]
        if len(places) != sum(counts):
            message = f"{DATA}: the pictures have {sum(counts)} rows, and the prompt has tokens for {len(places)}"
            raise VLLMValidationError(message, DATA, len(places))
        kinds = torch.zeros(1, len(ids), dtype=torch.int)
        found, begin = [], 0
        for each, count in zip(pictures, counts, strict=True):
            own = places[begin : begin + count]
            begin += count
            start = int(own[0])
            found.append(Picture(each.digest, start, own - start, int(own[-1]) + 1 - start, each.values))
            kinds[0, own] = _KIND_NUMBERS[each.kind]
        positions = self._positions(ids, kinds, pictures) if self.family.has_axes else None
        if positions is not None and (last := int(positions.max())) >= self._longest:
            message = (
                f"{DATA}: a video's time takes the prompt to position {last}, and the model's maximum context length "
                f"is {self._longest} tokens: say more frames a second, or send fewer frames"
            )
            raise VLLMValidationError(message, DATA, last)
        return PromptImages(tuple(found), len(ids), positions)

    def _positions(self, ids: Sequence[int], kinds: Tensor, pictures: Sequence[Processed]) -> np.ndarray:
        """int64 [3, T]; `kinds`: int [1, T], 1 for a picture's rows, 2 for a video's."""
        together: dict[str, Tensor] = {}
        for name in self._of_positions:
            if own := [each.values[name] for each in pictures if name in each.values]:
                together[name] = torch.cat(own)
        tokens = torch.tensor([list(ids)])
        positions, _ = _WithoutWeights(self.family).get_rope_index(tokens, mm_token_type_ids=kinds, **together)
        found: np.ndarray = positions[:, 0].long().numpy()
        return found


class _WithoutWeights:
    """transformers' model with its configuration and methods alone."""

    def __init__(self, family: PictureFamily) -> None:
        self.config, self._base = family.config, family.base

    def __getattr__(self, name: str) -> Any:
        return inspect.getattr_static(self._base, name).__get__(self, type(self))


def _count(pictures: Sequence[Processed], kind: str) -> int:
    return sum(each.kind == kind for each in pictures)


def _queues(pictures: Sequence[Processed]) -> dict[str, Iterator[Processed]]:
    return {kind: iter([each for each in pictures if each.kind == kind]) for kind in KINDS}


class LonePictureProcessor(_KeptPictures):
    """Processes pictures that are whole prompts, for models that make one vector of a text or a picture."""

    chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    """A conversation's texts, for models whose tokenizers have no template, as these haven't."""

    def __init__(self, model_config: ModelConfig, hf_tokenizer: Any) -> None:
        """ValueError: the model's picture processor cannot be built."""
        super().__init__(model_config)
        self._name = model_config.architecture
        self._images = _image_processor(Path(model_config.path))
        self._special_ids = list(hf_tokenizer.all_special_ids)
        self._placeholder: str = hf_tokenizer.all_special_tokens[-1]
        self.words = {"image": self._placeholder}
        """The word that stands for a picture in a conversation's text."""

    def _given_rows(self, given: Mapping[str, Any]) -> GivenRows:
        raise VLLMValidationError(f"{ROWS}: {self._name} has no rows of pictures: pass the picture", ROWS)

    def _processed(self, image: Any, digest: str, options: dict[str, Any], known_as: str) -> Processed:
        try:
            data = self._images(images=[image.convert("RGB")], return_tensors="pt", **options)
        except Exception as error:  # the processor's code may refuse a picture or an option in any way
            field = OPTIONS if options else DATA
            raise VLLMValidationError(f"{field}: the picture cannot be processed: {error}", field) from error
        values = {name: _as_tensor(value) for name, value in data.items()}
        return Processed(digest, self._placeholder, self._special_ids[-1:], np.zeros(1, np.int64), values)

    def expand_text(self, text: str, pictures: list[Processed]) -> tuple[str, list[Processed]]:
        """The prompt of a picture, whose tokens nothing is made of.

        Raises:
            VLLMValidationError: there is a text beside it, or another picture.
        """
        self._check(not text.strip() or text.strip() == self._placeholder, pictures)
        return self._placeholder, pictures

    def expand_ids(self, ids: Sequence[int], pictures: list[Processed]) -> tuple[list[int], list[Processed]]:
        """As `expand_text`."""
        self._check(set(ids) <= set(self._special_ids), pictures)
        return self._special_ids[-1:], pictures

    def _check(self, has_no_text: bool, pictures: Sequence[Processed]) -> None:
        if not has_no_text or len(pictures) != 1:
            message = (
                f"{DATA}: {self._name} makes a vector of a text or of one picture, not of both or of several: pass a "
                "picture with an empty prompt, and what else there is in prompts of its own"
            )
            raise VLLMValidationError(message, DATA)

    def locate(self, ids: Sequence[int], pictures: Sequence[Processed]) -> PromptImages:
        """The picture of a prompt that `expand_text` or `expand_ids` made."""
        (made,) = pictures
        return PromptImages((Picture(made.digest, 0, made.rows, 1, made.values),), len(ids))


def _as_image(item: Any) -> Any:
    """The picture as Pillow has it. VLLMValidationError: it is none."""
    from PIL import Image

    if isinstance(item, Image.Image):
        return item
    problem = f"{DATA}: image must be a PIL image, or an array or tensor [H, W, 3] or [3, H, W] of uint8 or of 0 to 1"
    array = item
    if isinstance(item, Tensor):
        try:
            array = (item.float() if item.is_floating_point() else item).detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # a sparse tensor, or one without values
            raise VLLMValidationError(f"{problem}: {error}", DATA) from error
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3):
        raise VLLMValidationError(f"{problem}, got {shown(item)}", DATA)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        raise VLLMValidationError(f"{problem}, got one of shape {list(item.shape)}", DATA)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min(initial=0) < 0 or array.max(initial=0) > 1:
            raise VLLMValidationError(f"{problem}, got floats beyond these", DATA)
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8 or not array.size:
        raise VLLMValidationError(f"{problem}, got {array.dtype} {list(array.shape)}", DATA)
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)


def _as_video(item: Any) -> Video:
    """The video as the processor takes it. VLLMValidationError: it is none."""
    given = item if isinstance(item, GivenVideo) else GivenVideo(item)
    frames = given.frames
    problem = f"{DATA}: video must be frames: PIL images, or an array or tensor [T, H, W, 3] or [T, 3, H, W]"
    if isinstance(frames, str) or not hasattr(frames, "__len__"):
        raise VLLMValidationError(f"{problem}, got {shown(frames)}", DATA)
    if not len(frames):
        raise VLLMValidationError(f"{problem}, got none", DATA)
    arrays = [np.asarray(_as_image(frame).convert("RGB")) for frame in frames]
    sizes = {each.shape for each in arrays}
    if len(sizes) > 1:
        raise VLLMValidationError(f"{problem} of one size, got {sorted(each[:2] for each in sizes)}", DATA)
    return Video.of(DATA, np.stack(arrays), given.metadata)


def _as_tensor(value: Any) -> Tensor:
    """The processor's value of a single picture."""
    if isinstance(value, Tensor):
        return value.contiguous()
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], Tensor):
        return value[0][None].contiguous()
    if isinstance(value, list) and value and isinstance(value[0], float):
        return torch.tensor(value)
    return torch.as_tensor(np.asarray(value))


def _make_processor(family: PictureFamily, folder: Path, tokenizer: Any) -> Any:
    """transformers' processor of the model, with its picture processor alone: those of sound and video stay out."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    own = _read(folder / "processor_config.json")
    name = own.get("processor_class") or _read(folder / "preprocessor_config.json").get("processor_class")
    name = name or _read(folder / "tokenizer_config.json").get("processor_class") or _usual_name(family)
    name = _OF_RETRIEVERS.get(str(name), name)
    found = processor_class_from_name(name) if name else None
    if name == "PixtralProcessor":
        # transformers' does not load without torchvision.
        from vllm.models.vision.pixtral import PixtralProcessor as found
    if found is None:
        raise ValueError(f"{folder.name}: transformers has no processor {name!r}: pass language_model_only=True")

    class Pictures(found):  # type: ignore[misc,valid-type]
        """With nothing in the places of other media."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            return None

    module: Any = sys.modules[found.__module__]
    if getattr(module, "num2words", "") is None:
        module.num2words = str  # needed for videos alone
    images = _image_processor(folder)
    parts = {part: None for part in found.get_attributes()} | {"image_processor": images, "tokenizer": tokenizer}
    known = inspect.signature(found.__init__).parameters
    options = {key: value for key, value in own.items() if key in known and key not in parts}
    try:
        try:
            return Pictures(**parts, **options)
        except AttributeError:  # some ask the video's part what the picture's says, too
            return Pictures(**parts | {"video_processor": images}, **options)
    except Exception as error:
        raise ValueError(
            f"{folder.name}: transformers' {name} cannot be built: {error}; pass language_model_only=True"
        ) from error


def _image_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil")
    except Exception as error:
        problem = f"the picture processor cannot be built: {error}; pass language_model_only=True"
        raise ValueError(f"{folder.name}: {problem}") from error


def _usual_name(family: PictureFamily) -> str | None:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return PROCESSOR_MAPPING_NAMES.get(family.config.model_type)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}
