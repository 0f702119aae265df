"""Contradicting constraints, several greedy answers, and small temperatures over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from byte_tokenizer import EOS, byte_ids
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

A, B = byte_ids("ab")
PROMPT = "the cat"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "chat_template": "{{ messages[0].content }}"}
PLACES: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": CHAT}
EACH = pytest.mark.parametrize("path", PLACES)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_tiny_llm(folder)


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


CONTRADICTIONS = [
    ({"allowed_token_ids": [A], "bad_words": ["a"]}, "bad_words"),
    ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens"),
    ({"allowed_token_ids": [A, EOS], "bad_words": ["a"], "min_tokens": 1}, "allowed_token_ids, bad_words and"),
]


@EACH
@pytest.mark.parametrize(("fields", "says"), CONTRADICTIONS)
@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1}, {"stream": True}, {"use_beam_search": True}], ids=str)
def test_what_contradicts_itself_is_refused(server, path, fields, says, more):
    body = {"model": "tiny", "max_tokens": 4, **PLACES[path], **fields, **more}
    response = server.request("POST", path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "allowed_token_ids", "invalid_value")
    assert "allowed_token_ids" in error["message"] and says in error["message"]


def test_by_token_ids_too(server):
    sampling = {"max_tokens": 4, "allowed_token_ids": [EOS], "min_tokens": 1}
    body = {"token_ids": [A, B], "sampling_params": sampling}
    assert server.request("POST", "/inference/v1/generate", json=body).status_code == 400
    later = {"max_tokens": 4, "allowed_token_ids": [A], "bad_words": ["aa"]}
    (choice,) = server.post("/inference/v1/generate", token_ids=[A, B], sampling_params=later)["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([A], "error", "no_token_left")


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_only_what_is_drawn_or_read_counts(server, mode):
    """With max_tokens=0 the next position is read; its own reading is there, a processed one is not."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "logprob_token_ids": [A, B], "logprobs_mode": mode}
    response = server.request("POST", "/v1/completions", json={**body, "allowed_token_ids": [A], "bad_words": ["a"]})
    if mode == "processed_logprobs":
        assert (response.status_code, response.json()["error"]["param"]) == (400, "allowed_token_ids")
        return
    (choice,), (plain,) = response.json()["choices"], server.post("/v1/completions", **body)["choices"]
    assert choice["readings"] == plain["readings"] and len(choice["readings"][0]["ids"]) == 2


LATER = {"allowed_token_ids": [A], "bad_words": ["aaa"], "max_tokens": 6, "temperature": 0}


@EACH
def test_what_shows_later_ends_a_choice(server, path):
    for fields in ({}, {"n": 2}, {"n": 2, "temperature": 1}):
        choices = server.post(path, **PLACES[path], **LATER | fields)["choices"]
        assert len(choices) == fields.get("n", 1)
        for choice in choices:
            assert text_of(choice) == "aa"
            assert (choice["finish_reason"], choice["stop_reason"]) == ("error", "no_token_left")
    chunks = server.stream(path, **PLACES[path], **LATER)
    assert chunks[-1]["choices"][0]["finish_reason"] == "error"
    assert chunks[-1]["choices"][0]["stop_reason"] == "no_token_left"


def test_prompts_beside_it_go_on(server):
    """A bad word ends the first prompt's choice alone: the other one may end before it is complete."""
    fields = {"allowed_token_ids": [A, B], "bad_words": ["aa", "ab"], "max_tokens": 4, "ignore_eos": True}
    bias = {"logit_bias": {str(B): 50}}
    both = server.post("/v1/completions", prompt=[PROMPT, "b"], temperature=0, **fields, **bias)["choices"]
    assert [(text_of(each), each["finish_reason"]) for each in both] == [("bbbb", "length")] * 2
    ended = server.post("/v1/completions", prompt=[PROMPT, "b"], temperature=1, n=8, seed=1, **fields)["choices"]
    reasons = {each["finish_reason"] for each in ended}
    assert len(ended) == 16 and reasons == {"error", "length"}
    for each in ended:
        text = text_of(each)
        assert text == "b" * 4 or (each["finish_reason"] == "error") == (len(text) < 4 and text.endswith("a"))


