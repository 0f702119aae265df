"""Pictures over HTTP: every door's are those of LLM.generate, and what is no picture is a 400 by its field."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asgi import AppThread, Serve, server_args
from pictures import data_url, drawn, file_of, png_of_size
from PIL import Image
from tiny_vision import make_vision_model
from transformers.image_utils import load_image

from vllm import LLM, SamplingParams
from vllm.decisions.params import DecisionParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.images import GivenImages
from vllm.inputs.media import loader as loader_module
from vllm.v1.features.images.runner import PictureRows

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
FIRST, SECOND = drawn(40, 30, 1), drawn(24, 50, 2)
GREEDY = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprob_token_ids": [70, 80]}
FIELDS = {"dtype": "float32", "max_model_len": 300, "max_logprobs": -1, "max_num_seqs": 8}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    make_vision_model("qwen2_vl", path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    FIRST.save(path / "first.png")
    return path


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path, files: Path) -> AppThread:
    fields = {"max_model_len": 300, "limit_mm_per_prompt": {"image": 3}, "enable_mm_embeds": True}
    fields["allowed_local_media_path"] = str(files)
    return serve(fields, folder, chat_template=TEMPLATE, trust_request_mm_kwargs=True)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), chat_template=TEMPLATE, limit_mm_per_prompt={"image": 3}, **FIELDS)


def part(image: Any = FIRST, **more: Any) -> dict[str, Any]:
    url = image if isinstance(image, str) else data_url(image)
    return {"type": "image_url", "image_url": {"url": url}, **more}


def user(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": "user", "content": parts}


def wanted(llm: LLM, text: str, *images: Any, **fields: Any) -> list[dict[int, float]]:
    """The readings of GREEDY after a text with {} where pictures go."""
    prompt = {"prompt": text.replace("{}", PLACE), "multi_modal_data": {"image": list(images)}, **fields}
    (output,) = llm.generate(prompt, SamplingParams(**GREEDY), use_tqdm=False)
    rows = output.outputs[0].logprobs
    return [{token: row[token].logprob for token in GREEDY["logprob_token_ids"]} for row in rows]


def readings(answer: dict[str, Any]) -> list[dict[int, float]]:
    return [
        {entry["token_id"]: entry["logprob"] for entry in row["top_logprobs"] if entry["token_id"] in (70, 80)}
        for row in answer["choices"][0]["logprobs"]["content"]
    ]


def check(found: list[dict[int, float]], want: list[dict[int, float]]) -> None:
    assert len(found) == len(want) == GREEDY["max_tokens"]
    for row, expected in zip(found, want, strict=True):
        assert row == pytest.approx(expected, abs=1e-4)


def chat(server: AppThread, *messages: Any, **body: Any) -> Any:
    return server.post(CHAT, messages=list(messages), **{**GREEDY, **body})


def refused(server: AppThread, url: str = CHAT, **body: Any) -> dict[str, Any]:
    response = server.request("POST", url, json={"model": "tiny", **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_chat(server, llm, files):
    want = wanted(llm, "<s>user:see{}there</s><s>assistant:", FIRST)
    for own in (
        part(),
        part(f"file://{files}/first.png"),
        part(data_url(file_of(FIRST), "image/jpeg")),
        {"type": "image_url", "image_url": data_url(FIRST)},
        {"type": "input_image", "image_url": data_url(FIRST), "detail": "high"},
        {"type": "image", "image": data_url(FIRST)},
        {"type": "image", "url": data_url(FIRST)},
        {"image_url": {"url": data_url(FIRST), "detail": "low"}},
        {"type": "image", "source": {"type": "url", "url": data_url(FIRST)}},
        {"type": "image", "base64": base64.encodebytes(file_of(FIRST)).decode()},
    ):
        check(readings(chat(server, user("see", own, "there"))), want)


def test_several_pictures_in_several_messages(server, llm):
    messages = [user(part(), "a", part(SECOND)), {"role": "assistant", "content": "b"}, user("c", part())]
    want = wanted(llm, "<s>user:{}a{}</s><s>assistant:b</s><s>user:c{}</s><s>assistant:", FIRST, SECOND, FIRST)
    check(readings(chat(server, *messages)), want)
    check(readings(chat(server, *messages, stream=False, chat_template=TEMPLATE)), want)
    (output,) = llm.chat(messages, SamplingParams(**GREEDY), use_tqdm=False)
    rows = [{token: row[token].logprob for token in (70, 80)} for row in output.outputs[0].logprobs]
    check(rows, want)


def test_a_name_stands_for_a_picture_that_was_sent(server):
    first = readings(chat(server, user("q", part(uuid="the first"))))
    again = readings(chat(server, user("q", {"type": "image_url", "image_url": None, "uuid": "the first"})))
    check(again, first)
    error = refused(server, messages=[user({"type": "image_url", "image_url": None, "uuid": "never sent"})])
    assert "never sent" in error["message"]


def test_names_are_shared_by_those_of_a_salt(server):
    nothing = {"type": "image_url", "image_url": None, "uuid": "salted"}
    for salt, image in (("a", FIRST), ("b", SECOND)):
        chat(server, user("q", part(image, uuid="salted")), cache_salt=salt)
    for salt, image in (("a", FIRST), ("b", SECOND)):
        check(
            readings(chat(server, user("q", nothing), cache_salt=salt)), readings(chat(server, user("q", part(image))))
        )
    error = refused(server, messages=[user("q", nothing)])
    assert "salted" in error["message"] and error["param"] == "messages[0].content"


def test_a_template_of_texts_gets_the_models_word(server, llm):
    texts = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    want = wanted(llm, "user:<|image_pad|>\nsee\nthere", FIRST)
    check(readings(chat(server, user("see", part(), "there"), chat_template=texts)), want)


def test_a_tools_picture_where_templates_write_none_there(server, llm):
    users_only = TEMPLATE.replace("p.type == 'image'", "p.type == 'image' and m.role == 'user'")
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        user("go"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}, part()]},
    ]
    want = wanted(llm, "<s>user:go</s><s>assistant:</s><s>tool:seen{}</s><s>assistant:", FIRST)
    check(readings(chat(server, *messages)), want)
    want = wanted(llm, "<s>user:go</s><s>assistant:</s><s>tool:seen</s><s>user:{}</s><s>assistant:", FIRST)
    check(readings(chat(server, *messages, chat_template=users_only)), want)


def test_messages(server, llm):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(FIRST)).decode()}
    image = {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}
    want = wanted(llm, "<s>system:s</s><s>user:a{}</s><s>assistant:", FIRST)
    body = {"system": "s", "messages": [user("a", image)], "logprobs": True}
    answer = server.post("/v1/messages", **body, **GREEDY)
    rows = [
        {entry["token_id"]: entry["logprob"] for entry in row["top_logprobs"] if entry["token_id"] in (70, 80)}
        for row in answer["logprobs"]["content"]
    ]
    check(rows, want)
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "seen"}, image]}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    messages = [user("go"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    count = server.post("/v1/messages/count_tokens", messages=messages)["input_tokens"]
    text = f"<s>user:go</s><s>assistant:</s><s>tool:seen{PLACE}</s><s>assistant:"
    (output,) = llm.generate(
        {"prompt": text, "multi_modal_data": {"image": FIRST}}, SamplingParams(max_tokens=1), use_tqdm=False
    )
    assert count == len(output.prompt_token_ids)
    for bad, place in (
        ({"type": "base64", "media_type": "image/png", "data": "@"}, "messages[0].content[0].source.data"),
        ({"type": "base64", "media_type": "text/plain", "data": "QQ=="}, "messages[0].content[0].source.media_type"),
        ({"type": "file", "file_id": "f"}, "messages[0].content[0].source.type"),
        ({"type": "url", "url": "http://example.com/a.png"}, "messages[0].content[0].source.url"),
    ):
        assert (
            place
            in refused(server, "/v1/messages", max_tokens=1, messages=[user({"type": "image", "source": bad})])[
                "message"
            ]
        )


def test_responses(server, llm):
    image = {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, image]}]
    want = wanted(llm, "<s>system:i</s><s>user:a{}</s><s>assistant:", FIRST)
    usual = {"temperature": 0, "max_output_tokens": 3, "ignore_eos": True, "logprob_token_ids": [70, 80]}
    more = {"include": ["message.output_text.logprobs"], "instructions": "i"}
    answer = server.post("/v1/responses", input=items, **usual, **more)
    (text,) = answer["output"][-1]["content"]
    rows = [
        {entry["token_id"]: entry["logprob"] for entry in row["top_logprobs"] if entry["token_id"] in (70, 80)}
        for row in text["logprobs"]
    ]
    check(rows, want)
    # An item that is kept has its picture.
    server.post("/v1/responses", input="and now", previous_response_id=answer["id"], **usual)
    kept = server.request("GET", f"/v1/responses/{answer['id']}/input_items").json()["data"]
    assert any(each["content"][-1].get("image_url") == image["image_url"] for each in kept)
    bad = {**image, "image_url": data_url(b"words")}
    error = refused(server, "/v1/responses", input=[items[0], {"role": "user", "content": [bad]}])
    assert "input[1].content[0].image_url" in error["message"]
    bad = {"type": "input_image", "file_id": "f"}
    assert "no" in refused(server, "/v1/responses", input=[{"role": "user", "content": [bad]}])["message"]


def test_tokenize_and_render_say_the_expanded_ids(server, llm):
    (output,) = llm.generate(
        {"prompt": f"<s>user:a{PLACE}</s><s>assistant:", "multi_modal_data": {"image": FIRST}},
        SamplingParams(max_tokens=1),
        use_tqdm=False,
    )
    ids = list(output.prompt_token_ids)
    messages = [user("a", part())]
    assert server.post("/tokenize", messages=messages)["tokens"] == ids
    rendered = server.post("/v1/chat/completions/render", messages=messages)
    assert rendered["token_ids"] == ids
    answer = chat(server, *messages, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids and answer["usage"]["prompt_tokens"] == len(ids)


def test_options_of_the_processor_need_trust(server, llm, monkeypatch):
    options = {"size": {"shortest_edge": 64, "longest_edge": 640}}
    want = wanted(llm, "<s>user:a{}</s><s>assistant:", FIRST, mm_processor_kwargs=options)
    assert want != wanted(llm, "<s>user:a{}</s><s>assistant:", FIRST)
    check(readings(chat(server, user("a", part()), mm_processor_kwargs=options)), want)
    error = refused(server, messages=[user("a")], mm_processor_kwargs=options)
    assert "without pictures" in error["message"]
    chat(server, user("a"), mm_processor_kwargs={})
    monkeypatch.setattr(server.state, "args", server_args())
    error = refused(server, messages=[user("a", part())], mm_processor_kwargs=options)
    assert error["param"] == "mm_processor_kwargs" and "--trust-request-mm-kwargs" in error["message"]


HOSTILE = {
    "truncated": data_url(file_of(drawn(1, 9000))[:90]),
    "bomb": data_url(png_of_size(50_000, 50_000)),
    "large": data_url(png_of_size(9_000, 9_000)),
    "svg": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
    "tiff": data_url(file_of(FIRST, "TIFF"), "image/tiff"),
    "text": data_url(b"words"),
    "other-type": data_url(file_of(FIRST), "video/mp4"),
    "empty": "data:image/png;base64,",
    "not-base64": "data:image/png;base64,%%%",
    "no-scheme": "picture.png",
    "ftp": "ftp://example.com/a.png",
    "http": "http://example.com/a.png",
    "metadata": "http://169.254.169.254/latest",
    "passwd": "file:///etc/passwd",
    "missing": "file:///etc/no such file",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_picture_is_a_400_by_its_field(server, folder, files, name):
    error = refused(server, messages=[user("a", part()), user("b", "c", part(HOSTILE[name]))])
    assert error["param"] == "messages[1].content[2].image_url.url"
    for secret in (str(folder), str(files), "PIL", "BytesIO"):
        assert secret not in error["message"]


ODD = {
    "one-pixel": file_of(drawn(1, 1)),
    "thin": file_of(drawn(1, 10_000)),
    "cmyk": file_of(drawn().convert("CMYK"), "JPEG"),
    "16-bit": file_of(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)),
    "animated": file_of(drawn().convert("P"), "GIF", save_all=True, append_images=[drawn(seed=1).convert("P")]),
    "wrong-type": file_of(drawn(), "BMP"),
    "white-space": file_of(drawn(seed=3)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_pictures_are_transformers_or_a_400(server, llm, name):
    """One that the model's processor refuses is a 400 by the part's field."""
    content = load_image(Image.open(io.BytesIO(ODD[name])))
    url = data_url(ODD[name])
    if name == "white-space":
        url = "\r\n ".join(url[at : at + 76] for at in range(0, len(url), 76))
    body = {"messages": [user("see", part(url))]}
    if name == "thin":
        with pytest.raises(VLLMValidationError, match="the picture cannot be processed"):
            wanted(llm, "<s>user:see{}</s><s>assistant:", content)
        error = refused(server, **body)
        assert error["param"] == "messages[0].content[1].image_url.url" and "cannot be processed" in error["message"]
    else:
        check(readings(chat(server, *body["messages"])), wanted(llm, "<s>user:see{}</s><s>assistant:", content))


def test_a_server_that_holds_too_many_pixels_asks_to_come_again(server, monkeypatch):
    monkeypatch.setattr("vllm.inputs.media.loader.MAX_HELD_PIXELS", 100)
    response = server.request("POST", CHAT, json={"model": "tiny", "messages": [user("see", part())]})
    assert response.status_code == 429 and response.headers["Retry-After"] == "1", response.text
    assert "messages[0].content[1].image_url.url" in response.json()["error"]["message"]
    monkeypatch.undo()
    chat(server, user("see", part()))


def test_rows_in_place_of_a_picture(server, llm):
    (made,) = llm.llm_engine.input_processor.pictures.process(GivenImages((FIRST,), (None,), {}))
    rows = llm.llm_engine.engine_core.executor.worker.model_runner.guest(PictureRows).tower.encode(made.values)
    given = {"image_embeds": saved(rows), "image_grid_thw": saved(made.values["image_grid_thw"])}
    answer = chat(server, user("see", {"type": "image_embeds", "image_embeds": given}))
    check(readings(answer), wanted(llm, "<s>user:see{}</s><s>assistant:", FIRST))
    fewer = {**given, "image_embeds": saved(rows[1:])}
    error = refused(server, messages=[user("see", {"type": "image_embeds", "image_embeds": fewer})])
    assert error["param"] == "messages[0].content[1].image_embeds" and f"{len(rows) - 1} rows" in error["message"]


def saved(tensor: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor.clone(), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": 3}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": 3}}, "messages[0].content[0].image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "x"}}, "messages[0].content[0].detail"),
        ({"type": "image_url", "image_url": {"url": "data:,"}, "uuid": 3}, "messages[0].content[0].uuid"),
        ({"type": "image_url", "image_url": {"url": "data:,"}, "crop": [1]}, "messages[0].content[0].crop"),
        ({"type": "image", "image": "data:,", "url": "data:,"}, "messages[0].content[0].url"),
        ({"type": "image_embeds", "image_embeds": "x"}, "messages[0].content[0].image_embeds"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "messages[0].content[0].video_url.url"),
        (
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
            "messages[0].content[0].video_url.url",
        ),
        ({"type": "file", "file": {}}, "messages[0].content"),
        ({"type": ["video"]}, "messages[0].content"),
        ({"type": "image_pil", "image_pil": "x"}, "messages[0].content[0].image_pil"),
    ],
)
def test_malformed_parts(server, own, place):
    assert refused(server, messages=[user(own)])["param"] == place


VIDEO = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}


@pytest.mark.parametrize("video", [VIDEO, {**VIDEO, "type": "video"}, {**VIDEO, "type": "input_video"}])
@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/responses", {"input": "content"}),
        ("/v1/messages", {"messages": "content", "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": "content"}),
    ],
)
def test_doors_of_pictures_alone_refuse_videos(server, url, body, video):
    content = [{"role": "user", "content": [video]}]
    error = refused(server, url, **{name: content if value == "content" else value for name, value in body.items()})
    assert "video" in str(error) and "[0].content[0]" in str(error)


def test_more_pictures_than_the_limit(server):
    error = refused(server, messages=[user(*[part()] * 1000)])
    assert error["param"] == "messages" and "1000 pictures" in error["message"] and "allows 3" in error["message"]


def test_a_text_that_equals_the_placeholder_is_no_picture(server):
    for text in ("<|image_pad|>", f"see {PLACE}"):
        error = refused(server, messages=[user(text, part())])
        assert error["param"] == "messages" and "<|image_pad|>" in error["message"]
    # Beside no picture it is a word like others.
    assert chat(server, user("<|image_pad|>"))["choices"][0]["finish_reason"] == "length"


def test_models_of_texts_and_text_only_servers_say_so(serve, folder):
    app = serve({"max_model_len": 300, "language_model_only": True}, folder)
    app.state.chat_template = TEMPLATE
    error = refused(app, messages=[user("a", part())])
    assert error["param"] == "messages[0].content" and "language_model_only" in error["message"]
    image = {"type": "image", "source": {"type": "url", "url": data_url(FIRST)}}
    assert "language_model_only" in refused(app, "/v1/messages", max_tokens=1, messages=[user(image)])["message"]
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(FIRST)}]}
    assert "language_model_only" in refused(app, "/v1/responses", input=[item])["message"]
    assert chat(app, user("a"))["choices"]


def test_others_go_on_while_pictures_are_decoded(server, monkeypatch):
    go_on = threading.Event()
    decode = loader_module.decoded

    def slow(*args: Any) -> Any:
        assert go_on.wait(60)
        return decode(*args)

    monkeypatch.setattr(loader_module, "decoded", slow)
    body = {"model": "tiny", "messages": [user("a", part())], "max_tokens": 1}
    waiting = [server.begin("POST", CHAT, json=body) for _ in range(40)]
    assert server.request("GET", "/health").status_code == 200
    assert chat(server, user("a"))["choices"]
    assert not any(each.done() for each in waiting)
    go_on.set()
    assert all(each.result(timeout=120).status_code == 200 for each in waiting)


def test_a_client_that_leaves_frees_its_pictures(server, monkeypatch):
    loaded = asyncio.Event()

    async def never(*_: Any) -> Any:
        loaded.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("vllm.inputs.media.loader.PictureLoader.load", never)

    async def leave() -> bool:
        body = {"model": "tiny", "messages": [user("a", part())]}
        task = asyncio.create_task(server._client.post(CHAT, json=body))
        await loaded.wait()
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert server.run(leave())


def test_decisions(server, llm):
    def items(image: Any) -> list[Any]:
        own = {"type": "input_image", "image_url": data_url(image)}
        return [{"role": "user", "content": [{"type": "input_text", "text": "see"}, own]}]

    question = {"type": "choice", "instructions": "which?", "choices": [{"value": "a"}, {"value": "b"}]}
    found = []
    for image in (FIRST, SECOND):
        answer = server.post("/v1/decisions", input=items(image), questions=[question])
        (own,) = llm.decide(items(image), [question], use_tqdm=False)
        assert answer["usage"]["input_tokens"] == own.usage.input_tokens
        found.append([choice["probability"] for choice in answer["answers"][0]["probabilities"]])
        assert found[-1] == pytest.approx([choice.probability for choice in own.answers[0].probabilities], abs=1e-4)
    assert found[0] != pytest.approx(found[1], abs=1e-4)
    plan = llm.decision_plan(items(FIRST), [question], DecisionParams(chat_template=TEMPLATE))
    (prompt, _), *_ = plan.requests()
    text = llm.get_tokenizer().decode(prompt.token_ids)
    (rows,) = (len(each.rows) for each in prompt.images.pictures)
    assert "<s>user:see\n" + PLACE.replace("<|image_pad|>", "<|image_pad|>" * rows) in text
    error = refused(server, "/v1/decisions", input=items(FIRST), questions=[question], truncate_prompt_tokens=50)
    assert error["param"] == "truncate_prompt_tokens"
    bad = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(b"words")}]}]
    error = refused(server, "/v1/decisions", input=bad, questions=[question])
    assert error["param"] == "input[0].content[0].image_url"
    told = [{"role": "assistant", "content": items(FIRST)[0]["content"][1:]}]
    error = refused(server, "/v1/decisions", input=told, questions=[question])
    assert error["param"] == "input[0].content[0].type" and "got 'input_image'" in error["message"]
    both = [{"role": "user", "content": [{"type": "input_text", "text": PLACE}, *items(FIRST)[0]["content"]]}]
    assert refused(server, "/v1/decisions", input=both, questions=[question])["param"] == "input"


def test_labels_of_several_tokens_behind_a_picture(llm):
    """Each label's tokens are those that a model of forced words reads."""
    prompt = {"prompt": f"<s>user:{PLACE}which</s>", "multi_modal_data": {"image": FIRST}}
    (scores,) = llm.score_labels([prompt], ["ab", "c"], use_tqdm=False)
    first, second = (llm.get_tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "ab")
    forced = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, logit_bias={first: 100.0}, logprob_token_ids=[first, second]
    )
    (output,) = llm.generate(prompt, forced, use_tqdm=False)
    rows = output.outputs[0].logprobs
    assert output.outputs[0].token_ids[0] == first
    assert scores.logprobs[0] == pytest.approx(rows[0][first].logprob + rows[1][second].logprob, abs=1e-4)
