"""POST /v1/decisions gives transformers' numbers in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import AppThread, Serve
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from decision_reference import assert_answer
from models_util import make_random_model

URL = "/v1/decisions"
INPUT = "The package arrived with a broken screen."
PREDICATE = {"type": "predicate", "name": "damaged", "instructions": "Does the customer report damage?"}
CHOICE = {
    "type": "choice",
    "instructions": "Which department?",
    "choices": [{"value": "returns", "description": "goods that come back"}, {"value": True}, {"value": "true"}],
}
SCORE = {
    "type": "score",
    "name": "damage",
    "instructions": "How severe is it?",
    "levels": [{"label": "none"}, {"label": "cosmetic"}, {"label": "broken"}],
}
QUESTIONS = [PREDICATE, CHOICE, SCORE]


@pytest.fixture(scope="module")
def folder_and_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    _, model = make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    make_byte_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def model(folder_and_model):
    return folder_and_model[1]


@pytest.fixture(scope="module")
def server(serve: Serve, folder_and_model: Any) -> AppThread:
    return serve({"max_model_len": 512}, folder_and_model[0])


def ask(server, **body):
    return server.post(URL, **{"input": INPUT, "questions": QUESTIONS, **body})


def refused(server, **body):
    response = server.request("POST", URL, json={"model": "tiny", "input": INPUT, "questions": QUESTIONS, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("read", ["labels", "values"])
@pytest.mark.parametrize("permutations", [1, 3])
def test_the_numbers_are_those_of_transformers(server, model, read, permutations):
    answer = ask(server, read=read, permutations=permutations, diagnostics=True, return_token_ids=True)
    assert [each["type"] for each in answer["answers"]] == ["predicate", "choice", "score"]
    for question, own in zip(QUESTIONS, answer["answers"], strict=True):
        assert_answer(model, question, own)


def test_the_answer_has_openais_fields_and_no_others(server):
    answer = ask(server)
    assert set(answer) == {"model", "answers", "usage"}
    predicate, choice, score = answer["answers"]
    assert set(predicate) == {"type", "name", "probability"} and predicate["name"] == "damaged"
    assert set(choice) == {"type", "name", "choice", "probabilities", "confidence"} and choice["name"] is None
    assert set(choice["probabilities"][0]) == {"value", "probability"}
    assert set(score) == {"type", "name", "score", "probabilities", "confidence"}
    assert set(score["probabilities"][0]) == {"value", "label", "probability"}
    usage = answer["usage"]
    assert usage["output_tokens"] == 3 and usage["total_tokens"] == usage["input_tokens"] + 3
    details = usage["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == usage["input_tokens"]


def test_a_small_label_mass_is_a_refusal(server):
    answer = ask(server, min_label_mass=1.0)
    assert answer["answers"] == [{"type": "refusal", "name": each.get("name")} for each in QUESTIONS]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"questions": []}, "questions", "at least 1"),
        ({"questions": [PREDICATE] * 201}, "questions", "at most 200"),
        ({"questions": [{**CHOICE, "choices": CHOICE["choices"][:1]}]}, "questions[0].choices", "at least 2"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": str(index)} for index in range(256)]}]},
            "questions[0].choices",
            "at most 255",
        ),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices", "same value 'a'"),
        ({"questions": [{**PREDICATE, "name": ""}]}, "questions[0].name", "must not be empty"),
        ({"questions": [{**PREDICATE, "name": None}]}, "questions[0].name", "name must be a string"),
        ({"questions": [PREDICATE, {**SCORE, "instructions": "x" * 600}]}, "questions", "questions[1] ('damage')"),
        ({"input": "x" * 600}, "questions", "questions[0] ('damaged')"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content",
            "reads text only",
        ),
        ({"permutations": 65}, "permutations", "64"),
        ({"min_label_mass": 1.5}, "min_label_mass", "1"),
        ({"calibration": {"temperature": 0}}, "calibration.temperature", "(0, 1000]"),
        ({"read": "logits"}, "read", "labels"),
        ({"stream": True}, "stream", "stream"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(server, fields, param, says):
    error = refused(server, **fields)
    assert error["param"] == param and says in error["message"]
