"""Planning and assembling of label scores, over a model that is a function of the tokens before."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence

import numpy as np
import pytest
from byte_tokenizer import BOS, VOCAB_SIZE, byte_ids, make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs, PromptLogprobs
from vllm.logprobs.lists import LogprobsLists, LogprobsRows
from vllm.outputs import CompletionOutput, LabelScores, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.plans.label_scoring import LabelScorer, encode_labels

VOCAB = 7
PROMPT = [3, 1, 4, 1, 5]


def model_logprobs(tokens: Sequence[int], vocab_size: int = VOCAB) -> np.ndarray:
    """float64 [V]: the model's distribution after these tokens."""
    generator = random.Random(repr(list(tokens)))
    logits = np.array([generator.gauss(0, 2) for _ in range(vocab_size)])
    return logits - np.log(np.exp(logits).sum())


def rows_of(token_ids: list[list[int]], tokens_before: list[list[int]]) -> LogprobsRows:
    """The engine's rows if all read equally many ids, the sampled token's column first."""
    logprobs = np.array([model_logprobs(own)[ids] for ids, own in zip(token_ids, tokens_before, strict=True)])
    ranks = [
        [1 + int((model_logprobs(own) > model_logprobs(own)[token]).sum()) for token in ids]
        for ids, own in zip(token_ids, tokens_before, strict=True)
    ]
    values = logprobs.astype(np.float32)
    lse = np.zeros(len(token_ids), np.float32)
    lists = LogprobsLists(np.array(token_ids, np.int32), values, values, np.array(ranks, np.int32), lse, num_topk=0)
    return LogprobsRows(lists, slice(0, len(token_ids)), len(token_ids[0]) - 1)


def answer(prompt: ProcessedPrompt, params: SamplingParams) -> RequestOutput:
    """An engine's output, by the words of SamplingParams."""
    tokens = prompt.token_ids
    prompt_readings = None
    if params.reads_prompt:
        start = params.first_prompt_row
        prompt_readings = PromptLogprobs(num_unread=start + 1)
        for row in range(start, len(tokens) - 1):
            ids = [tokens[row + 1], *params.prompt_token_ids_of(row)]
            prompt_readings.append_rows(rows_of([ids], [tokens[: row + 1]]))
    following = FlatLogprobs(has_sampled=False)
    row = rows_of([[0, *params.logprob_token_ids]], [tokens])
    following.append((row.lists, 0), row.num_token_ids)
    completion = CompletionOutput(0, "", [], logprobs=following, finish_reason="length")
    return RequestOutput("0", None, tokens, prompt_readings, [completion], finished=True)


def score(labels, prompt: list[int] = PROMPT) -> tuple[LabelScores, list[RequestOutput]]:
    scorer = LabelScorer(encode_labels(labels, None, VOCAB), max_model_len=64)
    processed = ProcessedPrompt(None, prompt, None)
    outputs = []
    for request, params in scorer.requests(processed):
        params.verify_prompt(len(request.token_ids))
        assert params.max_tokens == 0 and request.token_ids[: len(prompt)] == prompt
        outputs.append(answer(request, params))
    return scorer.scores(processed, outputs), outputs


def num_entries(outputs: list[RequestOutput]) -> int:
    readings = [part for out in outputs for part in (out.prompt_logprobs, out.outputs[0].logprobs) if part is not None]
    return sum(len(part.token_ids) for part in readings)


def test_single_tokens_take_one_request_and_no_prompt_readings():
    scores, (output,) = score([4, 0, 6])
    expected = model_logprobs(PROMPT)
    assert output.prompt_logprobs is None and output.prompt_token_ids == PROMPT
    np.testing.assert_allclose(scores.logprobs, expected[[4, 0, 6]], rtol=1e-6)
    assert [each.token_ids for each in scores.labels] == [[4], [0], [6]]
    assert scores.best.token_ids == [[4, 0, 6][int(np.argmax(expected[[4, 0, 6]]))]]


