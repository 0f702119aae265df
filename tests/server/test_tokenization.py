"""/tokenize and /detokenize give transformers' ids and texts, and keep the server free for others meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from asgi import AppThread, Serve, client_of
from byte_tokenizer import BOS, VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tokenizers.processors import TemplateProcessing

from vllm.server.protocol.tokenization import MAX_TEXT_BYTES
from vllm.utils.checks import MAX_LIST_LENGTH

TEXT = "the stop \N{GRINNING FACE} </s>\n caf\xe9"
MESSAGES = [{"role": "system", "content": "the"}, {"role": "user", "content": "stop"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}answer{{ mood }}:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokenizer begins every text with <s>."""
    folder = tmp_path_factory.mktemp("tiny")
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE + 2)
    backend = make_byte_tokenizer(folder).backend
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> AppThread:
    return serve({}, folder)


@pytest.mark.parametrize("special", [None, True, False])
@pytest.mark.parametrize("text", [TEXT, "", "a" * 5000])
def test_a_text(server, reference, text, special):
    answer = server.post("/tokenize", prompt=text, add_special_tokens=special)
    tokens = reference.encode(text, add_special_tokens=special is not False)
    assert answer == {
        "count": len(tokens),
        "max_model_len": 128,
        "tokens": tokens,
        "token_strs": None,
        "token_texts": None,
    }


def test_the_tokens_as_texts(server, reference):
    answer = server.post("/tokenize", prompt=TEXT, return_token_strs=True)
    assert answer["token_strs"] == reference.convert_ids_to_tokens(answer["tokens"])
    assert "\u0120stop" in answer["token_strs"] and " stop" in answer["token_texts"]
    assert answer["token_texts"][0] == "<s>" and len(answer["token_texts"]) == answer["count"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "system: the\nuser: stop\nanswer:"),
        ({"add_generation_prompt": False}, "system: the\nuser: stop\n"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "system: the\nuser: stop"),
        ({"chat_template_kwargs": {"mood": " gladly"}}, "system: the\nuser: stop\nanswer gladly:"),
        ({"chat_template": "{{ messages[0].content }}"}, "the"),
    ],
)
@pytest.mark.parametrize("special", [None, False, True])
def test_a_conversation(server, reference, fields, expected, special):
    body = {"messages": MESSAGES, "chat_template": TEMPLATE, "add_special_tokens": special, **fields}
    answer = server.post("/tokenize", **body)
    assert answer["tokens"] == reference.encode(expected, add_special_tokens=special is True)
    if not special:
        chat = {name: value for name, value in body.items() if name != "add_special_tokens"}
        completion = server.post("/v1/chat/completions", max_tokens=1, return_token_ids=True, **chat)
        assert completion["prompt_token_ids"] == answer["tokens"]


@pytest.mark.parametrize("count", [1, 5000])
def test_there_and_back(server, reference, count):
    text = TEXT * count
    tokens = server.post("/tokenize", prompt=text)["tokens"]
    answer = server.post("/detokenize", tokens=tokens)
    assert answer == {"prompt": "<s>" + text}
    assert answer["prompt"] == reference.decode(tokens, clean_up_tokenization_spaces=False)


def test_ids_of_any_kind(server):
    assert server.post("/detokenize", tokens=[]) == {"prompt": ""}
    # A part of a character; an id that the model has and the tokenizer has not.
    assert server.post("/detokenize", tokens=[VOCAB_SIZE - 1]) == {"prompt": "\N{REPLACEMENT CHARACTER}"}
    assert server.post("/detokenize", tokens=[260, VOCAB_SIZE + 1]) == {"prompt": "the"}