def test_a_beam_search_that_finds_nothing(server):
    body = {"prompt": [PROMPT, "b"], "use_beam_search": True, "n": 2, **LATER}
    choices = server.post("/v1/completions", **body)["choices"]
    assert [(each["finish_reason"], each["stop_reason"]) for each in choices] == [("error", "no_token_left")] * 2


@EACH
def test_greedy_answers_are_equal(server, path):
    fields = {**PLACES[path], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    single = server.post(path, **fields)
    several = server.post(path, n=3, **fields)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert {text_of(choice) for choice in several["choices"]} == {text_of(single["choices"][0])}
    assert several["usage"]["completion_tokens"] == 15
    assert several["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    best = server.post(path, n=2, best_of=4, **fields)
    assert [choice["token_ids"] for choice in best["choices"]] == [single["choices"][0]["token_ids"]] * 2
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for chunk in server.stream(path, n=2, **fields):
        for choice in chunk["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    assert list(tokens.values()) == [single["choices"][0]["token_ids"]] * 2


@EACH
def test_small_temperatures_are_one(server, path):
    fields = {**PLACES[path], "max_tokens": 4, "n": 2, "seed": 5, "logprob_token_ids": [A, B]}
    answers = [
        server.post(path, temperature=t, logprobs_mode="processed_logprobs", **fields)["choices"]
        for t in (1e-7, 1e-5, 0.009, 0.01)
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3]


@EACH
@pytest.mark.parametrize(
    "own",
    [
        {"allowed_token_ids": byte_ids("bcdf")},
        {"allowed_token_ids": byte_ids("bcdf"), "bad_words": ["bb", "cc", "dd", "ff"], "min_tokens": 3},
        {"logit_bias": {"5": -100, "40": 3.5}, "min_tokens": 2},
    ],
    ids=str,
)
def test_beams_with_constraints_are_those_of_offline(server, llm, path, own):
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 4}
    choices = server.post(path, **PLACES[path], **fields, **own, return_token_ids=True)["choices"]
    (wanted,) = llm.generate([PROMPT], SamplingParams(temperature=0, **fields, **own), use_tqdm=False)
    assert [choice["token_ids"] for choice in choices] == [each.token_ids for each in wanted.outputs]
    (free,) = llm.generate([PROMPT], SamplingParams(temperature=0, **fields), use_tqdm=False)
    assert [each.token_ids for each in free.outputs] != [each.token_ids for each in wanted.outputs]
    assert not any(word in text_of(choice) for choice in choices for word in own.get("bad_words", []))


BAD = {"type": "strng"}
NAMED_FORMS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}}, "response_format"),
    ({"guided_json": BAD}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "start: ("}, "guided_grammar"),
    ({"structured_outputs": {"json": BAD}}, "structured_outputs"),
]


@pytest.mark.parametrize(("form", "name"), NAMED_FORMS, ids=[name for _, name in NAMED_FORMS])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_form_that_does_not_compile_is_named_as_its_field(server, path, form, name):
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    template = {} if "prompt" in asked else {"chat_template": "{{ messages[0].content }}"}
    answer = server.request("POST", path, json={"model": "tiny", **asked, **template, **form})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name) and name in error["message"]


def test_so_it_is_over_the_other_doors(server):
    template = {"chat_template": "{{ messages[0].content }}"}
    form = {"type": "json_schema", "name": "a", "schema": BAD}
    body = {"model": "tiny", "input": "a", "text": {"format": form}, **template}
    assert server.request("POST", "/v1/responses", json=body).json()["error"]["param"] == "text.format"