label_sets = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), min_size=1, max_size=20, unique_by=tuple
)


@settings(max_examples=150, deadline=None)
@given(label_sets)
def test_any_labels_add_up_and_no_node_is_read_twice(labels):
    scores, outputs = score(labels)
    for label, own in zip(labels, scores.labels, strict=True):
        rows = [model_logprobs(PROMPT + label[:depth]) for depth in range(len(label))]
        each = [row[token] for row, token in zip(rows, label, strict=True)]
        assert own.token_ids == label and own.label is None
        assert own.logprob == pytest.approx(math.fsum(each), abs=1e-5)
        assert own.token_logprobs == pytest.approx(each, abs=1e-5)
        assert own.normalized_logprob == pytest.approx(math.fsum(each) / len(label), abs=1e-5)
        assert own.token_ranks == [1 + int((row > row[token]).sum()) for row, token in zip(rows, label, strict=True)]
    edges = {tuple(label[: depth + 1]) for label in labels for depth in range(len(label))}
    inner = {edge[:-1] for edge in edges}
    assert num_entries(outputs) == len(edges)
    assert len(outputs) == sum(not any(other[:-1] == node for other in inner if other) for node in inner)
    np.testing.assert_allclose(scores.probabilities, np.exp(scores.logprobs) / np.exp(scores.logprobs).sum())


@settings(max_examples=50, deadline=None)
@given(label_sets)
def test_mass_is_the_probability_of_beginning_with_a_label(labels):
    scores, _ = score(labels)

    def probability(tokens: list[int]) -> float:
        """The probability of the continuations of `tokens`, by walking down to the labels."""
        if tokens in labels:
            return 1.0
        if not any(label[: len(tokens)] == tokens for label in labels):
            return 0.0
        row = np.exp(model_logprobs(PROMPT + tokens))
        return math.fsum(row[token] * probability([*tokens, token]) for token in range(VOCAB))

    assert scores.mass == pytest.approx(probability([]), abs=1e-5)


def test_the_whole_tree_of_two_tokens_has_mass_one():
    labels = [[a, b] for a in range(VOCAB) for b in range(VOCAB)]
    scores, outputs = score(labels)
    assert scores.mass == pytest.approx(1.0, abs=1e-5)
    assert scores.probabilities.sum() == pytest.approx(1.0)
    assert len(outputs) == VOCAB
    # The root is read once, so the other requests need no prompt readings.
    assert [output.prompt_logprobs is None for output in outputs] == [False, *[True] * (VOCAB - 1)]


def test_thousands_of_tokens_in_a_label():
    generator = random.Random(0)
    labels = [[generator.randrange(VOCAB) for _ in range(3000)] for _ in range(2)]
    scorer = LabelScorer(encode_labels(labels, None, VOCAB), max_model_len=4096)
    requests = scorer.requests(ProcessedPrompt(None, PROMPT, "salt"))
    assert [len(request.token_ids) for request, _ in requests] == [len(PROMPT) + 2999] * 2
    assert all(request.cache_salt == "salt" for request, _ in requests)


def test_impossible_labels():
    scorer = LabelScorer(encode_labels([1, 2], None, VOCAB), max_model_len=64)
    prompt = ProcessedPrompt("text", PROMPT, None)
    ((request, params),) = scorer.requests(prompt)
    output = answer(request, params)
    output.outputs[0].logprobs.logprobs[:] = -np.inf
    scores = scorer.scores(prompt, [output])
    assert scores.logprobs.tolist() == [-math.inf, -math.inf] and scores.mass == 0
    assert np.isnan(scores.probabilities).all() and scores.best.token_ids == [1]


