"""Requests as upstream's clients send them: names of the model, fields, parts of messages, rendered prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import AppThread, Serve, client_of
from tiny_llm import make_tiny_model

from vllm.server.protocol import ChatCompletionRequest, CompletionRequest
from vllm.version import __version__

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "chat_template": TEMPLATE, "max_tokens": 2, "temperature": 0}
COMPLETION = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("Org") / "Small")


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> AppThread:
    return serve({}, folder, served_model_name=None)


def with_args(server: AppThread, method: str, path: str, body: Any = None, **args: Any) -> httpx.Response:
    """One request to another server over the same engine."""

    async def send() -> httpx.Response:
        async with client_of(server.engine, **{"access_log": False, "served_model_name": None, **args}) as client:
            return await client.request(method, path, json=body)

    return server.run(send())


@pytest.mark.parametrize("path", PATHS)
def test_the_model_is_served_under_the_name_as_given(server, folder, path):
    names = [each["id"] for each in server.request("GET", "/v1/models").json()["data"]]
    assert names == [str(folder)]
    for name in (str(folder), "Small", None):
        answer = server.request("POST", path, json={"model": name, **PATHS[path]})
        assert (answer.status_code, answer.json()["model"]) == (200, str(folder))
    assert server.request("POST", path, json=PATHS[path]).json()["model"] == str(folder)
    assert server.request("POST", path, json={"model": "Other/Small", **PATHS[path]}).status_code == 404
    assert server.request("GET", f"/v1/models/{folder}").json()["id"] == str(folder)


def test_of_several_names_the_first_stands_in_answers(server):
    names = {"served_model_name": ["a", "Org/b"]}
    listed = with_args(server, "GET", "/v1/models", **names).json()["data"]
    assert [each["id"] for each in listed] == ["a", "Org/b"]
    for name in ("a", "Org/b"):
        assert (
            with_args(server, "POST", "/v1/completions", {"model": name, **COMPLETION}, **names).json()["model"] == "a"
        )
    for name in ("b", "Small", str(server.engine.model_config.model)):
        answer = with_args(server, "POST", "/v1/completions", {"model": name, **COMPLETION}, **names)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def chat(server: AppThread, **fields: Any) -> httpx.Response:
    return server.request("POST", "/v1/chat/completions", json={**CHAT, **fields})


def rendered(server: AppThread, **fields: Any) -> Any:
    answer = server.request("POST", "/v1/chat/completions/render", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_max_completion_tokens_win(server):
    answer = chat(server, max_tokens=5, max_completion_tokens=3, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert rendered(server, max_tokens=2, max_completion_tokens=9)["sampling_params"]["max_tokens"] == 9


def test_parts_of_messages_that_are_texts(server):
    parts = [
        {"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"},
        {"type": "refusal", "refusal": "d"}, {"type": "thinking", "thinking": "e"}, "f",
    ]  # fmt: skip
    messages = [{"role": "user", "content": parts}]
    assert rendered(server, messages=messages)["prompt"] == "<user>a\nb\nc\nd\ne\nf"
    for part in (
        {"type": "refusal", "text": "d"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": ["text"]},
    ):
        answer = chat(server, messages=[{"role": "user", "content": [part]}])
        assert answer.status_code == 400
        assert "messages[0].content[0]" in answer.json()["error"]["message"]


def test_tools_are_for_the_template_alone(server):
    template = "{{ tools | length if tools else 'none' }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(server, chat_template=template, tools=tools, tool_choice="none")["prompt"] == "1"
    assert rendered(server, chat_template=template, tool_choice="none")["prompt"] == "none"
    assert rendered(server, chat_template=template, tools=[], tool_choice="auto")["prompt"] == "none"
    body = {**CHAT, "chat_template": template, "tools": tools, "tool_choice": "none"}
    kept = with_args(server, "POST", "/v1/chat/completions/render", body, exclude_tools_when_tool_choice_none=True)
    assert kept.json()["prompt"] == "none"
    for fields in ({"tools": tools}, {"tools": tools, "tool_choice": "auto"}):
        error = chat(server, **fields).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_field")


def test_fields_for_the_template(server):
    template = (
        "{{ reasoning_effort | default('-') }}{{ documents[0].text if documents else '-' }}{{ mood | default('-') }}"
    )
    assert rendered(server, chat_template=template)["prompt"] == "---"
    fields = {"reasoning_effort": "high", "documents": [{"text": "d"}], "chat_template_kwargs": {"mood": "m"}}
    assert rendered(server, chat_template=template, **fields)["prompt"] == "highdm"
    defaults = {"default_chat_template_kwargs": {"mood": "own", "reasoning_effort": "low"}}
    body = {**CHAT, "chat_template": template}
    path = "/v1/chat/completions/render"
    assert with_args(server, "POST", path, body, **defaults).json()["prompt"] == "low-own"
    assert with_args(server, "POST", path, {**body, **fields}, **defaults).json()["prompt"] == "highdm"


def test_verbosity_and_effort_are_for_templates_that_know_them(server):
    knows = "{{ verbosity | default('-') }}"
    assert rendered(server, chat_template=knows, verbosity="low")["prompt"] == "low"
    assert rendered(server, chat_template=knows)["prompt"] == "-"
    assert rendered(server, chat_template="x", verbosity="low")["prompt"] == "x"
    knows = "{{ reasoning_effort | default('-') }}{{ enable_thinking | default('-') }}"
    assert rendered(server, chat_template=knows, reasoning={"effort": "low", "summary": "auto"})["prompt"] == "low-"
    assert rendered(server, chat_template=knows, reasoning={"effort": "none"})["prompt"] == "noneFalse"
    both = {"reasoning": {"effort": "low"}, "reasoning_effort": "low"}
    assert rendered(server, chat_template=knows, **both)["prompt"] == "low-"
    error = chat(server, reasoning={"effort": "low"}, reasoning_effort="high").json()["error"]
    assert (error["param"], error["code"]) == ("reasoning", "invalid_value")
    for name, instead in (("max_tokens", "thinking_token_budget"), ("exclude", "include_reasoning")):
        error = chat(server, reasoning={name: 5}).json()["error"]
        assert error["code"] == "unsupported_field" and instead in error["message"]


def test_a_prediction_changes_nothing(server):
    plain = chat(server, temperature=0).json()["choices"]
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        answer = chat(server, temperature=0, prediction={"type": "content", "content": content})
        assert answer.json()["choices"] == plain


def test_templates_may_get_contents_as_parts(server):
    body = {**CHAT, "chat_template": "{{ messages[0].content[0].text }}"}
    path = "/v1/chat/completions/render"
    for content_format in ("auto", "openai"):
        answer = with_args(server, "POST", path, body, chat_template_content_format=content_format)
        assert answer.json()["prompt"] == "hi"
    answer = with_args(server, "POST", path, body, chat_template_content_format="string")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template"


@pytest.mark.parametrize("path", PATHS)
def test_what_is_rendered_is_what_is_generated_from(server, path):
    body = {**PATHS[path], "return_token_ids": True, "cache_salt": "s", "request_id": "mine", "stop": ["x"]}
    answer = server.request("POST", path, json=body).json()
    (usual,) = [each for each in (answer, *answer["choices"]) if "prompt_token_ids" in each]
    answer = server.request("POST", f"{path}/render", json={**body, "stream": True}).json()
    (shown,) = answer if isinstance(answer, list) else [answer]
    assert shown["token_ids"] == usual["prompt_token_ids"]
    assert shown["request_id"] == ("cmpl-mine" if path == "/v1/completions" else "chatcmpl-mine")
    assert (shown["stream"], shown["cache_salt"], shown["priority"]) == (True, "s", 0)
    assert (shown["sampling_params"]["max_tokens"], shown["sampling_params"]["stop"]) == (2, ["x"])


def test_prompts_that_are_rendered(server):
    path = "/v1/completions/render"
    both = server.request("POST", path, json={"prompt": ["a", "bc"], "request_id": "r"}).json()
    assert [each["request_id"] for each in both] == ["cmpl-r-0", "cmpl-r-1"]
    assert [each["prompt"] for each in both] == ["a", "bc"]
    (own,) = server.request("POST", path, json={"prompt": [5, 6]}).json()
    assert own["token_ids"] == [5, 6]
    too_long = server.request("POST", path, json={"prompt": "a" * 200, "max_tokens": 1})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "invalid_value")
    assert server.request("POST", path, json={"prompt": "a", "model": "no"}).status_code == 404


def test_special_tokens_of_chat_are_added_when_asked_for(server):
    text = rendered(server)
    ids = server.request("POST", "/tokenize", json={"prompt": text["prompt"], "add_special_tokens": True}).json()
    assert rendered(server, add_special_tokens=True)["token_ids"] == ids["tokens"]
    assert chat(server, add_special_tokens=True).json()["usage"]["prompt_tokens"] == ids["count"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("neutral", "refused"),
    [
        ({"truncation_side": "left"}, {"truncation_side": "right"}),
        ({"watermarking": False}, {"watermarking": True}),
        ({"mm_payload": "tensors"}, {"mm_payload": "x"}),
        ({"kv_transfer_params": {}}, {"kv_transfer_params": {"do_remote_prefill": True}}),
        ({"stream_interval": 1}, {"stream_interval": -1}),
        ({"thinking_token_budget": -1}, {"thinking_token_budget": 5}),
        ({"structured_outputs": {}}, {"structured_outputs": {"regex": "("}}),
        ({"response_format": {"type": "text"}}, {"response_format": {"type": "xml"}}),
        ({"session_id": "s", "store": True, "metadata": {"a": 1}, "service_tier": "auto", "user": "u"}, None),
    ],
)
def test_upstreams_fields_at_neutral_values(server, path, neutral, refused):
    usual = server.request("POST", path, json=PATHS[path]).json()["choices"]
    assert server.request("POST", path, json={**PATHS[path], **neutral}).json()["choices"] == usual
    if refused:
        answer = server.request("POST", path, json={**PATHS[path], **refused})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, *refused)


# The fields of upstream's ChatCompletionRequest and CompletionRequest.
UPSTREAM = {
    "/v1/chat/completions": """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
        reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
        repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
        logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
        add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
        structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
        return_weight_versions routed_experts_prompt_start return_token_offsets return_prompt_text mm_payload
        return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
        stream_interval
    """,
    "/v1/completions": """
        model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
        length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
        logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
        request_id session_id return_tokens_as_token_ids return_token_ids return_weight_versions
        routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params
        ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
    """,
}


@pytest.mark.parametrize("path", UPSTREAM)
def test_every_field_of_upstreams_is_known(path):
    model = ChatCompletionRequest if "chat" in path else CompletionRequest
    known = {*model.model_fields, *model.ACCEPTED, *model.REFUSED}
    assert [name for name in UPSTREAM[path].split() if name not in known] == []


def test_fingerprints(server):
    def of(**args: Any) -> str | None:
        answer = with_args(server, "POST", "/v1/completions", COMPLETION, **args)
        return answer.json().get("system_fingerprint")

    usual = of()
    assert usual is not None and usual.startswith(f"vllm-{__version__}-")
    assert of(fingerprint_mode="hash") == usual  # there is one device
    assert of(fingerprint_mode="custom", fingerprint_value="mine") == "mine"
    assert of(fingerprint_mode="none") is None
