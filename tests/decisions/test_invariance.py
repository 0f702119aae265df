"""A decision does not depend on what shares the engine, the step, the cache or the request with it."""

from __future__ import annotations

import asyncio

import pytest
from decision_models import RandomDecisions, make_decision_model
from decision_reference import TOLERANCE

from vllm import LLM, AsyncEngineArgs, AsyncLLM
from vllm.decisions.types import Decision
from vllm.exceptions import VLLMValidationError

CHOICE = {
    "type": "choice",
    "name": "team",
    "instructions": "Which team?",
    "choices": [{"value": "billing"}, {"value": "shipping"}, {"value": True}, {"value": "true"}],
}
PREDICATE = {"type": "predicate", "name": "late", "instructions": "Is it late?"}
SCORE = {"type": "score", "name": "mood", "instructions": "How calm?", "levels": [{"label": "x"}, {"label": "y"}]}
QUESTIONS = [CHOICE, PREDICATE, SCORE]
INPUT = "My parcel has been on its way for a week. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    make_decision_model("chatml", path := tmp_path_factory.mktemp("chatml"))
    return path


def engine(folder, **fields):
    return LLM(str(folder), **{"dtype": "float32", "max_model_len": 2048, **fields})


@pytest.fixture(scope="module")
def llm(folder):
    return engine(folder)


def shares(decision: Decision) -> dict[str, list[float]]:
    return {answer.name: answer.diagnostics.probabilities for answer in decision.answers}


def assert_same(found: Decision, expected: Decision) -> None:
    assert set(shares(found)) == set(shares(expected))
    for name, own in shares(expected).items():
        assert shares(found)[name] == pytest.approx(own, abs=TOLERANCE)


@pytest.fixture(scope="module")
def alone(folder):
    """Every question by itself, on an engine without a cache."""
    llm = engine(folder, enable_prefix_caching=False)
    answers = [llm.decide(INPUT, question, use_tqdm=False)[0].answers[0] for question in QUESTIONS]
    return Decision(answers, None)


def test_questions_together_cached_and_in_another_order(llm, alone):
    for questions in (QUESTIONS, QUESTIONS, QUESTIONS[::-1]):
        (decision,) = llm.decide(INPUT, questions, use_tqdm=False)
        assert_same(decision, alone)
    assert decision.usage.cached_tokens > 0.9 * decision.usage.input_tokens


def test_the_input_is_computed_once(folder):
    llm = engine(folder, max_num_batched_tokens=256)
    (decision,) = llm.decide(INPUT, [PREDICATE] * 30 + [CHOICE] * 30, use_tqdm=False, permutations=2)
    num_prompts = 120
    computed = decision.usage.input_tokens - decision.usage.cached_tokens
    head = len(llm.llm_engine.tokenizer.encode(INPUT))
    assert decision.usage.input_tokens > num_prompts * head
    # The input, and what follows it in the two questions' two orders; the others recompute their last token.
    assert computed < head + 4 * 220 + num_prompts


def test_in_company_of_63_others(llm, alone):
    source = RandomDecisions(seed=5)
    inputs = [source.text(5, 20) for _ in range(63)]
    decisions = llm.decide([*inputs[:30], INPUT, *inputs[30:]], QUESTIONS, use_tqdm=False)
    assert_same(decisions[30], alone)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_in_chunks_in_small_batches_uncached_and_over_ranks(folder, alone, fields):
    (decision,) = engine(folder, **fields).decide(INPUT, QUESTIONS, use_tqdm=False)
    assert_same(decision, alone)


def test_preempted(folder, alone, monkeypatch):
    llm = engine(folder, max_num_batched_tokens=96)
    scheduler = llm.llm_engine.engine_core.scheduler
    schedule, steps = scheduler._schedule_running, []

    def preempting(step):
        steps.append(len(scheduler.running))
        if scheduler.running and len(steps) in (3, 5):
            scheduler._preempt(scheduler.running[-1], step)
        schedule(step)

    monkeypatch.setattr(scheduler, "_schedule_running", preempting)
    (decision,) = llm.decide(INPUT, QUESTIONS, use_tqdm=False)
    assert scheduler.num_preemptions == 2
    assert_same(decision, alone)


