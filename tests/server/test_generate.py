"""/inference/v1/generate: ids in, ids out, with every reading; the render routes' answers are its requests."""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from asgi import client_of
from byte_tokenizer import VOCAB_SIZE, byte_ids
from tiny_llm import make_tiny_model

from vllm.server.protocol.generate import GenerateResponse

PATH = "/inference/v1/generate"
IDS = byte_ids("a prompt of a few blocks' length, which is cached")


CHAT_TEMPLATE = "{% for m in messages %}>{{ m.content }}{% endfor %}"


def generate(server, **body):
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **body.pop("sampling_params", {})}
    answer = server.post(PATH, token_ids=IDS, sampling_params=params, **body)
    GenerateResponse.model_validate(answer)
    return answer


def stream(server, **body):
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **body.pop("sampling_params", {})}
    chunks = server.stream(PATH, token_ids=IDS, sampling_params=params, **body)
    for chunk in chunks:
        GenerateResponse.model_validate(chunk)
    return chunks


def completion(server, **fields):
    body = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    return server.post("/v1/completions", **body)


def matrix_of(answer):
    return np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])), allow_pickle=False)


def test_the_same_tokens_as_completions(server):
    answer, expected = generate(server, request_id="42"), completion(server)["choices"][0]
    assert (answer["request_id"], answer["output_mode"]) == ("generate-tokens-42", "tokens")
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (expected["token_ids"], "length")
    assert choice["logprobs"] is choice["stop_reason"] is None and "text" not in choice
    assert answer["usage"]["prompt_tokens"] == len(IDS) and answer["usage"]["completion_tokens"] == 6


def test_all_that_fits_without_max_tokens(server):
    answer = generate(server, sampling_params={"max_tokens": None})
    assert len(answer["choices"][0]["token_ids"]) == 128 - len(IDS)


