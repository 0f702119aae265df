"""Programs of others send pictures to a tiny model: their answers are those of the same model offline."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from pictures import data_url, drawn, file_of
from PIL import Image
from tiny_vision import ASSISTANT, make_chat_model

from vllm import LLM, SamplingParams

IMAGE, OTHER = drawn(40, 30, 1), drawn(24, 50, 2)
WORDS = "what is it"
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    make_chat_model("llava", path, ASSISTANT)
    return path


@pytest.fixture(scope="module")
def pictured(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=400)


@pytest.fixture(scope="module")
def served(folder: Path, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    with LiveServer(folder, "--max-model-len", "400", env=server_environment) as server:
        yield server


def expected(llm: LLM, image: Image.Image = IMAGE, is_first: bool = False) -> str:
    text = f"<image>{WORDS}" if is_first else f"{WORDS}<image>"
    prompt: Any = {"prompt": f"user:{text}assistant:", "multi_modal_data": {"image": image}}
    (output,) = llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)
    return output.outputs[0].text


def parts(image: Image.Image = IMAGE) -> list[dict[str, Any]]:
    return [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": data_url(image)}}]


def test_pictures_make_a_difference(pictured: LLM) -> None:
    assert expected(pictured) != expected(pictured, OTHER)


def test_openai(served: LiveServer, pictured: LLM) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
        for image in (IMAGE, OTHER):
            messages = [{"role": "user", "content": parts(image)}]
            answer = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
            assert answer.choices[0].message.content == expected(pictured, image)
            content = [{"type": "input_text", "text": WORDS}, {"type": "input_image", "image_url": data_url(image)}]
            item = {"role": "user", "content": content}
            response = client.responses.create(model="tiny", input=[item], temperature=0, max_output_tokens=8)
            assert response.output_text == expected(pictured, image)


def test_anthropic(served: LiveServer, pictured: LLM) -> None:
    anthropic = pytest.importorskip("anthropic")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(IMAGE)).decode()}
    content = [{"type": "text", "text": WORDS}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=served.url, api_key="unused") as client:
        messages = [{"role": "user", "content": content}]
        message = client.messages.create(model="tiny", messages=messages, max_tokens=8, extra_body={"temperature": 0})
        assert message.content[0].text == expected(pictured)
        counted = client.messages.count_tokens(model="tiny", messages=messages)
        assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        url = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
        with pytest.raises(anthropic.BadRequestError, match="--allowed-media-domains"):
            client.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": [url]}])


def test_langchain(served: LiveServer, pictured: LLM) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage

    own = {"model": "tiny", "base_url": f"{served.url}/v1", "api_key": "unused", "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(**own, **GREEDY)
    assert chat.invoke([HumanMessage(parts())]).content == expected(pictured)
    # Its own form of a picture, which it turns into OpenAI's.
    data = base64.b64encode(file_of(IMAGE)).decode()
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    assert chat.invoke([HumanMessage([{"type": "text", "text": WORDS}, block])]).content == expected(pictured)


def test_litellm(served: LiveServer, pictured: LLM) -> None:
    litellm = pytest.importorskip("litellm")
    own = {"api_base": f"{served.url}/v1", "api_key": "unused", **GREEDY}
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(f"{provider}/tiny", [{"role": "user", "content": parts()}], **own)
        assert answer.choices[0].message.content == expected(pictured)


def test_llama_index(served: LiveServer, pictured: LLM) -> None:
    wrappers = pytest.importorskip("llama_index.llms.openai")
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

    class Served(wrappers.OpenAI):
        """A model whose name it does not know."""

        @property
        def metadata(self) -> Any:
            from llama_index.core.llms import LLMMetadata

            return LLMMetadata(context_window=400, num_output=8, is_chat_model=True, model_name="tiny")

    llm = Served(model="tiny", api_base=f"{served.url}/v1", api_key="unused", temperature=0, max_tokens=8)
    blocks = [TextBlock(text=WORDS), ImageBlock(image=file_of(IMAGE), image_mimetype="image/png")]
    answer = llm.chat([ChatMessage(role="user", blocks=blocks)])
    assert answer.message.content == expected(pictured)


def test_lm_eval(folder: Path, pictured: LLM, tmp_path: Path) -> None:
    """Its model "vllm-vlm", over a task of two pictures."""
    pytest.importorskip("lm_eval.models.vllm_vlms")
    import lm_eval
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature
    from lm_eval.api.task import ConfigurableTask

    rows = []
    for image in (IMAGE, OTHER):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "answer": "x"})
    features = Features({"image": ImageFeature(), "answer": Value("string")})
    data = Dataset.from_list(rows, features=features)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    task = ConfigurableTask(
        config={
            "task": "tiny",
            "dataset_path": "parquet",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.parquet")}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": f"{WORDS}<image>",
            "doc_to_target": "{{answer}}",
            "doc_to_image": ["image"],
            "generation_kwargs": {"max_gen_toks": 8, "do_sample": False, "temperature": 0.0, "until": ["never said"]},
            "metric_list": [{"metric": "exact_match"}],
        }
    )
    found = lm_eval.simple_evaluate(
        "vllm-vlm",
        model_args={"pretrained": str(folder), "dtype": "float32", "max_model_len": 400},
        tasks=[task],
        apply_chat_template=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    answers = [sample["resps"][0][0] for sample in found["samples"]["tiny"]]
    assert answers == [expected(pictured, image) for image in (IMAGE, OTHER)]
