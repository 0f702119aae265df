"""/v1/chat/completions: the true top-k, then the ids; true bytes; whole and streamed."""

from __future__ import annotations

import pytest
from asgi import server_args
from tiny_llm import make_tiny_llm

from vllm import SamplingParams

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the cat"}]
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder)


def chat(server, **body):
    return server.post("/v1/chat/completions", **{"messages": MESSAGES, "max_tokens": 5, **GREEDY, **body})


def offline(llm, messages=MESSAGES, **params):
    options = SamplingParams(**{"max_tokens": 5, **GREEDY, **params})
    (output,) = llm.chat(messages, options, chat_template=CHAT_TEMPLATE, use_tqdm=False)
    return output


def test_a_message_can_be_sent_back(server):
    (choice,) = chat(server)["choices"]
    nothing = dict.fromkeys(("refusal", "reasoning", "annotations", "audio", "function_call"))
    message = choice["message"]
    assert message == {"role": "assistant", "content": message["content"], **nothing}
    assert chat(server, messages=[{"role": "user", "content": "a"}, message])["choices"]


def test_max_tokens_left_out_fill_the_context(server, llm):
    answer = chat(server, max_tokens=None)
    assert answer["usage"]["total_tokens"] == 128
    assert chat(server, max_tokens=None, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("k", [0, 1, 4, -1])
def test_top_logprobs_are_the_true_ones_then_the_ids(server, llm, k):
    """Behind k > 0 of them the sampled token, where it lies outside, and no id that is there already."""
    fields = {"temperature": 2.0, "seed": 11, "max_tokens": 12}
    vocab_size = llm.llm_engine.model_config.vocab_size
    everything = offline(llm, **fields, logprobs=-1).outputs[0].logprobs
    best = max(everything[0], key=lambda token_id: everything[0][token_id].logit)
    ids = [200, best, next(iter(everything[1])), 7]
    (choice,) = chat(server, **fields, logprobs=True, top_logprobs=k, logprob_token_ids=ids)["choices"]
    outside = 0
    for entry, position in zip(choice["logprobs"]["content"], everything, strict=True):
        sampled = next(iter(position))
        assert (entry["token_id"], entry["rank"]) == (sampled, position[sampled].rank)
        ranked = sorted(position, key=lambda token_id: -position[token_id].logit)
        top = ranked[: vocab_size if k == -1 else k]
        outside += sampled not in top
        shown = [*top, sampled] if k > 0 and sampled not in top else top
        expected = shown + [token_id for token_id in ids if token_id not in shown]
        assert [each["token_id"] for each in entry["top_logprobs"]] == expected
        for each in entry["top_logprobs"]:
            truth = position[each["token_id"]]
            assert (each["rank"], each["token"]) == (truth.rank, truth.decoded_token)
            assert each["logprob"] == pytest.approx(truth.logprob, abs=1e-5)
            assert each["logit"] == pytest.approx(truth.logit, abs=1e-5)
    assert outside > 0 or k == -1, "the case that this is about did not occur"


def test_bytes_are_those_of_the_tokens(server, llm):
    tokenizer = llm.llm_engine.tokenizer
    for as_ids in (False, True):
        fields = {"logprobs": True, "top_logprobs": -1, "return_tokens_as_token_ids": as_ids}
        (choice,) = chat(server, max_tokens=1, **fields)["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == tokenizer.vocab_size
        for each in entry["top_logprobs"]:
            assert bytes(each["bytes"]) == tokenizer.token_bytes(each["token_id"])
            if as_ids:
                assert each["token"] == f"token_id:{each['token_id']}"


def test_ids_without_logprobs(server):
    (choice,) = chat(server, logprob_token_ids=[7, 9])["choices"]
    assert [[each["token_id"] for each in entry["top_logprobs"]] for entry in choice["logprobs"]["content"]] == [
        [7, 9]
    ] * 5
    assert [list(each["ids"]) for each in choice["readings"]] == [["7", "9"]] * 5


def test_labels_and_logits(server):
    answer = chat(server, labels=[" the"], logits_indices=[7])
    (label,) = answer["labels"]
    (choice,) = answer["choices"]
    assert choice["readings"][0]["ids"][str(label["token_id"])]["label"] == " the"
    assert list(choice["logits_values"]) == ["7"]


def test_prompt_readings_stand_beside_the_choices(server, llm):
    fields = {"prompt_logprobs": 1, "max_tokens": 1, "n": 2, "temperature": 1.0, "seed": 1}
    answer = chat(server, **fields, return_token_ids=True)
    expected = offline(llm, **fields)
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    assert [None if each is None else list(each) for each in answer["prompt_logprobs"]] == [
        None if each is None else list(map(str, each)) for each in expected.prompt_logprobs
    ]


def test_no_token_at_all(server, llm):
    (choice,) = chat(server, max_tokens=0, logprob_token_ids=[7])["choices"]
    assert choice["message"]["content"] == ""
    assert choice["logprobs"]["content"] == []
    assert choice["readings"][0]["token_id"] is None


def test_the_last_message_can_be_continued(server):
    template = "{% for m in messages %}{{ m.content }}{% if not loop.last %};{% endif %}{% endfor %}"
    messages = [*MESSAGES, {"role": "assistant", "content": "sat on"}]
    fields = {"chat_template": template, "continue_final_message": True, "add_generation_prompt": False}
    answer = chat(server, messages=messages, **fields, return_token_ids=True)
    plain = server.post("/v1/completions", prompt="the cat;sat on", max_tokens=5, **GREEDY, return_token_ids=True)
    assert answer["prompt_token_ids"] == plain["choices"][0]["prompt_token_ids"]
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
ECHOED = [
    # (the last message, fields, the answer's role, what it begins with)
    ({"role": "assistant", "content": "sat on"}, CONTINUED, "assistant", "sat on"),
    ({"role": "assistant", "content": "sat on"}, {}, "assistant", "sat on"),
    ({"role": "user", "content": "sat on"}, {}, "assistant", ""),
    ({"role": "user", "content": "sat on"}, {"add_generation_prompt": False}, "user", "sat on"),
    ({"role": "assistant", "content": [{"type": "text", "text": "é"}, {"type": "text", "text": "b"}]}, {}, "assistant",
     "é\nb"),
]  # fmt: skip


@pytest.mark.parametrize(("last", "fields", "role", "echoed"), ECHOED)
def test_an_echo_is_the_last_message_of_the_same_role(server, last, fields, role, echoed):
    template = "{% for m in messages %}{{ m.content }}{% if not loop.last %};{% endif %}{% endfor %}"
    body = {"messages": [*MESSAGES, last], "chat_template": template, "logprobs": True, "return_token_ids": True}
    body |= {"n": 2, "temperature": 1.0, "seed": 5, "labels": [" the"], **fields}
    plain, echo = chat(server, **body), chat(server, **body, echo=True)
    for each in plain["choices"]:
        assert each["message"]["role"] == role
        each["message"]["content"] = echoed + each["message"]["content"]
    assert echo["choices"] == plain["choices"]
    assert (echo["usage"], echo["labels"]) == (plain["usage"], plain["labels"])

    chunks = server.stream("/v1/chat/completions", max_tokens=5, **{**GREEDY, **body, "echo": True})
    assert chunks[0]["labels"] == plain["labels"] and chunks[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    assert all("labels" not in chunk and "prompt_token_ids" not in chunk for chunk in chunks[1:])
    for choice in plain["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in own] == [role] + [None] * (len(own) - 1)
        assert "".join(part["delta"]["content"] for part in own) == choice["message"]["content"]
        if echoed:
            first, *own = own
            assert (first["delta"]["content"], first["logprobs"], first["finish_reason"]) == (echoed, None, None)
        content = [entry["token_id"] for part in own for entry in part["logprobs"]["content"]]
        assert content == [entry["token_id"] for entry in choice["logprobs"]["content"]]


def test_an_echo_without_tokens_and_in_batches(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "sat on"}]
    fields = {"max_tokens": 0, "echo": True, **CONTINUED}
    assert chat(server, messages=messages, **fields)["choices"][0]["message"]["content"] == "sat on"
    batch = {"messages": [messages, MESSAGES], "echo": True, "max_tokens": 2, "chat_template": CHAT_TEMPLATE, **GREEDY}
    first, second = server.post("/v1/chat/completions/batch", **batch)["choices"]
    plain = server.post("/v1/chat/completions/batch", **{**batch, "echo": False})["choices"]
    assert first["message"]["content"] == "sat on" + plain[0]["message"]["content"]
    assert second["message"] == plain[1]["message"]


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_tool_calls_without_content(server, content):
    template = "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{{ m.tool_calls | length }};{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", **content, "tool_calls": [call]}, {"role": "tool", "content": "seen"}]
    asked = {"messages": messages, "chat_template": template}
    assert chat(server, **asked, return_token_ids=True)["choices"][0]["finish_reason"] == "length"
    expected = server.post("/tokenize", prompt="u:the cat0;a:1;t:seen0;", add_special_tokens=False)
    assert server.post("/tokenize", **asked)["tokens"] == expected["tokens"]


def test_variables_of_the_template(server):
    template = "{{ flavour }}:{{ messages[0].content }}"
    fields = {"chat_template": template, "chat_template_kwargs": {"flavour": "mint"}, "return_token_ids": True}
    answer = chat(server, **fields)
    ids = server.engine.input_processor.tokenizer.encode("mint:the cat", add_special_tokens=False)
    assert answer["prompt_token_ids"] == ids


def test_a_stream_adds_up_to_the_answer(server):
    fields = {
        "n": 2, "seed": 3, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "labels": [" the"],
        "logits_indices": [3], "stream_options": {"include_usage": True},
    }  # fmt: skip
    whole = chat(server, **{**fields, "stream_options": None})
    *chunks, last = server.stream("/v1/chat/completions", messages=MESSAGES, max_tokens=5, **{**GREEDY, **fields})
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["labels"] == whole["labels"]
    for choice in whole["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(part["delta"]["content"] for part in own) == choice["message"]["content"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        content = [entry for part in own for entry in part["logprobs"]["content"]]
        assert [entry["token_id"] for entry in content] == [
            entry["token_id"] for entry in choice["logprobs"]["content"]
        ]
        readings = [entry for part in own for entry in part["readings"]]
        assert [list(entry["ids"]) for entry in readings] == [list(entry["ids"]) for entry in choice["readings"]]
        assert [part.get("logits_values") for part in own[1:]] == [None] * (len(own) - 1)
        values = [entry for part in own for entry in part["logits_values_per_token"]]
        assert len(values) == len(choice["logits_values_per_token"])


def test_errors_name_the_clients_own_fields(server):
    for body, param in (
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 500}, "max_completion_tokens"),
        ({"max_tokens": 500}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"labels": ["two words"]}, "labels"),
    ):
        response = server.request("POST", "/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES, **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert param.partition("[")[0] in error["message"]


def test_a_template_of_a_request_is_a_program_that_not_every_server_runs(server, monkeypatch):
    monkeypatch.setattr(server.state, "args", server_args(trust_request_chat_template=False))
    for url in ("/v1/chat/completions", "/tokenize"):
        body = {"model": "tiny", "messages": MESSAGES, "chat_template": CHAT_TEMPLATE}
        response = server.request("POST", url, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
        assert server.request("POST", url, json={"model": "tiny", "messages": MESSAGES}).status_code == 200
