"""Random decisions are those of float32 transformers, on any tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decision_models import KINDS, RandomDecisions, make_decision_model
from decision_reference import assert_answer

from vllm import LLM
from vllm.decisions.rendering import answer_fields
from vllm.exceptions import VLLMValidationError
from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path
from vllm.scoring.files import Item
from vllm.scoring.labels.templates import Template

DATA = Path(__file__).parents[2] / "examples" / "data"
NUM_DECISIONS = {**dict.fromkeys(KINDS, 40), "embedded": 20}


pytestmark = pytest.mark.usefixtures("one_thread")


def check(llm, model, kind):
    source = RandomDecisions(seed=3)
    seen = set()
    for _ in range(NUM_DECISIONS[kind]):
        input, options, question = source.input(), source.options(), source.question()
        try:
            (decision,) = llm.decide(input, question, use_tqdm=False, **options)
        except VLLMValidationError as error:
            # Levels may be equal, which labels can tell apart and texts cannot.
            assert options["read"] == "values" and "cannot tell" in str(error)
            continue
        (answer,) = decision.answers
        assert_answer(model, question, answer_fields(answer, True, True))
        seen.add((question["type"], answer.diagnostics.read))
    assert len(seen) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_random_decisions_of_tiny_models(tmp_path, kind):
    model = make_decision_model(kind, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=8192)
    check(llm, model, kind)
    choices = [{"value": f"{index} of 255"} for index in range(255)]
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    for read in ("labels", "values"):
        (decision,) = llm.decide("", question, use_tqdm=False, read=read)
        assert_answer(model, question, answer_fields(decision.answers[0], True, True))


@pytest.fixture(scope="module")
def embedded():
    if embedded_model_path() is None:
        pytest.skip(NO_EMBEDDED_MODEL)
    return LLM(dtype="float32", max_model_len=2048)


def test_random_decisions_of_the_embedded_model(request, embedded):
    check(embedded, request.getfixturevalue("embedded_reference"), "embedded")


def test_choices_are_at_least_as_accurate_as_vllm_score(embedded):
    for name, values, instructions in (
        ("reviews", ("positive", "negative"), "What is the sentiment of the review?"),
        ("tickets", ("billing", "shipping", "security"), "Which team should handle this ticket?"),
        ("spam", ("spam", "personal"), "What kind of message is this?"),
    ):
        rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        known = [{"true": "spam", "false": "personal"}.get(row["label"], row["label"]) for row in rows]
        labels = [f" {each}" for each in values]
        prompts = [Template.default(labels).render(name, Item(0, row["text"], row)) for row in rows]
        scores = embedded.score_labels(prompts, labels, use_tqdm=False)
        question = {"type": "choice", "instructions": instructions, "choices": [{"value": each} for each in values]}
        decisions = embedded.decide([row["text"] for row in rows], question, use_tqdm=False)
        answers = [decision.answers[0] for decision in decisions]
        assert {each.diagnostics.read for each in answers} == {"values"}
        decided = sum(each.choice == own for each, own in zip(answers, known, strict=True))
        scored = sum(each.best.label.strip() == own for each, own in zip(scores, known, strict=True))
        assert decided >= scored


def test_a_small_model_is_asked_without_examples_where_there_is_no_room(embedded):
    question = {"type": "choice", "instructions": "What is it?", "choices": [{"value": "cat"}, {"value": "dog"}]}
    lengths = []
    for most in (None, 256, 40):
        (decision,) = embedded.decide("It barks. " * 100, question, use_tqdm=False, truncate_prompt_tokens=most)
        lengths.append(decision.usage.input_tokens)
        assert decision.answers[0].diagnostics.read == "values" and not decision.error
    assert lengths[0] > 400 and 200 < lengths[1] <= 256 and 20 < lengths[2] <= 40