def test_text_and_messages(server):
    expected = completion(server)["choices"][0]["text"]
    text, message = (generate(server, output_mode=mode)["choices"][0] for mode in ("text", "derender"))
    assert text["text"] == message["message"]["content"] == expected
    assert message["message"]["role"] == "assistant"
    streamed = stream(server, output_mode="text")
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == expected
    stop = expected[2:4]
    stopped = generate(server, output_mode="text", sampling_params={"stop": stop})["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == (expected[: expected.index(stop)], stop)


@pytest.mark.parametrize("num_topk", [0, 1, 3])
def test_logprobs_are_by_id(server, num_topk):
    ids = [7, 11]
    answer = generate(server, sampling_params={"logprobs": num_topk, "logprob_token_ids": ids})
    expected = completion(server, logprobs=num_topk, logprob_token_ids=ids)["choices"][0]["readings"]
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == len(expected) == 6
    for entry, other in zip(content, expected, strict=True):
        assert entry["token_id"] == other["token_id"]
        own, *_ = entries = entry["top_logprobs"]
        assert own == {name: entry[name] for name in ("token_id", "logprob", "rank", "logit")}
        found = {each["token_id"]: each for each in entries}
        assert len(found) == len(entries) == len({own["token_id"], *ids, *(e["token_id"] for e in entries)})
        for token_id in ids:
            for name in ("logprob", "rank", "logit"):
                assert found[token_id][name] == other["ids"][str(token_id)][name]
        assert sorted(each["rank"] for each in entries)[: max(num_topk, 1)] == list(range(1, max(num_topk, 1) + 1))


def test_text_mode_shows_tokens(server):
    answer = generate(server, output_mode="text", sampling_params={"logprobs": 2})
    chat = answer["choices"][0]["logprobs"]["content"]
    for entry in chat:
        assert entry["bytes"] is not None and entry["token"] == entry["top_logprobs"][0]["token"]


def test_prompt_readings(server):
    rows = [[33], [44, 100], [55, 55]]
    start = len(IDS) - 4
    params = {
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "prompt_logprob_token_ids": rows,
        "prompt_logprob_start": start,
    }
    answer = generate(server, sampling_params=params, return_token_ids=True)
    matrix = matrix_of(answer)
    assert (matrix.dtype, matrix.shape) == (np.float32, (3, 2))
    assert np.isneginf(matrix).tolist() == [[False, True], [False, False], [False, False]]
    for row, position in zip(rows, range(start + 1, len(IDS)), strict=True):
        for token_id, value in zip(row, matrix[position - start - 1], strict=False):
            assert answer["prompt_logprobs"][position][str(token_id)]["logprob"] == value
    assert answer["prompt_token_ids"] == IDS
    first, *later = stream(server, sampling_params={**params, "max_tokens": 3})
    np.testing.assert_array_equal(matrix_of(first), matrix)
    assert len(later) == 2 and all("prompt_token_id_logprobs" not in chunk for chunk in later)
    alone = generate(server, sampling_params={**params, "prompt_logprobs": None})
    assert "prompt_logprobs" not in alone
    np.testing.assert_array_equal(matrix_of(alone), matrix)


def test_the_next_position_without_generating(server):
    answer = generate(server, sampling_params={"max_tokens": 0, "logprob_token_ids": [9]})
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["token_id"] is entry["logprob"] is None
    assert [each["token_id"] for each in entry["top_logprobs"]] == [9]


def test_streams(server):
    whole = generate(server, sampling_params={"logprobs": 1})["choices"][0]
    *chunks, last = stream(
        server, sampling_params={"logprobs": 1}, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token_id for part in parts for token_id in part["token_ids"]] == whole["token_ids"]
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [part["finish_reason"] for part in parts] == [None] * 5 + ["length"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6


def test_several_choices(server):
    params = {"n": 3, "temperature": 1.0, "seed": 1}
    choices = generate(server, sampling_params=params)["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2]
    tokens = {index: [] for index in range(3)}
    for chunk in stream(server, sampling_params=params):
        for choice in chunk["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    assert list(tokens.values()) == [each["token_ids"] for each in choices]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "logprobs": 1, "stop": ["q"], "prompt_logprob_token_ids": [[5], [6]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "logprob_token_ids": [5]}),
    ],
)
def test_render_then_generate(server, path, body):
    body = {**body, "max_tokens": 5, "temperature": 0.9, "seed": 3, "ignore_eos": True, "cache_salt": "s"}
    rendered = server.post(f"{path}/render", **body)
    if isinstance(rendered, list):
        (rendered,) = rendered
    answer = server.post(PATH, **{**rendered, "model": "tiny"})
    expected = server.post(path, **body, return_token_ids=True)["choices"][0]
    assert answer["choices"][0]["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"token_ids": []}, "token_ids", "cannot be empty"),
        ({"token_ids": None}, "token_ids", "must be a valid list"),
        ({"token_ids": ["a"]}, "token_ids", "must hold integers"),
        ({"token_ids": [VOCAB_SIZE]}, "token_ids", "out of vocabulary"),
        ({"token_ids": [1] * 200}, "token_ids", "more than the context"),
        ({"sampling_params": None}, "sampling_params", "sampling_params"),
        ({"sampling_params": {"temperatur": 1}}, "sampling_params.temperatur", "did you mean"),
        ({"sampling_params": {"repeat_penalty": 1}}, "sampling_params.repeat_penalty", "did you mean"),
        ({"sampling_params": {"num_ctx": 1}}, "sampling_params.num_ctx", "--ignore-unknown-fields"),
        ({"sampling_params": {"temperature": -1}}, "temperature", "temperature must be in"),
        ({"sampling_params": {"temperature": "1"}}, "sampling_params.temperature", "temperature must be"),
        ({"sampling_params": {"max_tokens": 100}}, "max_tokens", "more than the context"),
        ({"sampling_params": {"max_tokens": None, "min_tokens": 2**31}}, "min_tokens", "min_tokens must be at most"),
        ({"sampling_params": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "does not compile"),
        ({"sampling_params": {"stop": ["a"], "detokenize": False}}, "stop", "stop strings"),
        ({"sampling_params": {"prompt_logprob_token_ids": [[1]]}}, "prompt_logprob_token_ids", "scored rows"),
        ({"sampling_params": {"prompt_logprob_token_ids": [[-2]]}}, "prompt_logprob_token_ids", "or -1"),
        ({"output_mode": "bogus"}, "output_mode", "output_mode"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "detokenize", "detokenize"),
        ({"output_mode": "derender", "stream": True}, "stream", "stream"),
        ({"features": {"mm_hashes": {}}}, "features", "token ids"),
        ({"model": "other"}, "model", "no model"),
    ],
)
def test_bad_bodies(server, body, param, says):
    good = {"model": "tiny", "token_ids": IDS, "sampling_params": {"max_tokens": 1}}
    response = server.request("POST", PATH, json={**good, **body})
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert says in error["message"]
    assert error["param"].removesuffix(f"[{0}]") == param


def test_without_a_tokenizer(serve, tmp_path):
    folder = make_tiny_model(tmp_path)
    server = serve({"skip_tokenizer_init": True}, folder)
    assert generate(server, sampling_params={"logprobs": 1})["choices"][0]["token_ids"]
    for body, says in (
        ({"output_mode": "text"}, "requires a tokenizer"),
        ({"sampling_params": {"stop": "a"}}, "stop strings need"),
    ):
        response = server.request("POST", PATH, json={"token_ids": IDS, "sampling_params": {}, **body})
        assert response.status_code == 400 and says in response.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_requests_are_cut_short_by_their_ids(server, mode):
    params = {"max_tokens": 70, "ignore_eos": True, "temperature": 0, "n": 1}
    body = {"token_ids": IDS, "output_mode": mode, "sampling_params": params, "request_id": f"cut-{mode}"}
    abort = "/inference/v1/abort_requests"

    async def run():
        async with client_of(server.engine) as client:
            whole = asyncio.create_task(client.post(PATH, json=body))
            while not (processor := server.engine.replicas[0].output_processor).has_unfinished_requests():
                await asyncio.sleep(0.001)
            answers = [
                await client.post(abort, json={"request_ids": ["nobody", f"generate-tokens-cut-{mode}"]}),
                await client.post(abort, json={}),
                await client.post(abort, json={"request_ids": "a"}),
                await client.post(abort, json={"request_ids": [7]}),
            ]
            return await whole, answers, processor.has_unfinished_requests()

    answer, (done, *refused), is_busy = server.run(run())
    assert (done.status_code, done.json()) == (200, {})
    assert [each.status_code for each in refused] == [400] * 3
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) < 70
    assert ("text" in choice) == (mode == "text")
    assert not is_busy


def test_given_continuations_repetitions_and_intervals(server):
    trace = byte_ids("what follows")
    answer = generate(server, sampling_params={"trace_decode_token_ids": trace, "logprobs": 0})
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [entry["token_id"] for entry in choice["logprobs"]["content"]] == trace
    prompt = completion(server, prompt=IDS + trace, max_tokens=0, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    for entry, token_id, position in zip(choice["logprobs"]["content"], trace, prompt[len(IDS) :], strict=True):
        assert entry["logprob"] == pytest.approx(position[str(token_id)]["logprob"], abs=1e-5)
    looping = {"logit_bias": {"70": 100}, "repetition_detection": {"max_pattern_size": 1, "min_count": 3}}
    (ended,) = generate(server, sampling_params=looping)["choices"]
    assert (ended["token_ids"], ended["finish_reason"]) == ([70] * 3, "repetition")
    assert completion(server, **looping)["choices"][0]["finish_reason"] == "repetition"
    chunks = stream(server, sampling_params={"trace_decode_token_ids": trace, "stream_interval": 4})
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 4, 4, 3]
    texts = server.stream("/v1/completions", prompt=IDS, max_tokens=9, ignore_eos=True, stream_interval=4, logprobs=1)
    assert [len(chunk["choices"][0]["logprobs"]["token_ids"]) for chunk in texts] == [1, 4, 4]


def test_times_of_a_request(server, monkeypatch):
    fields = {"max_tokens": 5, "ignore_eos": True, "stream_options": {"include_usage": True}}
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    assert "metrics" not in generate(server) and "metrics" not in completion(server)
    monkeypatch.setattr(server.state, "args", replace(server.state.args, enable_per_request_metrics=True))
    whole = [generate(server), completion(server), server.post("/v1/chat/completions", **chat, max_tokens=5)]
    last = [
        stream(server, stream_options=fields["stream_options"])[-1],
        server.stream("/v1/completions", prompt=IDS, **fields)[-1],
        server.stream("/v1/chat/completions", **chat, **fields)[-1],
    ]
    for answer in whole + last:
        times = answer["metrics"]
        assert all(value is None or value >= 0 for value in times.values())
        count = answer["usage"]["completion_tokens"]
        spent = times["time_to_first_token_ms"] + times["generation_time_ms"]
        assert times["tokens_per_second"] == pytest.approx(1000 * count / spent)
        if count > 1:
            assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / (count - 1))
    fields["max_tokens"] = 1
    single = server.stream("/v1/completions", prompt=IDS, **fields)[-1]["metrics"]
    assert "mean_itl_ms" not in single and single["generation_time_ms"] >= 0
    several = generate(server, sampling_params={"n": 2, "temperature": 1.0})
    assert several["metrics"] is completion(server, prompt=["a", "b"])["metrics"] is None


def test_without_ranks(server):
    asked = {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 2}
    whole = generate(server, sampling_params=asked)
    for name in ("prompt_ranks", "logprob_ranks"):
        answer = generate(server, sampling_params={**asked, name: False})
        for one, other in zip(positions_of(answer), positions_of(whole), strict=True):
            assert [{**entry, "rank": None} for entry in other] == one
            assert all(entry["rank"] for entry in other)
    contradiction = {"prompt_ranks": True, "logprob_ranks": False}
    response = server.request("POST", PATH, json={"token_ids": IDS, "sampling_params": contradiction})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt_ranks") and "contradicts" in error["message"]


def positions_of(answer):
    """Every position's entries, those of prompt and generated ones alike."""
    content = answer["choices"][0]["logprobs"]["content"]
    generated = [entry for entry in content for entry in (entry, *entry["top_logprobs"])]
    heads = [{name: value for name, value in entry.items() if name != "top_logprobs"} for entry in generated]
    prompt = [list(position.values()) for position in answer["prompt_logprobs"] if position]
    return [heads, *prompt]
