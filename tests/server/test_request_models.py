"""All bodies have in common: whole numbers as floats, names that other engines' clients send."""

from __future__ import annotations

import importlib
import itertools
import json
import pkgutil
from typing import Any

import pytest
from pydantic import ValidationError

from vllm.exceptions import VLLMValidationError
from vllm.server import protocol
from vllm.server.errors import ApiError
from vllm.server.http.routes import parse_body
from vllm.server.protocol.base import RequestModel, check_names
from vllm.server.protocol.generation import ChatCompletionRequest, CompletionRequest
from vllm.server.protocol.messages import MessagesRequest
from vllm.server.protocol.responses import ResponsesRequest

for _module in pkgutil.iter_modules(protocol.__path__):
    importlib.import_module(f"{protocol.__name__}.{_module.name}")


def _all_models(of: type[RequestModel] = RequestModel) -> list[type[RequestModel]]:
    return [each for own in of.__subclasses__() for each in (own, *_all_models(own))]


MODELS = list(dict.fromkeys(_all_models()))


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema.get("anyOf", [schema])


INTEGERS = [
    (model, name)
    for model in MODELS
    for name, schema in model.model_json_schema()["properties"].items()
    if name in model.model_fields and any(each.get("type") == "integer" for each in _branches(schema))
]


def _wrong_inputs(model: type[RequestModel], name: str, value: Any) -> list[Any]:
    """Values that the field refuses; other fields may be missing."""
    try:
        model.model_validate({name: value})
    except ValidationError as error:
        return [each["input"] for each in error.errors() if each["loc"][0] == name]
    return []


def test_integers_are_found():
    names = {name for _, name in INTEGERS}
    assert names >= {"max_tokens", "n", "top_n", "dimensions", "top_logprobs", "chunk_size", "permutations", "priority"}


@pytest.mark.parametrize(("model", "name"), INTEGERS)
def test_a_float_without_a_fraction_is_an_integer(model, name):
    assert _wrong_inputs(model, name, 1.0) == []
    read = model._read_whole_numbers({name: 1.0})[name]
    assert (read, type(read)) == (1, int)
    for wrong in (1.5, True, "1", float("inf")):
        assert _wrong_inputs(model, name, wrong) == [wrong], (name, wrong)


def test_floats_stay_what_they_are():
    body = CompletionRequest(prompt="a", temperature=1.0, logit_bias={"7": 2.0}, max_tokens=16.0)
    assert type(body.temperature) is float and type(body.max_tokens) is int
    assert CompletionRequest(prompt=[7.0], logprob_token_ids=[7.0]).logprob_token_ids == [7.0]
    with pytest.raises(VLLMValidationError, match="must hold integers, got float 7.0"):
        CompletionRequest(prompt="a", logprob_token_ids=[7.0]).to_sampling_params(1)


