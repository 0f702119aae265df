"""POST /v1/systemone is /v1/decisions in the older shape."""

from __future__ import annotations

import pytest
from asgi import AppThread, Serve

URL = "/v1/systemone"
STATE = {"ticket": "My card was charged twice. Fran\u00e7ais"}
TEAM = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": "money", "shipping": None}}
URGENT = {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "money is moving"}}
TONE = {"type": "score", "criteria": ["calm", "annoyed", "furious"]}
QUESTIONS = {"team": TEAM, "urgent": URGENT, "tone": TONE}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve({"max_model_len": 1024})


def test_the_answers_are_those_of_decisions(server):
    answer = server.post(URL, state=STATE, questions=QUESTIONS)
    assert answer["object"] == "structured_decision" and answer["id"].startswith("decision-")
    assert list(answer["answers"]) == list(answer["diagnostics"]) == list(QUESTIONS)
    same = server.post(
        "/v1/decisions",
        input='{"ticket":"My card was charged twice. Fran\u00e7ais"}',
        diagnostics=True,
        questions=[
            {
                "type": "choice",
                "instructions": "Which team?",
                "choices": [{"value": "billing", "description": "money"}, {"value": "shipping"}],
            },
            {"type": "score", "instructions": "", "levels": [{"label": each} for each in TONE["criteria"]]},
        ],
    )["answers"]
    team, urgent, tone = (answer["answers"][name] for name in QUESTIONS)
    assert team["probabilities"] == {each["value"]: each["probability"] for each in same[0]["probabilities"]}
    assert (team["choice"], team["confidence"]) == (same[0]["choice"], same[0]["confidence"])
    assert tone["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"}
    assert tone["score"] == same[1]["score"] and list(tone["probabilities"]) == ["0", "1", "2"]
    assert answer["diagnostics"]["team"]["label_mass"] == same[0]["diagnostics"]["label_mass"]
    assert urgent["noul"] == urgent["probabilities"]["yes"] and sum(urgent["probabilities"].values()) == pytest.approx(
        1
    )
    mass = answer["diagnostics"]["urgent"]["label_mass"]
    assert urgent["confidence"] == pytest.approx(max(urgent["probabilities"].values()) * mass)
    assert answer["usage"]["output_tokens"] == 3


def test_one_option_is_as_sure_as_its_label(server):
    answer = server.post(URL, state="x", questions={"q": {"type": "choice", "criteria": {"only": None}}})
    assert answer["answers"]["q"]["probabilities"] == {"only": 1.0}
    assert answer["answers"]["q"]["confidence"] == answer["diagnostics"]["q"]["label_mass"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"questions": {"q": {**TEAM, "depends_on": ["x"]}}}, "questions", "unknown field(s) depends_on"),
        ({"questions": {}}, "questions", "at least 1"),
        ({"questions": {f"q{index}": TEAM for index in range(65)}}, "questions", "at most 64"),
        ({"questions": {"": TEAM}}, "questions", "non-empty"),
        ({"questions": {"q": {"type": "nope"}}}, "questions.q.type", "unknown question type"),
        ({"questions": {"q": {"type": "noul", "criteria": ["yes"]}}}, "questions.q.criteria", "must be an object"),
        ({"questions": {"q": {"type": "score", "criteria": ["calm"]}}}, "questions.q.criteria", "ordered list of"),
        (
            {"questions": {"q": {**TEAM, "criteria": dict.fromkeys(map(str, range(27)))}}},
            "questions.q.criteria",
            "at most 26 options",
        ),
        ({"joint": True}, "joint", "diffusion"),
        ({"user": "me"}, "user", "unknown field"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "thinking must be off"),
        ({"images": ["data:,"]}, "images", "cannot see images"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(server, fields, param, says):
    body = {"model": "tiny", "state": STATE, "questions": QUESTIONS, **fields}
    response = server.request("POST", URL, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and says in error["message"]