def test_a_failed_request_fails_its_prompt():
    scorer = LabelScorer(encode_labels([[1], [2, 3]], None, VOCAB), max_model_len=64)
    prompt = ProcessedPrompt(None, PROMPT, None)
    outputs = [answer(*request) for request in scorer.requests(prompt)]
    outputs[-1].outputs[0] = CompletionOutput(0, "", [], finish_reason="error", error="the logits hold NaN")
    scores = scorer.scores(prompt, outputs)
    assert scores.error == "the logits hold NaN" and scores.best is None
    assert np.isnan(scores.logprobs).all() and np.isnan(scores.probabilities).all() and math.isnan(scores.mass)
    assert [each.token_ranks for each in scores.labels] == [[0], [0, 0]]


def test_scores_survive_pickling():
    scores, _ = score([[1], [2, 3]])
    again = pickle.loads(pickle.dumps(scores))
    assert again.labels == scores.labels and again.mass == scores.mass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = make_byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    # Prompts begin with <s>, labels do not.
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


class TestLabels:
    def test_every_form(self, tokenizer):
        labels = encode_labels([" the", "cab", 5, np.int64(6), [7, 8, 7], np.array([9])], tokenizer, VOCAB_SIZE)
        assert [label.token_ids for label in labels] == [
            tokenizer.encode(" the")[1:], byte_ids("cab"), [5], [6], [7, 8, 7], [9]
        ]  # fmt: skip
        assert [label.text for label in labels] == [" the", "cab", None, None, None, None]
        assert [label.token_ids for label in encode_labels(range(3), None, 3)] == [[0], [1], [2]]
        assert [label.token_ids for label in encode_labels(np.array([[1, 2], [3, 4]]), None, 5)] == [[1, 2], [3, 4]]

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ([], "labels must not be empty"),
            ("yes", "labels must be a list of strings or of token ids, got str"),
            ({"yes": 1}, "got dict"),
            (5, "got int"),
            (["yes", ""], "labels cannot contain an empty string"),
            (["\ud800"], "lone surrogate"),
            ([[]], r"label \[\] has no token"),
            ([1, True], "must hold integers, got bool"),
            ([1.5], "must hold integers, got float"),
            ([None], "must hold integers, got NoneType"),
            ([[1, "a"]], "must hold integers, got str"),
            ([-1], "must not be negative, got -1"),
            ([[3, -2]], "must not be negative, got -2"),
            ([VOCAB_SIZE], rf"must be in \[0, {VOCAB_SIZE}\).*got {VOCAB_SIZE}"),
            ([10**30], "vocabulary; got 10"),
            (["yes", "no", "yes"], "labels 'yes' and 'yes' are the same tokens"),
            (["a", byte_ids("a")[0]], f"labels 'a' and {byte_ids('a')[0]} are the same tokens"),
            ([[4, 5], [4, 5]], r"labels \[4, 5\] and \[4, 5\] are the same tokens"),
        ],
    )
    def test_errors(self, tokenizer, labels, message):
        with pytest.raises(VLLMValidationError, match=message) as caught:
            encode_labels(labels, tokenizer, VOCAB_SIZE)
        assert caught.value.parameter == "labels"

    def test_a_text_without_a_token(self, tokenizer):
        class Swallows:
            def encode(self, text, add_special_tokens):
                return []

        with pytest.raises(VLLMValidationError, match="label 'x' has no token"):
            encode_labels(["x"], Swallows(), VOCAB_SIZE)

    def test_texts_need_a_tokenizer(self):
        with pytest.raises(VLLMValidationError, match="needs a tokenizer.*pass token ids"):
            encode_labels(["yes"], None, VOCAB_SIZE)

    def test_room_for_the_longest_label(self):
        scorer = LabelScorer(encode_labels([[1], [1, 2, 3]], None, VOCAB), max_model_len=10)
        fits, long = ProcessedPrompt(None, [1] * 8, None), ProcessedPrompt(None, [1] * 9, None)
        scorer.check_prompts([fits])
        with pytest.raises(VLLMValidationError, match=r"the prompt has 9 tokens and label \[1, 2, 3\] 3;.*=10"):
            scorer.check_prompts([long])
        with pytest.raises(VLLMValidationError, match=r"prompts\[1\] has 9 tokens"):
            scorer.check_prompts([fits, long])
