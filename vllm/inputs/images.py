"""A prompt's pictures, as the engine takes them: values for the tower, and the prompt's tokens that they cover."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.picture_rows import ROWS, are_rows, rows_of_pictures
from vllm.inputs.videos import as_videos

if TYPE_CHECKING:
    import torch

MAX_IMAGES = 999
"""The most pictures of a prompt, or videos, where nothing else is said."""
KINDS = {"image": "pictures", "video": "videos"}
"""The kinds of media that are read, and what several of a kind are called."""
DATA, UUIDS, OPTIONS = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"


@dataclass(frozen=True)
class ReadMedia:
    """The media that a model reads beside texts.

    Attributes:
        words: by kind, what stands for one in a prompt's text; empty: it reads texts alone.
        why_not: why it reads none; "": nobody asked.
        interleaved: they stand where a message has them also in templates that read texts, and not before its text.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    interleaved: bool = False


@dataclass(frozen=True, eq=False)
class GivenImages:
    """The pictures that a prompt came with.

    Attributes:
        items: PIL images, uint8 arrays or tensors [H, W, C] or [C, H, W], dicts of rows in a picture's place,
            and GivenVideos behind these; None: known by its name from before.
        names: the caller's names for them, None where one has none.
        options: of the processor, for this prompt.
        places: their fields of a request, in errors; None or none: they are the prompt's.
        num_videos: how many of them, the last, are videos.
    """

    items: tuple[Any, ...]
    names: tuple[str | None, ...]
    options: Mapping[str, Any]
    places: tuple[str | None, ...] = ()
    num_videos: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """One of KINDS for each item."""
        return ("image",) * (len(self.items) - self.num_videos) + ("video",) * self.num_videos


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """A picture of a prompt in place of the bare one, with its place in a request, for errors."""

    image: Any
    place: str


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a prompt.

    Attributes:
        digest: names its content and how it was processed.
        start: the first token of the prompt that it covers.
        rows: int64 [N], increasing, tokens from `start` on whose embeddings are the tower's rows.
        length: tokens that it covers.
        values: the tower's arguments, by their names.
    """

    digest: str
    start: int
    rows: np.ndarray
    length: int
    values: dict[str, torch.Tensor]

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.start + self.length

    @cached_property
    def row_names(self) -> np.ndarray:
        """int64 [N], below -1: stand for the ids of its rows where tokens of several processes are compared. They
        follow from `values`, as a name that a caller gave a picture says nothing elsewhere; all of them together are
        against constructed collisions."""
        content = hashlib.blake2b(digest_size=32)
        for name, value in sorted(self.values.items()):
            dtype, shape, data = _packed(value)
            content.update(repr((name, dtype, shape)).encode())
            content.update(data)
        drawn = np.frombuffer(hashlib.shake_256(content.digest()).digest(8 * len(self.rows)), np.uint64)
        names: np.ndarray = -2 - (drawn >> np.uint64(2)).astype(np.int64)
        return names


@dataclass(frozen=True, eq=False)
class PromptImages:
    """All pictures of a prompt, in their order.

    Attributes:
        pictures: those.
        num_tokens: T of the prompt; what continues it comes after these.
        positions: int64 [3, T], the rotary positions of the prompt's tokens in time, height and width; None: they are
            the tokens' numbers.
    """

    pictures: tuple[Picture, ...]
    num_tokens: int
    positions: np.ndarray | None = None

    def runs(self) -> list[tuple[int, int]]:
        """The prompt's tokens [begin, end) of each run of rows."""
        found: list[tuple[int, int]] = []
        for picture in self.pictures:
            places = picture.start + picture.rows
            breaks = np.flatnonzero(np.diff(places) > 1) + 1
            found += [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks)]
        return found

    @property
    def shift(self) -> int:
        """Added to the number of a token after the prompt, its rotary position."""
        if self.positions is None:
            return 0
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    def pack(self) -> list[Any]:
        """The parts that `unpack` makes it of, for another process."""
        pictures = [
            (
                *(each.digest, each.start, each.rows.tobytes(), each.length),
                {name: _packed(value) for name, value in each.values.items()},
            )
            for each in self.pictures
        ]
        return [pictures, self.num_tokens, None if self.positions is None else self.positions.tobytes()]

    @classmethod
    def unpack(cls, parts: Sequence[Any]) -> PromptImages:
        """The inverse of `pack`."""
        pictures, num_tokens, positions = parts
        made = [
            Picture(
                *(digest, start, np.frombuffer(rows, np.int64), length),
                {name: _unpacked(*value) for name, value in values.items()},
            )
            for digest, start, rows, length, values in pictures
        ]
        axes = None if positions is None else np.frombuffer(positions, np.int64).reshape(3, -1)
        return cls(tuple(made), num_tokens, axes)


