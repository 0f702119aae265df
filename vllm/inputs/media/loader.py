"""Loads pictures: many at once, without blocking the event loop, within bounds of what is held."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm import envs
from vllm.exceptions import QueueOverflowError, VLLMValidationError, shown
from vllm.inputs.images import KINDS, MAX_IMAGES, PlacedImage
from vllm.inputs.media.access import MediaAccess
from vllm.inputs.media.decoding import check_size, decoded
from vllm.inputs.media.film_process import film_apart
from vllm.inputs.media.films import FilmFrames
from vllm.inputs.media.sources import PictureSource
from vllm.inputs.videos import GivenVideo, as_videos

MAX_REQUEST_PIXELS = 2**28
"""The most pixels of a request's pictures together."""
MAX_HELD_PIXELS = 2**30
"""The most pixels of pictures that a server's requests in progress hold together; a further request may try again."""
_FRAMES_A_SECOND = 2.0  # upstream's, of videos that come as frames
_MAX_FETCHES = 8  # at once, of all requests


@dataclass(frozen=True)
class LoadedPictures:
    """Pictures of a prompt, in their order: PIL images, GivenVideos or what the caller had; None: known by its uuid.
    `places`: their fields of a request; empty: there is none. `kinds`: "image" or "video" of each; empty: all are
    images."""

    images: tuple[Any, ...]
    uuids: tuple[str | None, ...]
    places: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


class PictureLoader:
    """Loads the pictures that requests describe, so many a prompt. `load` belongs to one event loop."""

    def __init__(
        self,
        access: MediaAccess,
        most: int = MAX_IMAGES,
        most_videos: int = MAX_IMAGES,
        film_frames: FilmFrames | None = None,
    ) -> None:
        self._access, self._most, self._most_videos = access, most, most_videos
        self._film_frames = film_frames or FilmFrames()
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)

    async def load(self, sources: Sequence[PictureSource], of_a_prompt: bool = True) -> LoadedPictures:
        """The pictures; all are given up when one fails.

        Args:
            of_a_prompt: they may be as many as a prompt's; else any number.

        Raises:
            VLLMValidationError: one may not or cannot be read; it names the request's field.
        """
        if of_a_prompt:
            self.check_count(sources)
        held = _Held(_IN_PROGRESS)
        tasks = [asyncio.ensure_future(self._load(each, held)) for each in sources]
        try:
            images = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        places = tuple(each.name for each in sources)
        return LoadedPictures(tuple(images), _uuids(sources), places, tuple(each.kind for each in sources))

    def load_now(self, sources: Sequence[PictureSource]) -> LoadedPictures:
        """`load` for callers without an event loop, or in one that may wait."""
        self.check_count(sources)
        if any(each.scheme in ("http", "https") for each in sources):
            # Another event loop needs another loader.
            other = PictureLoader(self._access, self._most, self._most_videos, self._film_frames)
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(lambda: asyncio.run(other.load(sources))).result()
        held = _Held()
        images = tuple(self._made(each, held) for each in sources)
        return LoadedPictures(images, _uuids(sources), kinds=tuple(each.kind for each in sources))

    def check_count(self, sources: Sequence[PictureSource], name: str | None = None) -> None:
        """VLLMValidationError: they are more than a prompt's; it names `name`, or else the request's field."""
        for kind, limit in (("image", self._most), ("video", self._most_videos)):
            count = sum(each.kind == kind for each in sources)
            if count > limit:
                field = name or sources[0].name.partition("[")[0]
                message = f"{field}: there are {count} {KINDS[kind]}; limit_mm_per_prompt allows {limit}"
                raise VLLMValidationError(message, field, count)

    async def _load(self, source: PictureSource, held: _Held) -> Any:
        run = asyncio.get_running_loop().run_in_executor
        if source.scheme not in ("http", "https"):
            return await run(_decoders(), self._made, source, held)
        try:
            from vllm.inputs.media.fetching import fetched
        except ImportError:
            message = f"{source.name}: fetching pictures needs httpcore (pip install 'vllm[vision]')"
            raise VLLMValidationError(message, source.name) from None
        assert source.url is not None
        async with self._fetches:
            data = await fetched(source.name, source.url, self._access, source.kind)
            return await run(_decoders(), held.made, source.name, lambda reserve: self._read(source, data, reserve))

    def _made(self, source: PictureSource, held: _Held) -> Any:
        """The picture or the video of a source that is here."""
        if source.has_frames:
            return _video_of_frames(source, held)
        if source.image is not None and source.kind == "video":
            return _given_video(source)
        if source.image is not None:
            size = getattr(source.image, "size", None)
            if isinstance(size, tuple) and len(size) == 2:
                check_size(source.name, *size)
                held.add(source.name, size[0] * size[1])
            return source.image
        if source.url is None and source.data is None:
            return None
        if source.data is not None or source.scheme == "data":
            data = source.inline_bytes()
        elif source.scheme == "file":
            data = self._access.read(source.name, source.url or "")
        else:
            message = f"{source.name} must be a data:, http:, https: or file: URL, got {shown(source.scheme)}"
            raise VLLMValidationError(message, source.name)
        return held.made(source.name, lambda reserve: self._read(source, data, reserve))

    def _read(self, source: PictureSource, data: bytes, reserve: Callable[[int], None]) -> Any:
        """The picture or the video in a file."""
        if source.kind == "video":
            return film_apart(source.name, data, reserve, self._film_frames)
        return decoded(source.name, data, reserve)


