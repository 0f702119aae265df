"""Calibrations as JSON objects and files, and which questions they fit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vllm.decisions.calibration import Calibration, Scaling
from vllm.decisions.params import DecisionParams
from vllm.decisions.questions import parse_questions
from vllm.exceptions import VLLMValidationError

CHOICE = {"type": "choice", "name": "where", "instructions": "Where?", "choices": [{"value": "up"}, {"value": "down"}]}
SCORE = {"type": "score", "instructions": "How much?", "levels": [{"label": "little"}, {"label": "much"}]}


def questions(*given):
    return parse_questions(list(given))


def test_the_formula_on_one_row_and_on_many():
    scaling = Scaling(2.0, {"a": 0.5})
    shares = np.asarray([[0.2, 0.3, 0.5], [0.0, 0.4, 0.6]])
    weights = shares**0.5 * np.exp([0.5, 0, 0])
    expected = weights / weights.sum(1, keepdims=True)
    assert scaling.apply(shares, ["a", "b", "c"]) == pytest.approx(expected)
    assert scaling.apply(shares[0], ["a", "b", "c"]) == pytest.approx(expected[0])


def test_a_file_comes_back_as_it_was(tmp_path):
    own = Calibration(
        Scaling(1.5), {"predicate": Scaling(2.0, {"true": 0.1})}, {"where": Scaling(0.7, {"up": -1.0}, ["up", "down"])}
    )
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(own.to_dict()))
    assert json.loads(path.read_text())["version"] == 1
    assert Calibration.load(path) == own
    assert DecisionParams(calibration=path).scalings == own
    params = DecisionParams(permutations=2.0, truncate_prompt_tokens=-1.0)
    assert (repr(params.permutations), repr(params.truncate_prompt_tokens)) == ("2", "-1")
    assert DecisionParams(calibration=str(path)).scalings == own


def test_labels_of_a_choice_may_come_in_any_order_and_those_of_a_score_may_not():
    fitted = Calibration(names={"where": Scaling(2.0, labels=["down", "up"])})
    fitted.check(questions(CHOICE, SCORE))
    levels = Calibration(types={"score": Scaling(2.0, labels=["much", "little"])})
    with pytest.raises(VLLMValidationError, match=r"\['much', 'little'\], and questions\[1\] has \['little', 'much'\]"):
        levels.check(questions(CHOICE, SCORE))


def test_a_question_with_other_labels_is_named():
    fitted = Calibration(names={"where": Scaling(2.0, labels=["left", "right"])})
    with pytest.raises(VLLMValidationError, match=r"questions\[0\] \('where'\) has \['up', 'down'\]") as error:
        fitted.check(questions(CHOICE))
    assert error.value.parameter == "calibration"
    fitted.check(questions(CHOICE | {"name": "another"}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"version": 2}, "version must be at most 1, got 2"),
        ({"labels": [1]}, "labels must be a string or a list of strings"),
        ({"names": {"where": {"slope": 1}}}, "unknown field 'slope'"),
        ({"types": {"color": {}}}, "has 'color'"),
        ([], "must be an object"),
    ],
)
def test_a_bad_object_is_named(value, message, tmp_path):
    with pytest.raises(VLLMValidationError, match=message):
        Calibration.from_dict(value)
    path = tmp_path / "own.json"
    path.write_text(json.dumps(value))
    with pytest.raises(VLLMValidationError, match=message) as error:
        Calibration.load(path)
    assert "own.json" in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(VLLMValidationError, match=r"cannot read .*absent\.json: No such file"):
        Calibration.load(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text('{"temperature": ')
    with pytest.raises(VLLMValidationError, match=r"torn\.json is not JSON"):
        Calibration.load(tmp_path / "torn.json")
