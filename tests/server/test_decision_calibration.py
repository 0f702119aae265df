"""Calibrations of requests, of the server's --calibration, and of LLM.decide give the formula's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asgi import AppThread, Serve
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model

from vllm import LLM
from vllm.cli.main import main
from vllm.decisions.calibration import Calibration
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

INPUT = "The package arrived with a broken screen."
QUESTION = {
    "type": "choice",
    "name": "where",
    "instructions": "Which department?",
    "choices": [{"value": "returns"}, {"value": "sales"}, {"value": True}],
}
FITTED = {"temperature": 2.0, "bias": {"sales": 0.7}, "labels": ["returns", "sales", "true"]}
CALIBRATION = {"version": 1, "names": {"where": FITTED}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    make_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AppThread:
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    path.write_text(json.dumps(CALIBRATION))
    return serve({"max_model_len": 512}, folder, calibration=str(path))


def answer(server, question=QUESTION, **body):
    fields = {"input": INPUT, "questions": [question], "diagnostics": True, **body}
    return server.post("/v1/decisions", **fields)["answers"][0]


def shares(own):
    return [each["probability"] for each in own["probabilities"]]


def calibrated(raw):
    weights = [share**0.5 * factor for share, factor in zip(raw, (1, 2.0137527, 1), strict=True)]  # exp(0.7)
    return pytest.approx([weight / sum(weights) for weight in weights], rel=1e-6)


def test_the_servers_calibration_applies_unless_the_request_has_its_own(server):
    raw = answer(server, calibration={})
    own = answer(server)
    assert shares(own) == calibrated(shares(raw))
    assert [each["probability"] for each in own["diagnostics"]["options"]] == shares(raw), "raw in diagnostics"
    assert own["confidence"] == pytest.approx(max(shares(own)) * own["diagnostics"]["label_mass"])
    assert shares(answer(server, calibration=CALIBRATION)) == shares(own)
    assert shares(answer(server, QUESTION | {"name": "another"})) == shares(raw), "fitted for another name"


def test_a_calibration_of_other_labels_is_refused_before_anything_runs(server):
    other = QUESTION | {"choices": [{"value": "returns"}, {"value": "sales"}]}
    body = {"model": "tiny", "input": INPUT, "questions": [other]}
    response = server.request("POST", "/v1/decisions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "calibration"
    assert "'true'" in error["message"] and "questions[0] ('where') has ['returns', 'sales']" in error["message"]
    assert len(shares(answer(server, other, calibration={}))) == 2


def test_offline_takes_an_object_or_a_file(folder, tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(CALIBRATION))
    llm = LLM(str(folder), max_model_len=512)
    ask = {"inputs": INPUT, "questions": [QUESTION], "use_tqdm": False}
    (raw,), *fitted = (
        llm.decide(**ask, calibration=own)[0].answers
        for own in (None, CALIBRATION, path, Calibration.from_dict(CALIBRATION))
    )
    for (own,) in fitted:
        found = [each.probability for each in own.probabilities]
        assert found == calibrated([each.probability for each in raw.probabilities])
        assert own.diagnostics.probabilities == pytest.approx(raw.diagnostics.probabilities, abs=1e-6)
    with pytest.raises(VLLMValidationError, match="cannot read"):
        llm.decide(**ask, calibration=tmp_path / "absent.json")


def test_a_server_with_a_bad_file_does_not_start(tmp_path, capsys):
    path = tmp_path / "calibration.json"
    path.write_text('{"temperature": -1}')
    assert main(["serve", "/nowhere", "--calibration", str(path)]) == 2
    assert "calibration.json).temperature must be in (0, 1000]" in capsys.readouterr().err