def with_pictures(
    prompt: dict[str, Any], pictures: LoadedPictures, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The prompt with its pictures, as the engine takes it. `options`: mm_processor_kwargs of the request."""
    made = dict(prompt)
    images: Sequence[Any] = pictures.images
    if pictures.places:
        images = [PlacedImage(*each) for each in zip(images, pictures.places, strict=True)]
    kinds = pictures.kinds or ("image",) * len(images)
    for kind in dict.fromkeys(kinds):
        chosen = [number for number, other in enumerate(kinds) if other == kind]
        made.setdefault("multi_modal_data", {})[kind] = [images[number] for number in chosen]
        if any(pictures.uuids[number] is not None for number in chosen):
            made.setdefault("multi_modal_uuids", {})[kind] = [pictures.uuids[number] for number in chosen]
    if options:
        made["mm_processor_kwargs"] = dict(options)
    return made


def _uuids(sources: Sequence[PictureSource]) -> tuple[str | None, ...]:
    return tuple(each.uuid for each in sources)


def _given_video(source: PictureSource) -> Any:
    given = as_videos(source.image)
    if len(given) != 1:
        message = f"{source.name} must be one video, got {len(given)}: each is its own part"
        raise VLLMValidationError(message, source.name)
    return given[0]


def _video_of_frames(source: PictureSource, held: _Held) -> GivenVideo:
    files = source.inline_frames()

    def frame(data: bytes) -> Any:
        return held.made(source.name, lambda reserve: decoded(source.name, data, reserve))

    count, rate = len(files), _FRAMES_A_SECOND
    said = {"fps": rate, "duration": count / rate, "frames_indices": list(range(count)), "video_backend": "video/jpeg"}
    return GivenVideo([frame(data) for data in files], {**said, "total_num_frames": count, "do_sample_frames": False})


class _AllPixels:
    """The decoded pixels of requests in progress."""

    def __init__(self) -> None:
        self._count, self._lock = 0, threading.Lock()

    def take(self, name: str, count: int) -> None:
        """QueueOverflowError: there is no room for them now."""
        with self._lock:
            if self._count + count > MAX_HELD_PIXELS:
                message = f"{name}: pictures of requests in progress have too many pixels to hold more: try again"
                raise QueueOverflowError(message)
            self._count += count

    def give_back(self, count: int) -> None:
        with self._lock:
            self._count -= count


_IN_PROGRESS = _AllPixels()


class _Held:
    """The pixels of a request so far. `everyones`: counts those of all requests, until nobody has the picture any more;
    None: they are their caller's business."""

    def __init__(self, everyones: _AllPixels | None = None) -> None:
        self._count, self._lock, self._everyones = 0, threading.Lock(), everyones

    def add(self, name: str, count: int) -> None:
        """VLLMValidationError: they are too many together."""
        with self._lock:
            self._count += count
            if self._count > MAX_REQUEST_PIXELS:
                message = f"{name}: the request's pictures have more than {MAX_REQUEST_PIXELS} pixels together"
                raise VLLMValidationError(message, name)

    def made(self, name: str, make: Callable[[Callable[[int], None]], Any]) -> Any:
        """The picture that `make` decodes, which tells a function how many pixels there will be. That may raise as
        `add`, or QueueOverflowError."""
        taken = 0

        def reserve(count: int) -> None:
            nonlocal taken
            self.add(name, count)
            if self._everyones is not None:
                self._everyones.take(name, count)
                taken = count

        try:
            image = make(reserve)
        except BaseException:
            if taken and self._everyones is not None:
                self._everyones.give_back(taken)
            raise
        if taken and self._everyones is not None:
            weakref.finalize(image, self._everyones.give_back, taken)
        return image


@lru_cache(maxsize=1)
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(envs.media_loading_threads(), "media-decoder")
