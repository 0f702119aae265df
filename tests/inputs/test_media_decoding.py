"""Files of pictures are decoded as transformers does, or refused by the field's name."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import threading

import numpy as np
import pytest
from pictures import data_url, drawn, file_of, png_of_size
from PIL import Image
from transformers.image_utils import load_image

from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.inputs.media import MediaAccess, PictureLoader, PictureSource, with_pictures
from vllm.inputs.media.decoding import decoded

_LOADER = PictureLoader(MediaAccess())


def _sixteen_bit() -> Image.Image:
    return Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)


def _transparent() -> Image.Image:
    image = drawn().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def _turned(orientation: int) -> dict[str, Image.Exif]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


FILES = {
    "png": file_of(drawn()),
    "jpeg": file_of(drawn(), "JPEG"),
    "webp": file_of(drawn(), "WEBP"),
    "bmp": file_of(drawn(), "BMP"),
    "cmyk": file_of(drawn().convert("CMYK"), "JPEG"),
    "grey": file_of(drawn().convert("L")),
    "grey-alpha": file_of(drawn().convert("LA")),
    "bits": file_of(drawn().convert("1")),
    "16-bit": file_of(_sixteen_bit()),
    "palette": file_of(drawn().convert("P")),
    "palette-transparent": file_of(drawn().convert("P"), transparency=3),
    "rgba": file_of(_transparent()),
    "gif-animated": file_of(drawn().convert("P"), "GIF", save_all=True, append_images=[drawn(seed=1).convert("P")]),
    "webp-animated": file_of(drawn(), "WEBP", save_all=True, append_images=[drawn(seed=1)]),
    "png-animated": file_of(drawn(), "PNG", save_all=True, append_images=[drawn(seed=1)]),
    "one-pixel": file_of(drawn(1, 1)),
    "thin": file_of(drawn(1, 10_000)),
    **{f"exif-{turn}": file_of(drawn(), "JPEG", **_turned(turn)) for turn in range(1, 9)},
    "exif-png": file_of(drawn(), "PNG", **_turned(6)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_picture_is_what_transformers_makes_of_it(name):
    expected = load_image(Image.open(io.BytesIO(FILES[name])))
    made = decoded("picture", FILES[name])
    assert made.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(made), np.asarray(expected))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (FILES["thin"][:99], "truncated PNG"),
        (file_of(drawn(300, 200), "JPEG")[:-300], "truncated JPEG"),
        (FILES["png"][:20], "no picture in PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "no picture in PNG"),
        (file_of(drawn(), "TIFF"), "no picture in PNG"),
        (file_of(drawn(), "EPS"), "no picture in PNG"),
        (file_of(drawn(), "PDF"), "no picture in PNG"),
        (b"words", "no picture in PNG"),
        (png_of_size(0, 9), "no picture in PNG"),
        (png_of_size(9000, 9000), "9000 x 9000 pixels"),
        (png_of_size(50_000, 50_000), "more than the limit"),
    ],
)
def test_what_is_no_picture_is_refused_by_the_field(data, words):
    with pytest.raises(VLLMValidationError, match=words) as found:
        decoded("messages[0].content[1].image_url", data)
    assert found.value.parameter == "messages[0].content[1].image_url"


def test_pixels_are_counted_before_they_are_made(monkeypatch):
    data = png_of_size(50_000, 50_000)
    assert 100_000 < len(data) < 400_000
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("pixels were made"))
    for bomb in (data, png_of_size(9000, 9000)):
        with pytest.raises(VLLMValidationError, match="pixels"):
            decoded("picture", bomb)


def test_pictures_of_a_request_have_a_bound_together(monkeypatch):
    monkeypatch.setattr("vllm.inputs.media.loader.MAX_REQUEST_PIXELS", 1300)
    sources = [PictureSource(f"part[{index}]", url=data_url(drawn())) for index in range(3)]
    assert len(_LOADER.load_now(sources[:2]).images) == 2
    with pytest.raises(VLLMValidationError, match="1300 pixels together") as found:
        _LOADER.load_now(sources)
    assert found.value.parameter == "part[2]"
    whole = [PictureSource("part", image=drawn()) for _ in range(3)]
    with pytest.raises(VLLMValidationError, match="1300 pixels together"):
        _LOADER.load_now(whole)


def test_pictures_of_requests_in_progress_have_a_bound_together(monkeypatch):
    monkeypatch.setattr("vllm.inputs.media.loader.MAX_HELD_PIXELS", 1300)

    def load(*urls):
        sources = [PictureSource(f"part[{index}]", url=url) for index, url in enumerate(urls)]
        return asyncio.run(PictureLoader(MediaAccess()).load(sources)).images

    held = load(data_url(drawn()), data_url(drawn(seed=1)))
    for _ in range(2):
        with pytest.raises(QueueOverflowError, match="part\\[0\\]: pictures of requests in progress"):
            load(data_url(drawn(seed=2)))
    # A damaged picture's pixels are given back, and so are those that nobody has.
    del held
    gc.collect()
    for _ in range(3):
        with pytest.raises(VLLMValidationError, match="truncated"):
            load(data_url(file_of(drawn(30, 20))[:-100]))
    assert len(load(data_url(drawn()), data_url(drawn(seed=1)))) == 2
    # A caller's own pictures are bounded by its memory.
    own = [_LOADER.load_now([PictureSource("part", url=data_url(drawn()))]) for _ in range(4)]
    assert len(own) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda url: url,
        lambda url: url.replace("image/png", ""),
        lambda url: url.replace("image/png", "image/jpeg"),  # the bytes say what it is
        lambda url: url.replace("image/png", "application/octet-stream"),
        lambda url: url.replace("image/png", "image/png;name=a.png"),
        lambda url: url.replace("data:", "DATA:"),
        lambda url: url.rstrip("="),
        lambda url: "\n".join(url[at : at + 76] for at in range(0, len(url), 76)).replace(",\n", ","),
        lambda url: url.replace(",", ",\r\n \t") + "\n",
        lambda url: url.replace("+", "%2B").replace("=", "%3D"),
        lambda url: url[:22] + url[22:].replace("+", "-").replace("/", "_"),
    ],
)
def test_data_urls_as_clients_write_them(change):
    url = change(data_url(drawn()))
    (made,) = _LOADER.load_now([PictureSource("picture", url=url)]).images
    np.testing.assert_array_equal(np.asarray(made), np.asarray(drawn()))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,", "empty picture"),
        ("data:image/png;base64", "data URL in base64"),
        ("data:image/svg+xml,<svg/>", "data URL in base64"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64,AAAAA", "not base64"),
        (data_url(FILES["png"], "text/html"), "must be a picture"),
        (data_url(FILES["png"], "application/pdf"), "must be a picture"),
        ("iVBORw0KGgo", "data:, http:, https: or file:"),
        ("ftp://example.com/a.png", "data:, http:, https: or file:"),
        ("/etc/passwd", "data:, http:, https: or file:"),
        ("", "data:, http:, https: or file:"),
    ],
)
def test_other_urls_are_refused_by_the_field(url, words):
    with pytest.raises(VLLMValidationError, match=words) as found:
        _LOADER.load_now([PictureSource("input[0].image_url", url=url)])
    assert found.value.parameter == "input[0].image_url"
    assert "PIL" not in str(found.value)


def test_a_prompt_gets_its_pictures_and_their_names():
    data = base64.b64encode(FILES["png"]).decode()
    sources = [PictureSource("a", data=data, uuid="first"), PictureSource("b", uuid="second")]
    prompt = with_pictures({"prompt": "x"}, _LOADER.load_now(sources), {"size": 3})
    image, none = prompt["multi_modal_data"]["image"]
    assert image.size == (30, 20) and none is None
    assert prompt["multi_modal_uuids"] == {"image": ["first", "second"]}
    assert prompt["mm_processor_kwargs"] == {"size": 3}
    assert with_pictures({"prompt": "x"}, _LOADER.load_now([])) == {"prompt": "x"}


def test_the_event_loop_goes_on_while_pictures_are_decoded(monkeypatch):
    go_on = threading.Event()

    def slow(*args):
        assert go_on.wait(20)
        return decoded(*args)

    monkeypatch.setattr("vllm.inputs.media.loader.decoded", slow)

    async def main():
        loader = PictureLoader(MediaAccess())
        loads = [loader.load([PictureSource("a", url=data_url(drawn()))]) for _ in range(4)]
        waiting = asyncio.gather(*loads)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        go_on.set()
        return await waiting

    assert [len(each.images) for each in asyncio.run(main())] == [1] * 4
