"""Files of videos: the frames are transformers' own, and what is damaged, large or something else is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.video_utils import read_video_pyav

from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.inputs.media import MediaAccess, PictureLoader, PictureSource, film_process, films
from vllm.inputs.media.film_process import film_apart
from vllm.inputs.media.films import FilmFrames, film
from vllm.inputs.videos import Video

av = pytest.importorskip("av")


def make_film(count: int, form: str = "mp4", codec: str = "libx264", size: tuple[int, int] = (48, 32)) -> bytes:
    """A film of `count` frames that differ, 8 a second."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.thread_count = 1
        for number in range(count):
            array = np.full((size[1], size[0], 3), 255 * number // count, np.uint8)
            array[:, : size[0] // 2] = np.arange(size[1], dtype=np.uint8)[:, None, None] * 3
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def make_sound() -> bytes:
    """A file without a film."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


FILM = make_film(40)


@pytest.mark.parametrize(
    ("count", "form", "codec"),
    [(40, "mp4", "libx264"), (3, "mp4", "libx264"), (40, "webm", "libvpx-vp9"), (40, "mp4", "mpeg4")],
)
def test_frames_are_those_of_transformers(count: int, form: str, codec: str, tmp_path: Path) -> None:
    data = make_film(count, form, codec)
    (tmp_path / "film").write_bytes(data)
    found = film("place", data)
    numbers = found.metadata["frames_indices"]
    assert len(numbers) == min(32, count) and (numbers[0], numbers[-1]) == (0, count - 1)
    assert numbers == np.linspace(0, count - 1, len(numbers), dtype=int).tolist()
    frames, metadata = read_video_pyav(str(tmp_path / "film"), lambda metadata, **_: numbers)
    assert np.array_equal(found.frames, frames)
    assert found.metadata["fps"] == metadata.fps == 8 and found.metadata["total_num_frames"] == count
    video = Video.of("field", found.frames, found.metadata)
    assert video.options == {"do_sample_frames": False} and video.metadata["duration"] == count / 8


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"num_frames": 4}, [0, 13, 26, 39]),
        ({"num_frames": -1}, list(range(40))),
        ({"fps": 0.5}, [0, 39]),
        ({"fps": 0.01, "num_frames": 8}, [0]),
        ({"fps": -1, "num_frames": 1}, [0]),
    ],
)
def test_frames_are_chosen_as_is_asked_for(fields: dict[str, Any], numbers: list[int]) -> None:
    chosen = FilmFrames.of({"image": {}, "video": fields})
    found = film("place", FILM, None, chosen)
    assert found.metadata["frames_indices"] == numbers
    assert np.array_equal(found.frames, film("place", FILM, None, FilmFrames(40)).frames[numbers])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be a dict"),
        ({"image": {"mode": "L"}}, "not 'image'"),
        ({"video": {"backend": "opencv"}}, "not 'backend'"),
        ({"video": {"num_frames": 0}}, "num_frames must be a number from 1 to 768"),
        ({"video": {"num_frames": 2.5}}, "num_frames must be a number"),
        ({"video": {"fps": "2"}}, "fps must be a number above 0"),
        ({"video": {"fps": float("inf")}}, "fps must be a number above 0"),
    ],
)
def test_options_that_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"media_io_kwargs.*{message}"):
        FilmFrames.of(given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FILM[: len(FILM) // 2], "damaged or truncated film|no film"),
        (lambda: FILM[:64] + b"\0" * 400, "damaged or truncated film|without a film"),
        (lambda: b"", "no film in MP4 or WebM"),
        (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no film in MP4 or WebM"),
        (lambda: b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "no film in MP4 or WebM"),
        (lambda: b"\x1a\x45\xdf\xa3" + b"\xff" * 64, "damaged or truncated film|without a film"),
        (make_sound, "is a file without a film"),
        (lambda: make_film(2, "mp4", "mjpeg"), "another codec than h264"),
    ],
    ids=["half", "header", "empty", "playlist", "picture", "matroska", "sound", "codec"],
)
def test_what_is_no_film_is_refused(make: Callable[[], bytes], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"place .*({message})"):
        film("place", make())


def test_titles_may_be_in_any_encoding() -> None:
    data = FILM.replace(b"Lavf", b"L\xe9\xfff")
    assert data != FILM and np.array_equal(film("place", data).frames, film("place", FILM).frames)


def test_other_codecs_are_not_run_to_know_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    formats, stream = [], films._stream
    monkeypatch.setattr(
        films, "_stream", lambda name, file: [formats.append(file.streams.video[0].format), stream(name, file)][1]
    )
    with pytest.raises(VLLMValidationError, match="another codec than h264"):
        film("place", make_film(2, "matroska", "ffv1"))
    assert formats == [None]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_MAX_FRAMES", 39, "has more than 39 frames"),
        ("_MAX_DECODED_PIXELS", 40 * 48 * 32 - 1, "40 frames of 1536 pixels, more than 61439"),
        ("MAX_PIXELS", 48 * 32 - 1, "has frames of 48 x 32 pixels; one has 1 to 1535"),
        ("MAX_SECONDS", -1.0, "takes more than -1 s to decode"),
    ],
)
def test_bounds(name: str, value: float, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(films, name, value)
    with pytest.raises(VLLMValidationError, match=message):
        film("place", FILM)


def test_pixels_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(films, "_frames", lambda *_: pytest.fail("frames were decoded"))

    def refuse(count: int) -> None:
        assert count == 32 * 48 * 32
        raise VLLMValidationError("place has too many", "place")

    with pytest.raises(VLLMValidationError, match="too many"):
        film("place", FILM, refuse)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(VLLMValidationError, match=r"PyAV \(pip install 'vllm\[vision\]'\)"):
        film("place", FILM)


@pytest.mark.parametrize(("name", "value"), [("_READER", "vllm.no_such_module"), ("MAX_SECONDS", 0.0)])
def test_a_process_that_ends_is_an_error_of_the_film(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_process, name, value)
    with pytest.raises(VLLMValidationError, match="place is a damaged film, or takes more time or memory"):
        film_apart("place", FILM, lambda _: None, FilmFrames())


def test_a_table_that_promises_millions_of_frames() -> None:
    """FFmpeg makes room for all of them, without a byte of the file behind any; not as much as it likes."""
    sizes, chunks = FILM.index(b"stsz"), FILM.index(b"stsc")
    count = (2**26).to_bytes(4, "big")
    data = bytearray(FILM)
    data[sizes + 8 : sizes + 16] = (1).to_bytes(4, "big") + count
    data[chunks + 16 : chunks + 20] = count
    with pytest.raises(VLLMValidationError, match="place is a film without frames"):
        film_apart("place", bytes(data), lambda _: None, FilmFrames())


def test_a_request_may_have_no_room_for_a_film() -> None:
    def refuse(count: int) -> None:
        assert count == 32 * 48 * 32
        raise QueueOverflowError("try again")

    with pytest.raises(QueueOverflowError, match="try again"):
        film_apart("place", FILM, refuse, FilmFrames())


def load(url: str, access: MediaAccess | None = None) -> Any:
    source = PictureSource("place", url=url, kind="video")
    return asyncio.run(PictureLoader(access or MediaAccess()).load([source])).images[0]


def test_a_loader_reads_films_where_it_reads_pictures(tmp_path: Path) -> None:
    want = film("place", FILM).frames
    (tmp_path / "a.mp4").write_bytes(FILM)
    access = MediaAccess.of(None, str(tmp_path))
    for url in (f"data:video/mp4;base64,{base64.b64encode(FILM).decode()}", f"file://{tmp_path}/a.mp4"):
        assert np.array_equal(load(url, access).frames, want)
    for url, message in (
        (f"file://{tmp_path}/a.mp4", "reads no files"),
        ("https://example.com/a.mp4", "fetches nothing from .example.com."),
        ("data:image/png;base64,AAAA", "must be a video, got one of type 'image/png'"),
        ("data:video/mp4,AAAA", "must be a data URL in base64, such as data:video/mp4"),
        ("ftp://example.com/a.mp4", "must be a data:, http:, https: or file: URL"),
    ):
        with pytest.raises(VLLMValidationError, match=message):
            load(url)