def test_permutations_are_the_mean_of_single_runs(llm):
    (decision,) = llm.decide(INPUT, CHOICE, use_tqdm=False, permutations=4)
    (answer,) = decision.answers
    runs = []
    for reading in answer.diagnostics.orders:
        choices = [CHOICE["choices"][index] for index in reading.order]
        (single,) = llm.decide(INPUT, {**CHOICE, "choices": choices}, use_tqdm=False)
        own = single.answers[0].diagnostics.probabilities
        runs.append([own[reading.order.index(index)] for index in range(4)])
    mean = [sum(each) / 4 for each in zip(*runs, strict=True)]
    assert [each.probability for each in answer.probabilities] == pytest.approx(mean, abs=TOLERANCE)
    apart = max(sum(abs(a - b) for a, b in zip(own, mean, strict=True)) / 2 for own in runs)
    assert answer.diagnostics.order_sensitivity == pytest.approx(apart, abs=TOLERANCE) and apart > 0


def test_calibration_and_refusal(llm):
    calibration = {"temperature": 2.0, "names": {"late": {"bias": {"true": 1.0}}}}
    (plain,) = llm.decide(INPUT, QUESTIONS, use_tqdm=False)
    (scaled,) = llm.decide(INPUT, QUESTIONS, use_tqdm=False, calibration=calibration)
    assert_same(scaled, plain)  # raw values stay
    raw = shares(plain)
    weights = [share**0.5 for share in raw["team"]]
    expected = [weight / sum(weights) for weight in weights]
    assert [each.probability for each in scaled.answers[0].probabilities] == pytest.approx(expected)
    odds = raw["late"][0] / raw["late"][1] * 2.718281828
    assert scaled.answers[1].probability == pytest.approx(odds / (1 + odds))
    mass = min(answer.diagnostics.label_mass for answer in plain.answers)
    (kept,) = llm.decide(INPUT, QUESTIONS, use_tqdm=False, min_label_mass=mass)
    (refused,) = llm.decide(INPUT, QUESTIONS, use_tqdm=False, min_label_mass=min(mass * 1.0001, 1.0))
    assert [answer.type for answer in kept.answers] == ["choice", "predicate", "score"]
    assert [answer.type for answer in refused.answers].count("refusal") == 1


def test_an_input_that_is_too_long_loses_its_beginning(llm):
    text = "first " + INPUT * 6 + "the last words"
    with pytest.raises(VLLMValidationError, match=r"questions\[0\] \('team'\) makes a prompt of"):
        llm.decide(text, QUESTIONS, use_tqdm=False)
    for limit, most in ((-1, 2048), (300, 300)):
        (decision,) = llm.decide(text, QUESTIONS, use_tqdm=False, truncate_prompt_tokens=limit)
        for answer in decision.answers:
            ids = answer.diagnostics.orders[0].prompt_token_ids
            prompt = llm.llm_engine.tokenizer.decode(ids, skip_special_tokens=False)
            assert most - 100 < len(ids) <= most
            assert prompt.startswith("<|user|>\n") and "first" not in prompt and "the last words\n\n" in prompt
    with pytest.raises(VLLMValidationError, match="even without the input"):
        llm.decide(text, QUESTIONS, use_tqdm=False, truncate_prompt_tokens=20)


def test_many_inputs_and_conversations(llm):
    conversation = [{"role": "user", "content": "a"}]
    decisions = llm.decide([conversation, "a"], PREDICATE, use_tqdm=False)
    assert shares(decisions[0]) == shares(decisions[1])
    assert shares(llm.decide(conversation, PREDICATE, use_tqdm=False)[0]) == shares(decisions[0])
    with pytest.raises(TypeError, match="readd"):
        llm.decide("a", PREDICATE, readd="labels")


def test_on_an_event_loop(folder, alone, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def run():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), dtype="float32", max_model_len=2048))
        try:
            first, second = await asyncio.gather(*(engine.decide(INPUT, QUESTIONS, name) for name in (None, "2")))
            with pytest.raises(VLLMValidationError, match="priority"):
                await engine.decide(INPUT, QUESTIONS, "3", priority=2**70)
            assert engine.num_unfinished_sequences == 0
            return first, second
        finally:
            engine.shutdown()

    for decision in asyncio.run(run()):
        assert_same(decision, alone)
