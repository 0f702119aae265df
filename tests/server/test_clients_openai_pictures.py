"""The openai SDK sends pictures to a live server: chat, responses, decisions. Values are those of the model offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer
from pictures import data_url, drawn
from PIL import Image
from tiny_vision import ASSISTANT, make_chat_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = drawn(40, 30, 1), drawn(24, 50, 2)
QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "red", "instructions": "Is it red?"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    make_chat_model("llava", path, ASSISTANT)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=400)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with (
        LiveServer(folder, "--max-model-len", "400") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def expected(llm: LLM, image: Image.Image) -> str:
    prompt: Any = {"prompt": "user:what<image>assistant:", "multi_modal_data": {"image": image}}
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return output.outputs[0].text


def item(image: Image.Image) -> dict[str, Any]:
    content = [{"type": "input_text", "text": "what"}, {"type": "input_image", "image_url": data_url(image)}]
    return {"role": "user", "content": content}


@pytest.mark.parametrize("image", [FIRST, SECOND])
def test_chat_and_responses(client: openai.OpenAI, llm: LLM, image: Image.Image) -> None:
    url = {"url": data_url(image), "detail": "auto"}
    parts: list[Any] = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": url}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == expected(llm, image)
    own: list[Any] = [item(image)]
    response = client.responses.create(model="tiny", input=own, temperature=0, max_output_tokens=8)
    assert response.output_text == expected(llm, image)


def test_decisions(client: openai.OpenAI, llm: LLM) -> None:
    found = []
    for image in (FIRST, SECOND):
        decision = client.decisions.create(model="tiny", input=[item(image)], questions=QUESTIONS)  # type: ignore[list-item]
        (want,) = llm.decide([item(image)], QUESTIONS, use_tqdm=False)
        predicate, choice = decision.answers
        assert predicate.probability == pytest.approx(want.answers[0].probability, abs=1e-4)
        shares = [each.probability for each in choice.probabilities]
        assert shares == pytest.approx([each.probability for each in want.answers[1].probabilities], abs=1e-4)
        found.append(shares)
    assert found[0] != pytest.approx(found[1], abs=1e-4)


def test_what_is_no_picture_is_an_error_with_its_place(client: openai.OpenAI) -> None:
    bad = item(FIRST)
    bad["content"][1]["image_url"] = data_url(b"words")
    calls: list[Any] = [
        lambda: client.responses.create(model="tiny", input=[bad]),
        lambda: client.decisions.create(model="tiny", input=[bad], questions=QUESTIONS),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError) as error:
            call()
        assert error.value.param == "input[0].content[1].image_url"
