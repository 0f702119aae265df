"""/v1/completions: the same tokens and readings as offline, in OpenAI's shapes, whole and streamed."""

from __future__ import annotations

import math

import pytest
from byte_tokenizer import byte_ids
from tiny_llm import make_tiny_llm

from vllm import SamplingParams

PROMPT = "the cat sat"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder, max_logprob_token_ids=-1)


def complete(server, **body):
    return server.post("/v1/completions", **{"prompt": PROMPT, "max_tokens": 5, **GREEDY, **body})


def offline(llm, prompt=PROMPT, **params):
    (output,) = llm.generate([prompt], SamplingParams(**{"max_tokens": 5, **GREEDY, **params}), use_tqdm=False)
    return output


def test_sixteen_tokens_when_nothing_is_said(server):
    assert complete(server, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_max_tokens_that_are_left_out_are_cut_to_the_room(server):
    answer = complete(server, prompt=byte_ids("x" * 120), max_tokens=None)
    assert answer["usage"]["completion_tokens"] == 8


def test_every_form_of_prompt(server, llm):
    ids = llm.llm_engine.tokenizer.encode(PROMPT)
    other = byte_ids("dog")
    one = complete(server)["choices"][0]["text"]
    two = complete(server, prompt=other)["choices"][0]["text"]
    assert complete(server, prompt=ids)["choices"][0]["text"] == one
    for prompts in ([PROMPT, "dog"], [ids, other]):
        answer = complete(server, prompt=prompts)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["text"] == one
    assert answer["choices"][1]["text"] == two


def test_samples_with_seeds_are_those_of_offline(server, llm):
    fields = {"n": 3, "seed": 7, "temperature": 1.0}
    answer = complete(server, prompt=[PROMPT, "dog"], **fields)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [output.text for prompt in (PROMPT, "dog") for output in offline(llm, prompt, **fields).outputs]
    assert [choice["text"] for choice in answer["choices"]] == texts


def test_logprobs_and_ids_together(server, llm):
    ids = [40, 5, 200]
    (choice,) = complete(server, logprobs=3, logprob_token_ids=ids)["choices"]
    expected = offline(llm, logprobs=3, logprob_token_ids=ids).outputs[0]
    logprobs = choice["logprobs"]
    assert logprobs["token_ids"] == list(expected.token_ids)
    for index, position in enumerate(expected.logprobs):
        entries = list(position.values())
        assert logprobs["token_logprobs"][index] == pytest.approx(entries[0].logprob, abs=1e-5)
        assert logprobs["ranks"][index] == entries[0].rank
        top = list(logprobs["top_logprobs"][index].values())
        assert top == pytest.approx([entry.logprob for entry in entries], abs=1e-5)
        reading = choice["readings"][index]
        assert reading["token_id"] == expected.token_ids[index]
        assert list(reading["ids"]) == list(map(str, ids))
        softmax = position.softmax(ids)
        for token_id in ids:
            entry = reading["ids"][str(token_id)]
            assert entry["rank"] == position[token_id].rank
            assert entry["logit"] == pytest.approx(position[token_id].logit, abs=1e-5)
            assert entry["logprob"] == pytest.approx(position[token_id].logprob, abs=1e-5)
            assert entry["token"] == position[token_id].decoded_token
            assert entry["probability"] == pytest.approx(softmax[token_id], abs=1e-6)
        assert reading["mass"] == pytest.approx(position.mass(ids), abs=1e-6)
        assert reading["lse"] == pytest.approx(position.lse, abs=1e-5)
        assert reading["entropy"] is None


def test_ids_without_logprobs(server):
    (choice,) = complete(server, logprob_token_ids=[40])["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["readings"]) == 5


def test_entropy(server, llm):
    (choice,) = complete(server, logprob_token_ids=[40], logprob_entropy=True)["choices"]
    expected = offline(llm, logprob_token_ids=[40], logprob_entropy=True).outputs[0].logprobs
    assert [each["entropy"] for each in choice["readings"]] == pytest.approx(
        [position.entropy for position in expected], abs=1e-5
    )


def test_modes(server, llm):
    fields = {"logprob_token_ids": [40, 41], "logit_bias": {"40": 3.0}, "temperature": 0.5, "seed": 1}
    for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
        (choice,) = complete(server, logprobs_mode=mode, **fields)["choices"]
        options = {**fields, "logit_bias": {40: 3.0}}
        expected = offline(llm, logprobs_mode=mode, **options).outputs[0]
        assert choice["logprobs"]["token_ids"] == list(expected.token_ids)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            [next(iter(position.values())).logprob for position in expected.logprobs], abs=1e-5
        )
        first = choice["readings"][0]["ids"]["40"]
        entry = expected.logprobs[0][40]
        assert first["logit"] == pytest.approx(entry.logit, abs=1e-5)
        assert first["logprob"] == pytest.approx(entry.logit - expected.logprobs[0].lse, abs=1e-5)


def test_a_token_ruled_out_is_null_in_readings_and_openais_number_in_logprobs(server):
    (choice,) = complete(
        server, allowed_token_ids=[40, 41], logprobs=3, logprob_token_ids=[40, 50], logprobs_mode="processed_logprobs"
    )["choices"]
    entry = choice["readings"][0]["ids"]["50"]
    assert (entry["logprob"], entry["logit"], entry["probability"]) == (None, None, 0.0)
    assert -9999.0 in choice["logprobs"]["top_logprobs"][0].values()


def test_labels(server, llm):
    tokenizer = llm.llm_engine.tokenizer
    answer = complete(server, labels=[" the", "stop"], max_tokens=1)
    ids = [tokenizer.encode(label, add_special_tokens=False)[0] for label in (" the", "stop")]
    assert answer["labels"] == [{"label": " the", "token_id": ids[0]}, {"label": "stop", "token_id": ids[1]}]
    (reading,) = answer["choices"][0]["readings"]
    assert [entry["label"] for entry in reading["ids"].values()] == [" the", "stop"]
    assert math.fsum(entry["probability"] for entry in reading["ids"].values()) == pytest.approx(1)


def test_logits_by_index(server, llm):
    indices = [9, 3]
    (choice,) = complete(server, logits_indices=indices)["choices"]
    expected = offline(llm, logprob_token_ids=indices).outputs[0].logprobs.select(indices).logits
    values = [list(each.values()) for each in choice["logits_values_per_token"]]
    assert [list(each) for each in choice["logits_values_per_token"]] == [["9", "3"]] * 5
    assert values == [pytest.approx(row.tolist(), abs=1e-5) for row in expected]
    assert choice["logits_values"] == choice["logits_values_per_token"][0]
    assert "readings" not in choice


def test_no_token_at_all(server, llm):
    answer = complete(server, max_tokens=0, logprob_token_ids=[40, 41], logprobs=2)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"], answer["usage"]["completion_tokens"]) == ("", [], 0)
    (reading,) = choice["readings"]
    (position,) = offline(llm, max_tokens=0, logprob_token_ids=[40, 41], logprobs=2).outputs[0].logprobs
    assert reading["token_id"] is None
    assert {int(key): entry["rank"] for key, entry in reading["ids"].items()} == {
        token_id: entry.rank for token_id, entry in position.items()
    }


def test_a_prompt_as_long_as_the_context_can_be_scored(server):
    ids = byte_ids("x" * 128)
    (choice,) = complete(server, prompt=ids, max_tokens=0, logprob_token_ids=[40], echo=True, logprobs=0)["choices"]
    assert len(choice["logprobs"]["tokens"]) == 128
    assert len(choice["readings"]) == 1


def test_prompt_readings(server, llm):
    fields = {"prompt_logprobs": 1, "prompt_logprob_token_ids": [40], "max_tokens": 1}
    (choice,) = complete(server, **fields)["choices"]
    expected = offline(llm, **fields).prompt_logprobs
    assert choice["prompt_logprobs"][0] is None
    for shown, position in zip(choice["prompt_logprobs"][1:], expected[1:], strict=True):
        assert list(shown) == list(map(str, position))
        for token_id, entry in position.items():
            assert shown[str(token_id)]["rank"] == entry.rank
            assert shown[str(token_id)]["logprob"] == pytest.approx(entry.logprob, abs=1e-5)
            assert shown[str(token_id)]["decoded_token"] == entry.decoded_token


def test_token_ids_in_place_of_texts(server):
    fields = {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = complete(server, **fields)["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    assert all(key.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for key in top)
    assert choice["prompt_token_ids"] == complete(server, return_token_ids=True)["choices"][0]["prompt_token_ids"]


def test_a_stream_adds_up_to_the_answer(server):
    fields = {
        "logprobs": 2, "logprob_token_ids": [40, 300 - 60], "labels": [" the"], "logits_indices": [7], "n": 2,
        "seed": 3, "temperature": 1.0, "echo": True, "return_token_ids": True, "prompt_logprobs": 2, "stop": "zq",
    }  # fmt: skip
    prompts = [PROMPT, "dog"]
    whole = complete(server, prompt=prompts, **fields)
    body = {"prompt": prompts, "max_tokens": 5, **GREEDY, **fields, "stream_options": {"include_usage": True}}
    *chunks, last = server.stream("/v1/completions", **body)
    # The prompt that was computed first stands in the cache by now.
    del whole["usage"]["prompt_tokens_details"], last["usage"]["prompt_tokens_details"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert chunks[0]["labels"] == whole["labels"]
    assert all(chunk["usage"] is None for chunk in chunks)
    joined = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        choice = joined.setdefault(part["index"], None)
        joined[part["index"]] = part if choice is None else _join(choice, part)
    assert [joined[index] for index in sorted(joined)] == [_approx(choice) for choice in whole["choices"]]


def _join(choice, part):
    for name, value in part.items():
        if name == "logprobs":
            for key, values in value.items():
                choice[name][key] += values
        elif name in ("text", "token_ids", "readings", "logits_values_per_token"):
            choice[name] += value
        elif name in ("finish_reason", "stop_reason"):
            choice[name] = value
        else:
            assert name == "index", f"{name} came twice"
    return choice


def _approx(value):
    """Numbers up to what another batch's rounding makes of them."""
    if isinstance(value, dict):
        return {key: _approx(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_approx(each) for each in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def test_continuous_usage(server):
    body = {"prompt": PROMPT, "max_tokens": 3, **GREEDY}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream("/v1/completions", **body, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    alone = server.stream("/v1/completions", **body, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in alone), "include_usage decides"


def test_an_error_before_the_stream_is_plain_json(server):
    response = server.request("POST", "/v1/completions", json={"model": "tiny", "prompt": "", "stream": True})
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")


def test_the_request_id_is_a_part_of_the_answers(server):
    assert complete(server, request_id="mine")["id"] == "cmpl-mine"


def test_cached_tokens_are_told_in_steps_of_16(server):
    """Or one could guess what others have sent, token by token."""
    prompt = byte_ids("told in steps, whatever the cache has of it")

    def cached(prompt):
        return complete(server, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert len(prompt) == 43 and cached(prompt) == 0
    assert [cached([*prompt[:length], 3, 3]) for length in (15, 16, 31, 32, 42)] == [0, 16, 16, 32, 32]


def test_salts_keep_cached_prefixes_apart(server):
    prompt = byte_ids("salted " * 9)

    def cached(salt):
        return complete(server, prompt=prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached("a"), cached("b")) == (0, 0)
    assert cached("a") > 0
