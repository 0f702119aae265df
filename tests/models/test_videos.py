"""Videos in prompts: readings equal transformers', by its own video processors, and what cannot be is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import data_url, file_of
from tiny_vision import draw, make_vision_model
from video_readings import PROCESSORS

from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.inputs.images import given_images
from vllm.inputs.media import MediaAccess, PictureLoader, PictureSource, with_pictures
from vllm.inputs.media import loader as module
from vllm.inputs.media.decoding import decoded
from vllm.inputs.videos import Video, as_videos

SUPPORT = Path(__file__).parents[1] / "support"
DOCUMENT = Path(__file__).parents[2] / "docs/images.md"
MOST = {"image": 9, "video": 2}
CLIP = [draw(16, 12, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See video_readings.py: transformers looks for torchvision once a process."""
    command = [sys.executable, str(SUPPORT / "video_readings.py"), str(tmp_path_factory.mktemp("videos")), *PROCESSORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", PROCESSORS)
def test_readings_equal_transformers(name: str, readings: dict[str, Any]) -> None:
    found = readings[name]
    assert found.get("ids") == found.get("own")
    assert found["worst"] < 1e-4
    assert found["std"] > 0.3, "logits that are all alike would prove nothing"
    assert found["chat"] == [True] * 6
    assert found["doors"] == ([True] * 5 if name == "qwen3_vl" else [])


def test_the_document_names_what_is_tried() -> None:
    (row,) = re.findall(r"^Videos are read by (.*?)\.$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(PROCESSORS)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("llava")
    make_vision_model("qwen2_vl", folder)
    return LLM(str(folder), dtype="float32", max_model_len=128, limit_mm_per_prompt={"video": 1})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"video": [CLIP, CLIP]}, "has 2 videos; limit_mm_per_prompt allows 1"),
        ({"audio": [1]}, "'audio' is not read"),
        ({"video": CLIP}, "needs torchvision: pip install torchvision"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, data: dict[str, Any], message: str) -> None:
    prompt = {"prompt": "<|vision_start|><|video_pad|><|vision_end|>", "multi_modal_data": data}
    with pytest.raises(VLLMValidationError, match=message):
        llm.generate(prompt, use_tqdm=False)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "is no film in MP4 or WebM"),
        ({"type": "video_url", "video_url": "https://example.com/a.mp4"}, "fetches nothing from 'example.com'"),
        ({"type": "video_url", "video_url": "data:video/jpeg;base64,AAAA,BBBB"}, "is no picture in PNG, JPEG"),
        ({"type": "video_url", "video_url": "data:video/jpeg;base64,"}, "is an empty picture"),
        ({"type": "video_url", "video_url": "data:video/jpeg;base64," + "," * 768}, "769 frames; .* at most 768"),
        ({"type": "video", "video": [1, 2]}, "video must be a video's URL"),
        ({"type": "video", "video": np.zeros((2, 4, 12, 16, 3), np.uint8)}, "must be one video, got 2"),
        ({"type": "video_url"}, "video_url is required"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "only 'text' and pictures and videos can be read"),
    ],
)
def test_parts_that_are_no_videos_are_refused(llm: LLM, part: dict[str, Any], message: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(VLLMValidationError, match=message):
        llm.chat([{"role": "user", "content": [part]}], chat_template=template, use_tqdm=False)


def test_a_loader_reads_frames_beside_pictures() -> None:
    files = [file_of(frame, "JPEG") for frame in CLIP]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(file).decode() for file in files)
    video = PictureSource("place", url=url, kind="video", uuid="mine")
    picture = PictureSource("other", url=data_url(CLIP[0]))
    loader = PictureLoader(MediaAccess.of(None, ""), most=1, most_videos=1)
    prompt = with_pictures({"prompt": ""}, asyncio.run(loader.load([video, picture])))
    (given,), (image,) = prompt["multi_modal_data"]["video"], prompt["multi_modal_data"]["image"]
    assert prompt["multi_modal_uuids"] == {"video": ["mine"]}
    assert (given.place, image.place) == ("place", "other")
    assert [frame.tobytes() for frame in given.image.frames] == [decoded("", file).tobytes() for file in files]
    assert given.image.metadata["fps"] == 2 and given.image.metadata["do_sample_frames"] is False
    with pytest.raises(VLLMValidationError, match="there are 2 videos; limit_mm_per_prompt allows 1"):
        asyncio.run(loader.load([video, video]))


def test_the_pixels_of_all_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUEST_PIXELS", 2 * 16 * 12)
    made: list[Any] = []
    whole = module.decoded
    monkeypatch.setattr(module, "decoded", lambda *given: made.append(whole(*given)) or made[-1])
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(file_of(frame, "JPEG")).decode() for frame in CLIP)
    with pytest.raises(VLLMValidationError, match="have more than 384 pixels together"):
        asyncio.run(PictureLoader(MediaAccess()).load([PictureSource("place", url=url, kind="video")]))
    assert len(made) == 2, "a frame was decoded beyond the bound"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rate": 2}, "no 'rate'; known: total_num_frames"),
        ({"fps": 0}, "fps must be a number above 0, got 0"),
        ({"fps": "2"}, "fps must be a number above 0"),
        ({"frames_indices": ["first"] * 4}, "frames_indices must be the numbers of the frames"),
        ({"frames_indices": [0, 1]}, "frames_indices has 2 numbers for 4 frames"),
        ({"total_num_frames": 9}, "4 of the video's 9 frames"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        Video.of("field", np.zeros((4, 12, 16, 3), np.uint8), metadata)


def test_metadata_say_which_frames_there_are() -> None:
    frames = np.zeros((4, 12, 16, 3), np.uint8)
    plain = Video.of("field", frames, {})
    assert plain.metadata == {"frames_indices": [0, 1, 2, 3], "total_num_frames": 4, "height": 12, "width": 16}
    assert plain.options == {}
    chosen = Video.of("field", frames, {"frames_indices": [0, 3, 6, 9], "total_num_frames": 12, "fps": 6.0})
    assert chosen.options == {"do_sample_frames": False}, "frames that were chosen would be chosen from again"


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (CLIP, 1),
        ([CLIP, CLIP], 2),
        ((CLIP, {"fps": 2}), 1),
        ([(CLIP, {"fps": 2}), CLIP], 2),
        (np.zeros((4, 12, 16, 3), np.uint8), 1),
        (np.zeros((2, 4, 12, 16, 3), np.uint8), 2),
        ([np.zeros((12, 16, 3), np.uint8)] * 4, 1),
        ([None], 1),
    ],
)
def test_forms_of_videos(value: Any, count: int) -> None:
    assert len(as_videos(value)) == count
    given = given_images({"multi_modal_data": {"image": [CLIP[0]], "video": value}}, MOST, "")
    assert given is not None and given.kinds == ("image", *["video"] * count)