def _packed(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    import torch

    return str(tensor.dtype), list(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _unpacked(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    import torch

    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return torch.frombuffer(bytearray(data), dtype=kind).view(*shape) if data else torch.empty(*shape, dtype=kind)


def given_images(
    prompt: Mapping[str, Any], most: Mapping[str, int], why_not: str, takes_rows: bool = False
) -> GivenImages | None:
    """The pictures and videos of a prompt; None: it has none.

    Args:
        prompt: with the keys of upstream's prompts.
        most: how many of a kind a prompt may have.
        why_not: why the model reads none; empty: it does.
        takes_rows: whether rows may come in a picture's place; tensors of floats are rows then, as upstream has it.

    Raises:
        VLLMValidationError: other media, more than `most`, or names or options that do not fit them.
    """
    data = prompt.get(DATA)
    if data is not None and not isinstance(data, Mapping):
        raise VLLMValidationError(f'{DATA} must be a dict such as {{"image": picture}}, got {shown(data)}', DATA)
    for kind, value in (data or {}).items():
        if kind not in KINDS and not _is_nothing(value):
            known = "pictures under 'image' and videos under 'video'"
            raise VLLMValidationError(f"{DATA} may hold {known}; {shown(kind)} is not read", DATA, kind)
    options = prompt.get(OPTIONS)
    if options is not None and not isinstance(options, Mapping):
        raise VLLMValidationError(f"{OPTIONS} must be a dict, got {shown(options)}", OPTIONS)
    items: list[Any] = []
    names: list[str | None] = []
    counts = []
    for kind in KINDS:
        own = _as_items(kind, (data or {}).get(kind), takes_rows)
        called = _names(prompt.get(UUIDS), kind, own)
        counts.append(len(called))
        items += own or (None,) * len(called)
        names += called
    if not names:
        if options:
            message = f"{OPTIONS} is not supported for a prompt without pictures: leave it out"
            raise VLLMValidationError(message, OPTIONS)
        return None
    if why_not:
        raise VLLMValidationError(f"{DATA}: this engine reads no pictures: {why_not}", DATA)
    for kind, count in zip(KINDS, counts, strict=True):
        if count > most[kind]:
            message = f"{DATA} has {count} {KINDS[kind]}; limit_mm_per_prompt allows {most[kind]}"
            raise VLLMValidationError(message, DATA, count)
    places = tuple(each.place if isinstance(each, PlacedImage) else None for each in items)
    bare = tuple(each.image if isinstance(each, PlacedImage) else each for each in items)
    for item, place in zip(bare, places, strict=True):
        if isinstance(item, Mapping):
            _check_rows(place or DATA, takes_rows, options)
    return GivenImages(bare, tuple(names), dict(options or {}), places, counts[-1])


def _check_rows(place: str, takes_rows: bool, options: Any) -> None:
    if not takes_rows:
        message = f"{place}: {ROWS} are not taken: start the engine with enable_mm_embeds=True, or pass the picture"
        raise VLLMValidationError(message, place)
    if options:
        raise VLLMValidationError(f"{OPTIONS} are for pictures, and change no {ROWS}: leave them out", OPTIONS)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and not value)


def _as_items(kind: str, value: Any, takes_rows: bool) -> tuple[Any, ...]:
    if _is_nothing(value):
        return ()
    if kind == "video":
        return as_videos(value)
    if isinstance(value, (list, tuple)):
        return tuple({ROWS: each} if takes_rows and are_rows(each, 2) else each for each in value)
    if takes_rows and are_rows(value, 2, 3):
        value = {ROWS: value}
    if isinstance(value, Mapping):
        return rows_of_pictures(value)
    # An array of four dimensions is several pictures.
    return tuple(value) if getattr(value, "ndim", 0) == 4 else (value,)


def _names(given: Any, kind: str, items: Sequence[Any]) -> tuple[str | None, ...]:
    if given is None:
        return (None,) * len(items)
    if not isinstance(given, Mapping):
        raise VLLMValidationError(f'{UUIDS} must be a dict such as {{"image": ["a"]}}, got {shown(given)}', UUIDS)
    for other, value in given.items():
        if other not in KINDS and not _is_nothing(value):
            known = "pictures under 'image' and videos under 'video'"
            raise VLLMValidationError(f"{UUIDS} may name {known}; {shown(other)} is not read", UUIDS)
    names = given.get(kind)
    if names is None:
        return (None,) * len(items)
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, (list, tuple)) or not all(name is None or isinstance(name, str) for name in names):
        raise VLLMValidationError(f"{UUIDS}: {kind} must be a list of strings, got {shown(names)}", UUIDS)
    if items and len(names) != len(items):
        message = f"{UUIDS} must have a name for each of the {len(items)} {KINDS[kind]}, got {len(names)}"
        raise VLLMValidationError(message, UUIDS, len(names))
    return tuple(names)