BAD = [
    ("/tokenize", {}, "prompt", "prompt or messages is required"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages", "exclude each other"),
    ("/tokenize", {"prompt": 5}, "prompt", "string"),
    ("/tokenize", {"prompt": ["a"]}, "prompt", "string"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt", "prompt"),
    ("/tokenize", {"prompt": "a" * (MAX_TEXT_BYTES + 1)}, "prompt", f"more than the limit of {MAX_TEXT_BYTES}"),
    ("/tokenize", {"prompt": "\xe9" * (MAX_TEXT_BYTES // 2 + 1)}, "prompt", f"has {MAX_TEXT_BYTES + 2} bytes"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens", "boolean"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", "boolean"),
    ("/tokenize", {"prompt": "a", "return_tokens": True}, "return_tokens", "did you mean 'return_token_strs'"),
    ("/tokenize", {"messages": []}, "messages", "messages"),
    ("/tokenize", {"messages": "hi"}, "messages", "messages"),
    ("/tokenize", {"messages": [5]}, "messages", "messages must be a list"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "messages[0]"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a\udfff"}]}, "messages[0].content", "surrogate"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a" * 2**19}] * 3}, "messages", "more than the limit"),
    ("/tokenize", {"messages": MESSAGES}, "chat_template", "no chat template"),
    ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ x.y.z }}"}, "messages", "chat template failed"),
    (
        "/tokenize",
        {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
        "tokenize",
    ),
    ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "tools"),
    ("/detokenize", {}, "tokens", "tokens is required"),
    ("/detokenize", {"tokens": None}, "tokens", "tokens must be a list"),
    ("/detokenize", {"tokens": "5"}, "tokens", "tokens must be a list"),
    ("/detokenize", {"tokens": [5.0]}, "tokens", "tokens must hold integers, got float"),
    ("/detokenize", {"tokens": [True]}, "tokens", "tokens must hold integers, got bool"),
    ("/detokenize", {"tokens": [[5]]}, "tokens", "tokens must hold integers, got list"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "tokens must not be negative, got -1"),
    ("/detokenize", {"tokens": [5, VOCAB_SIZE + 2]}, "tokens", f"tokens must be in [0, {VOCAB_SIZE + 2})"),
    ("/detokenize", {"tokens": [10**400]}, "tokens", "tokens must be in"),
    ("/detokenize", {"tokens": [5] * (MAX_LIST_LENGTH + 1)}, "tokens", f"more than the limit of {MAX_LIST_LENGTH}"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD)
def test_a_bad_field(server, path, body, param, message):
    response = server.request("POST", path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"] and error["code"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
def test_the_models_name(server, path, body):
    assert server.request("POST", path, json=body).status_code == 200
    response = server.request("POST", path, json={"model": "other", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_others_are_answered_while_a_long_text_is_tokenised(server, monkeypatch):
    """The long text's tokenisation does not end before the other request has its answer."""
    encode = type(server.engine.input_processor.tokenizer).encode
    answered = threading.Event()

    def wait_and_encode(self, text, **options):
        assert answered.wait(timeout=60)
        return encode(self, text, **options)

    async def run():
        async with client_of(server.engine) as client:
            long = asyncio.create_task(client.post("/tokenize", json={"prompt": "a" * 5000}))
            other = await client.post("/detokenize", json={"tokens": [260]})
            assert not long.done()
            answered.set()
            return (await long).json(), other.json()

    monkeypatch.setattr(type(server.engine.input_processor.tokenizer), "encode", wait_and_encode)
    long, other = server.run(run())
    assert long["count"] == 5001 and other == {"prompt": "the"}


def test_without_a_tokenizer(serve, folder):
    app = serve({"skip_tokenizer_init": True}, folder)
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        response = app.request("POST", path, json=body)
        assert response.status_code == 400 and "without a tokenizer" in response.json()["error"]["message"]


def test_what_the_tokenizer_is(server, monkeypatch):
    monkeypatch.setattr(server.state, "chat_template", TEMPLATE)
    assert server.request("GET", "/tokenizer_info").json() == {
        "model": "tiny",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 128,
        "bos_token": None,
        "eos_token": None,
        "pad_token": None,
        "chat_template": TEMPLATE,
    }
