"""Known answers, tables and diagrams of `vllm decide`, without a model."""

from __future__ import annotations

import pytest

from vllm.decisions.evaluation import evaluate
from vllm.decisions.questions import parse_questions
from vllm.exceptions import CliError
from vllm.scoring.decide.gold import gold_columns, option_index
from vllm.scoring.decide.records import QuestionSet
from vllm.scoring.decide.report import draw_reliability, format_answers

PREDICATE = {"type": "predicate", "instructions": "?"}
CHOICE = {"type": "choice", "name": "c", "instructions": "?", "choices": [{"value": "1"}, {"value": True}]}
SCORE = {"type": "score", "name": "s", "instructions": "?", "levels": [{"label": "1"}, {"label": "0"}, {"label": "x"}]}


def question(given):
    return parse_questions([given])[0]


@pytest.mark.parametrize(
    ("given", "value", "index"),
    [
        (PREDICATE, True, 0),
        (PREDICATE, "False", 1),
        (PREDICATE, " YES ", 0),
        (PREDICATE, 0, 1),
        (PREDICATE, "maybe", None),
        (CHOICE, 1, 0),
        (CHOICE, "1", 0),
        (CHOICE, True, 1),
        (CHOICE, "true", 1),
        (CHOICE, "2", None),
        (SCORE, "1", 0),  # a label goes before an index
        (SCORE, 0, 1),
        (SCORE, 2, 2),
        (SCORE, "x", 2),
        (SCORE, 3, None),
    ],
)
def test_the_option_that_a_known_answer_names(given, value, index):
    assert option_index(question(given), value) == index


def question_set(*given):
    return QuestionSet(list(given), parse_questions(list(given)))


def test_columns_of_known_answers():
    assert gold_columns(["a=b"], question_set(PREDICATE)) == {0: "a=b"}, "one question: any column"
    assert gold_columns(["question_0=b"], question_set(PREDICATE)) == {0: "b"}
    assert gold_columns(["s=b", "c=d=e"], question_set(CHOICE, SCORE)) == {1: "b", 0: "d=e"}
    with pytest.raises(CliError, match="c, s"):
        gold_columns(["x=b"], question_set(CHOICE, SCORE))


def test_the_table_of_answers():
    asked = question_set(CHOICE, SCORE)
    answer = {"prediction": "1", "probabilities": {"1": 0.75, "true": 0.25}}
    refused = {"prediction": None, "probabilities": None}
    records = [{"text": "one\ntwo", "answers": {"c": answer, "s": refused}}, {"text": "x" * 90, "error": "too long"}]
    table = format_answers(records, asked, 80, 5).splitlines()
    assert table[0].split() == ["text", "c", "s"]
    assert table[1].split() == ["one", "two", "1", "0.750", "refused"]
    assert table[2].split()[1:] == ["failed", "failed"] and "…" in table[2]
    assert table[3] == "... and 3 more"
    assert all(len(line) <= 80 for line in table)


@pytest.mark.parametrize(("form", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_reliability_diagrams(form, head):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = evaluate([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4]], [0, 1, 1], ["a", "b"])
    image = draw_reliability({"$x$": found, "y": found}, "title $", form)
    assert image.startswith(head)