@pytest.mark.parametrize("model", MODELS)
def test_unknown_fields_say_how_they_pass(model):
    names = {"num_ctx", "keep_alive", "repeat_penalty", "typical_p", "thinking", "enable_thinking", "zzz"}
    for name in names - set(model.model_fields):
        with pytest.raises(ApiError) as caught:
            check_names({name: 1}, model)
        message, param = caught.value.message, caught.value.param
        assert param == name and message.startswith(f"unknown field {name!r}") and "--ignore-unknown-fields" in message
        check_names({name: 1}, model, ignore_unknown=True)
        check_names({name: None}, model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("nothing", [None, False, "", [], {}])
def test_fields_that_ask_for_nothing_pass(model, nothing):
    names = {"zzz", "num_ctx", "rid", "session_params", "messages"}
    # An empty object can turn on what it is the options of.
    names |= set() if nothing == {} else {"no_stop_trim", "return_hidden_states", "web_search_options"}
    check_names(dict.fromkeys(names - set(model.model_fields), nothing), model)


@pytest.mark.parametrize("model", MODELS)
def test_what_routers_write_into_every_body(model):
    written = {
        "separate_reasoning": True, "stream_reasoning": True, "no_stop_trim": False, "return_hidden_states": False,
    }  # fmt: skip
    check_names(written, model)
    for name, value in written.items():
        for asked in (not value, 1):
            with pytest.raises(ApiError, match=f"{name} cannot be honoured: ") as caught:
                check_names({name: asked}, model)
            assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("name", ["do_sample", "think", "enable_thinking"])
def test_false_may_be_a_wish(name):
    with pytest.raises(ApiError, match=f"unknown field '{name}'"):
        check_names({name: False}, ChatCompletionRequest)
    check_names({name: []}, ChatCompletionRequest)
    with pytest.raises(ApiError, match="enabled cannot be honoured"):
        check_names({"reasoning": {"enabled": False}}, ChatCompletionRequest)


def test_hints_are_of_fields_that_are_there():
    def message(model: type[RequestModel], name: str) -> str:
        with pytest.raises(ApiError) as caught:
            check_names({name: 1}, model)
        return caught.value.message

    assert "'chat_template_kwargs.enable_thinking'" in message(ChatCompletionRequest, "enable_thinking")
    assert "chat_template_kwargs" not in message(CompletionRequest, "enable_thinking")
    assert "'max_tokens'" in message(CompletionRequest, "max_completion_tokens")
    assert "'instructions'" in message(ResponsesRequest, "system")
    assert "'system'" in message(MessagesRequest, "instructions")


@pytest.mark.parametrize("model", MODELS)
def test_hints_are_of_misspelt_names_alone(model):
    """Names that share a word with a field are other names."""
    for name in {"prompt", "options", "messages", "input", "query", "raw"} - set(model.model_fields):
        if name in model.REFUSED:
            continue
        with pytest.raises(ApiError) as caught:
            check_names({name: 1}, model)
        assert "did you mean" not in caught.value.message, caught.value.message


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
TAG = {"format": {"type": "const_string", "value": "a"}}
FORMS = {
    "json": [
        {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
    "json_object": [{"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}],
    "regex": [{"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}],
    "choice": [{"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}],
    "grammar": [{"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}],
    "structural_tag": [
        {"structural_tag": TAG}, {"structural_tag": json.dumps(TAG)}, {"structured_outputs": {"structural_tag": TAG}},
        {"response_format": {"type": "structural_tag", **TAG}},
    ],
}  # fmt: skip


def _form(*fields: dict[str, Any]) -> Any:
    body = CompletionRequest.model_validate({"prompt": "a", **{k: v for each in fields for k, v in each.items()}})
    return body.form(body.structured_outputs)


@pytest.mark.parametrize("kind", FORMS)
def test_one_form_by_two_names_is_one(kind):
    """Clients send a form by the names of several ages of servers; an option of one of them holds."""
    for one, other in itertools.combinations(FORMS[kind], 2):
        if one.keys() != other.keys():
            assert _form(one, other)[kind] in (_form(one)[kind], _form(other)[kind])
    for older, others in ((each, FORMS[name]) for each in FORMS[kind] for name in FORMS if name != kind):
        for other in others:
            if older.keys() != other.keys():
                with pytest.raises(VLLMValidationError, match="exclude each other"):
                    _form(older, other)


def test_options_of_forms_hold():
    spaced = {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}
    assert _form(FORMS["json"][0], spaced) == spaced["structured_outputs"]
    assert _form(spaced, {"guided_whitespace_pattern": " "}) == spaced["structured_outputs"]
    for fields in (
        [spaced, {"guided_whitespace_pattern": "  "}],
        [{"guided_regex": "a"}, {"structured_outputs": {"regex": "b"}}],
        # JSON's 1 is not its true.
        [{"guided_json": {"const": 1}}, {"structured_outputs": {"json": {"const": True}}}],
    ):
        with pytest.raises(VLLMValidationError, match="exclude each other"):
            _form(*fields)


def test_a_body_of_another_route_says_which():
    for model, body, door in (
        (ChatCompletionRequest, {"prompt": "a"}, "/v1/completions takes prompt"),
        (CompletionRequest, {"messages": []}, "/v1/chat/completions or /v1/messages takes messages"),
        (MessagesRequest, {"input": "a", "max_tokens": 5}, "/v1/responses or /v1/embeddings takes input"),
    ):
        with pytest.raises(ApiError, match=f"is required; {door}"):
            parse_body(body, model, ignore_unknown=True)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
def test_neutral_values_are_compared_as_numbers(model):
    check_names({"thinking_token_budget": -1.0, "routed_experts_prompt_start": 0.0, "watermarking": False}, model)
    for name, value in {"routed_experts_prompt_start": True, "watermarking": 0}.items():
        with pytest.raises(ApiError, match=name):
            check_names({name: value}, model)


NEUTRAL: dict[str, list[Any]] = {
    "frequency_penalty": [0, 0.0], "presence_penalty": [0], "logit_bias": [{}], "n": [1, 1.0], "stop": [[]],
    "seed": [-1], "stream": [False], "stream_options": [{}], "top_p": [1, 1.0], "tool_choice": ["none", "auto"],
    "include_reasoning": [True, False], "use_beam_search": [False], "top_k": [0, -1, -1.0], "min_p": [0],
    "repetition_penalty": [1, 1.0], "length_penalty": [1, 1.0], "early_stopping": [False], "stop_token_ids": [[]],
    "min_tokens": [0, 0.0], "truncate_prompt_tokens": [-1], "truncation_side": ["left"], "logprob_token_ids": [[]],
    "bad_words": [[]], "echo": [False], "media_io_kwargs": [{}], "mm_processor_kwargs": [{}], "priority": [0, 0.0],
    "structured_outputs": [{}], "kv_transfer_params": [{}], "ec_transfer_params": [{}], "vllm_xargs": [{}],
    "thinking_token_budget": [-1, -1.0],
    "repetition_detection": [{}, {"max_pattern_size": 0.0}], "stream_interval": [1],
    "prompt_embeds": [[]], "logits_processors": [[]], "metadata": [{}], "store": [False], "service_tier": ["auto"],
    "prompt_cache_options": [{}, {"mode": "implicit"}, {"ttl": "30m"}], "functions": [[]], "modalities": [["text"]],
    "best_of": [1, 1.0], "suffix": [""], "response_format": [{"type": "text"}], "tools": [[]], "documents": [[]],
}  # fmt: skip
"""As clients of OpenAI's and of upstream's send fields that ask for nothing."""


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_are_taken(model, name):
    prompt = {"prompt": "a"} if model is CompletionRequest else {"messages": [{"role": "user", "content": "a"}]}
    for value in (*NEUTRAL[name], None):
        body = parse_body({**prompt, name: value}, model, ignore_unknown=False)
        body.to_sampling_params(1)
