"""From pictures and a prompt to what the engine takes: transformers' own processor of the model."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.images import DATA, OPTIONS, UUIDS, GivenImages, Picture, PromptImages
from vllm.inputs.picture_rows import ROWS, GivenRows
from vllm.models.vision.families import PictureFamily, picture_family
from vllm.models.vision.tower import ROW_KINDS

# Processors of retrievers put texts around pictures and questions, which the prompts here have already.
_OF_RETRIEVERS = {"ColPaliProcessor": "PaliGemmaProcessor", "ColQwen2Processor": "Qwen2VLProcessor"}
_MOST_A_ROW = 1 << 10  # pixels, or patches, of a row of a tower
_KEPT_BYTES = 256 << 20  # of processed pictures that are kept for further prompts


class Processed(NamedTuple):
    """A picture after the processor.

    Attributes:
        digest: names its content and how it was processed.
        text: what stands for it in a prompt, with a token for each row.
        ids: the tokens of `text`.
        rows: int64 [N], those of `ids` that stand for rows.
        values: the tower's arguments.
    """

    digest: str
    text: str
    ids: list[int]
    rows: np.ndarray
    values: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """The values' size in bytes."""
        return sum(value.numel() * value.element_size() for value in self.values.values())


class _KeptPictures:
    """Processes pictures, and keeps those of the latest prompts; threads may do so side by side."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._defaults = dict(model_config.mm_processor_kwargs or {})
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
        options, found = self._defaults | dict(given.options), []
        places = given.places or (None,) * len(given.items)
        for item, name, place in zip(given.items, given.names, places, strict=True):
            try:
                found.append(self._one(item, name, options, cache_salt))
            except VLLMValidationError as error:
                if place is None or (given.options and error.parameter == OPTIONS):
                    raise
                message = str(error.args[0]).partition(": ")[2] or str(error.args[0])
                raise VLLMValidationError(f"{place}: {message}", place, error.value) from error
        return found

    def _one(self, item: Any, name: str | None, options: dict[str, Any], cache_salt: str | None) -> Processed:
        image: Any = item
        if item is not None:
            image = self._given_rows(item) if isinstance(item, Mapping) else _as_image(item)
        known_as = json.dumps(options, sort_keys=True, default=str)
        content = hashlib.blake2b(known_as.encode(), digest_size=16)
        if name is not None or image is None:
            name = name or ""
            content.update(b"name" + repr(cache_salt).encode() + name.encode("utf-8", "surrogatepass"))
        elif isinstance(image, GivenRows):
            content.update(b"rows" + image.digest)
        else:
            content.update(f"{image.mode} {image.size}".encode() + image.tobytes())
        digest = content.hexdigest()
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return kept
        if image is None:
            message = f"{UUIDS}: the picture {shown(name)} is not known (any more): send it again with its name"
            raise VLLMValidationError(message, UUIDS, name)
        if isinstance(image, GivenRows):
            made = self._of_rows(image, digest)
        else:
            made = self._processed(image, digest, options, known_as)
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
        self._latest_options: tuple[str, dict[str, Any]] = ("", {})
        self._row_width = self.family.parts_of_a_row * model_config.input_embedding_size
        self._longest, self._dtype = model_config.max_model_len, model_config.dtype
        self._placeholder: str = self._processor.image_token
        (self._placeholder_id,) = hf_tokenizer.encode(self._placeholder, add_special_tokens=False)

    @property
    def placeholder(self) -> str:
        """The word that stands for a picture in a prompt's text."""
        return self._placeholder

    def _processed(self, image: Any, digest: str, options: dict[str, Any], known_as: str) -> Processed:
        try:
            data, text = self._data_of(image, options, known_as)
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
        return Processed(digest, text, ids, rows, values)

    def _data_of(self, image: Any, options: dict[str, Any], known_as: str) -> tuple[Mapping[str, Any], str]:
        """transformers' values of a picture, and what stands for it in a prompt."""
        merged = self._merged(options, known_as)
        if image.mode != "RGB" and not getattr(self._processor.image_processor, "do_convert_rgb", False):
            image = image.convert("RGB")
        images, *_ = self._processor.prepare_inputs_layout(images=[image], **options)
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
        return Processed(digest, text, ids, places, {ROWS: given.rows, **positions})

    def _text_of_rows(self, given: GivenRows) -> str:
        """What stands in a prompt for the picture that rows are of. Without a word on its size it is as any other."""
        from PIL import Image

        known_as = json.dumps(self._defaults, sort_keys=True, default=str)
        data, text = self._data_of(Image.new("RGB", (64, 64)), self._defaults, known_as)
        fields = given.fields
        lacking, unknown = self._of_positions & data.keys() - fields.keys(), fields.keys() - data.keys()
        if lacking or unknown:
            problem = f"needs {min(lacking)}" if lacking else f"has an unknown field {shown(min(unknown))}"
            names = ", ".join(sorted(data))
            raise VLLMValidationError(f"{ROWS} {problem}: the model's processor says {names} of a picture", ROWS)
        if not fields:
            return text
        if max(math.prod(value.flatten().tolist()) for value in fields.values()) > _MOST_A_ROW * len(given.rows):
            raise VLLMValidationError(f"{ROWS} has {len(given.rows)} rows, too few for a picture of its size", ROWS)
        options = self._merged(self._defaults, known_as)["images_kwargs"]
        try:
            return str(self._processor.replace_image_token(fields, image_idx=0, **options))
        except Exception as error:  # the processor's code may need anything of a picture
            message = f"{ROWS}: {', '.join(fields)} is not enough for the model's processor, which says: {error!r}"
            raise VLLMValidationError(message, ROWS) from error

    def _rows_of(self, ids: Sequence[int]) -> np.ndarray:
        return np.flatnonzero(np.isin(np.asarray(ids), self.family.row_ids))

    def _merged(self, options: Mapping[str, Any], known_as: str) -> dict[str, Any]:
        """transformers' options by the part that they are for; those of the latest prompt are kept, as it checks each
        of them for milliseconds."""
        latest, merged = self._latest_options
        if latest != known_as:
            merged = self._processor._merge_kwargs(
                tokenizer_init_kwargs=self._tokenizer.init_kwargs, return_tensors="pt", **options
            )
            self._latest_options = known_as, merged
        return merged

    # -- prompts -------------------------------------------------------------------------------------------------

    def expand_text(self, text: str, pictures: Sequence[Processed]) -> str:
        """The prompt with all that stands for its pictures.

        Raises:
            VLLMValidationError: it has another number of placeholders than pictures.
        """
        (text,) = self._laid_out(text, len(pictures))
        self._check_count(text.count(self._placeholder), len(pictures))
        parts = text.split(self._placeholder)
        return parts[0] + "".join(each.text + part for each, part in zip(pictures, parts[1:], strict=True))

    def _laid_out(self, text: str, count: int) -> list[str]:
        """As some processors put it around pictures."""
        from PIL import Image

        blank = Image.new("RGB", (8, 8))
        found: list[str] = self._processor.prepare_inputs_layout(images=[blank] * count, text=[text])[1]
        return found

    def expand_ids(self, ids: Sequence[int], pictures: Sequence[Processed]) -> list[int]:
        """As `expand_text`. A prompt that is expanded already is left alone."""
        num_rows = sum(len(each.rows) for each in pictures)
        if len(self._rows_of(ids)) == num_rows and ids.count(self._placeholder_id) != len(pictures):
            return list(ids)
        self._check_count(ids.count(self._placeholder_id), len(pictures))
        after_last, at_end = self._ids_of_layout(len(pictures))
        result: list[int] = []
        left = list(reversed(pictures))
        for token in ids:
            if token == self._placeholder_id:
                result += left.pop().ids
                result += [] if left else after_last
            else:
                result.append(token)
        return result + at_end

    def _ids_of_layout(self, count: int) -> tuple[list[int], list[int]]:
        """The ids that the processor puts behind a prompt's last picture, and at the prompt's end."""
        text, mark = self._placeholder * count, "zq"
        (laid_out,) = self._laid_out(text + mark, count)
        before, _, at_end = laid_out.partition(mark)
        if laid_out == text + mark or not before.startswith(text):
            return [], []
        encode = self._tokenizer.encode
        with self._lock:
            first, last = (encode(each, add_special_tokens=False) for each in (before.removeprefix(text), at_end))
        return first, last

    def _check_count(self, count: int, wanted: int) -> None:
        if count != wanted:
            message = (
                f"{DATA} has {wanted} pictures, and the prompt says where to put {count}: it must have "
                f"{self._placeholder} for each"
            )
            raise VLLMValidationError(message, DATA, wanted)

    def locate(self, ids: Sequence[int], pictures: Sequence[Processed]) -> PromptImages:
        """The pictures of an expanded prompt.

        Raises:
            VLLMValidationError: its tokens for rows are not as many as the pictures have.
        """
        places = self._rows_of(ids)
        counts = [len(each.rows) for each in pictures]
        if len(places) != sum(counts):
            message = f"{DATA}: the pictures have {sum(counts)} rows, and the prompt has tokens for {len(places)}"
            raise VLLMValidationError(message, DATA, len(places))
        found, begin = [], 0
        for each, count in zip(pictures, counts, strict=True):
            own = places[begin : begin + count]
            begin += count
            start = int(own[0])
            found.append(Picture(each.digest, start, own - start, int(own[-1]) + 1 - start, each.values))
        positions = self._positions(ids, pictures) if self.family.has_axes else None
        return PromptImages(tuple(found), len(ids), positions)

    def _positions(self, ids: Sequence[int], pictures: Sequence[Processed]) -> np.ndarray:
        """int64 [3, T]"""
        together: dict[str, Tensor] = {}
        for name in pictures[0].values.keys() & self._of_positions:
            together[name] = torch.cat([each.values[name] for each in pictures])
        tokens = torch.tensor([list(ids)])
        kinds = (tokens == self.family.row_id).int()
        holder = SimpleNamespace(config=self.family.config)
        if hasattr(self.family.base, "get_vision_position_ids"):
            holder.get_vision_position_ids = self.family.base.get_vision_position_ids.__get__(holder)
        positions, _ = self.family.base.get_rope_index(holder, tokens, mm_token_type_ids=kinds, **together)
        found: np.ndarray = positions[:, 0].long().numpy()
        return found


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
        self.placeholder: str = hf_tokenizer.all_special_tokens[-1]
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
        return Processed(digest, self.placeholder, self._special_ids[-1:], np.zeros(1, np.int64), values)

    def expand_text(self, text: str, pictures: Sequence[Processed]) -> str:
        """The prompt of a picture, whose tokens nothing is made of.

        Raises:
            VLLMValidationError: there is a text beside it, or another picture.
        """
        self._check(not text.strip() or text.strip() == self.placeholder, pictures)
        return self.placeholder

    def expand_ids(self, ids: Sequence[int], pictures: Sequence[Processed]) -> list[int]:
        """As `expand_text`."""
        self._check(set(ids) <= set(self._special_ids), pictures)
        return self._special_ids[-1:]

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
    array = item.detach().cpu().numpy() if isinstance(item, Tensor) else item
    problem = f"{DATA}: image must be a PIL image, or an array or tensor [H, W, 3] or [3, H, W] of uint8 or of 0 to 1"
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


def _as_tensor(value: Any) -> Tensor:
    """The processor's value of a single picture."""
    if isinstance(value, Tensor):
        return value.contiguous()
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], Tensor):
        return value[0][None].contiguous()
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
        return Pictures(**parts, **options)
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
