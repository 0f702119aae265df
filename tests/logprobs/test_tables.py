"""A prompt's readings as rectangular arrays, and divergences from a student, against transformers in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids
from readings_reference import LOGPROB_TOLERANCE
from tiny_llm import make_tiny_llm
from transformers import AutoModelForCausalLM

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logprobs.divergence import LARGEST_MASS, TAIL_RESOLUTION, kl_terms, student_table

IDS = byte_ids("a prompt of some length, read at once and in parts")
NUM_ROWS = len(IDS) - 1


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder, max_logprob_token_ids=-1)


@pytest.fixture(scope="module")
def reference(folder):
    """Float64 logits [R, V], each of which predicts the token after it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0, :-1].numpy()


def read(llm, ids=IDS, **fields):
    (output,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=0, **fields), use_tqdm=False)
    return output


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_true(tables, reference, asked, num_topk, start=0):
    """Every cell is what the reference has for the id that was asked there, -1 being none."""
    rows = reference[start:]
    logprobs, num_rows = log_softmax(rows), len(rows)
    assert tables.positions.tolist() == list(range(start + 1, start + 1 + num_rows))
    own = np.array(IDS[start + 1 :])
    np.testing.assert_array_equal(tables.own_token_ids, own)
    every = np.arange(num_rows)
    np.testing.assert_allclose(tables.own_logprobs, logprobs[every, own], atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose(tables.own_logits, rows[every, own], atol=LOGPROB_TOLERANCE)
    np.testing.assert_allclose(
        tables.lse, np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1)) + rows.max(1), atol=1e-4
    )
    assert tables.token_ids.shape == (num_rows, num_topk + asked.shape[1])
    np.testing.assert_array_equal(tables.token_ids[:, num_topk:], asked)
    is_id = tables.token_ids >= 0
    np.testing.assert_array_equal(tables.counts, is_id.sum(axis=1))
    for table, expected, filler in ((tables.logprobs, logprobs, -np.inf), (tables.logits, rows, -np.inf)):
        found = np.where(is_id, np.take_along_axis(expected, np.maximum(tables.token_ids, 0), axis=1), filler)
        np.testing.assert_allclose(table, found, atol=LOGPROB_TOLERANCE)
    order = np.sort(rows, axis=1)[:, ::-1]
    np.testing.assert_allclose(tables.logits[:, :num_topk], order[:, :num_topk], atol=LOGPROB_TOLERANCE)
    for ids, ranks in ((tables.token_ids, tables.ranks), (tables.own_token_ids[:, None], tables.own_ranks[:, None])):
        chosen = np.take_along_axis(rows, np.maximum(ids, 0), axis=1)
        best, worst = (1 + (rows[:, None] > chosen[..., None] + off).sum(-1) for off in (2e-4, -2e-4))
        # The token itself is above its own threshold where that is lowered.
        assert ((ranks >= best) & (ranks <= worst))[ids >= 0].all() and (ranks[ids < 0] == 0).all()


def ragged(rng, num_rows, longest):
    """Lists of distinct ids of every length from 0 to `longest`."""
    return [rng.permutation(VOCAB_SIZE)[: row % (longest + 1)].tolist() for row in range(num_rows)]


def padded(lists):
    table = np.full((len(lists), max(map(len, lists))), -1)
    for row, own in zip(table, lists, strict=True):
        row[: len(own)] = own
    return table


@pytest.mark.parametrize("num_topk", [0, 3])
@pytest.mark.parametrize("start", [0, 21])
def test_ragged_lists(llm, reference, num_topk, start):
    lists = ragged(np.random.default_rng(start), NUM_ROWS - start, 5)
    fields = {"prompt_logprobs": num_topk} if num_topk else {}
    output = read(llm, prompt_logprob_token_ids=lists, prompt_logprob_start=start, **fields)
    assert_true(output.prompt_tables, reference, padded(lists), num_topk, start)


def test_repeated_ids_and_padding_in_the_middle_keep_their_columns(llm, reference):
    table = np.array([[5, -1, 5, 9], [-1, -1, 7, -1], [3, 4, 5, 6], [8, 8, 8, 8], [-1, -1, -1, -1]])
    asked = np.resize(table, (NUM_ROWS, 4)).astype(np.int64)
    output = read(llm, prompt_logprob_token_ids=asked, prompt_logprobs=2)
    assert_true(output.prompt_tables, reference, asked, 2)
    np.testing.assert_array_equal(output.prompt_token_id_logprobs, output.prompt_tables.logprobs[:, 2:])


def test_one_list_for_all_positions_and_the_own_token_alone(llm, reference):
    tables = read(llm, prompt_logprob_token_ids=[9, 4, 77], prompt_logprobs=1).prompt_tables
    assert_true(tables, reference, np.tile([9, 4, 77], (NUM_ROWS, 1)), 1)
    assert tables.entropy is None and "entropy" not in tables.arrays()
    alone = read(llm, prompt_logprobs=0, logprob_entropy=True).prompt_tables
    assert_true(alone, reference, np.empty((NUM_ROWS, 0), int), 0)
    logprobs = log_softmax(reference)
    np.testing.assert_allclose(alone.entropy, -(np.exp(logprobs) * logprobs).sum(1), atol=1e-4)


def test_positions_that_were_indexed_before_change_no_table(llm):
    fields = {"prompt_logprobs": 2, "prompt_logprob_token_ids": ragged(np.random.default_rng(1), NUM_ROWS, 3)}
    first, second = read(llm, **fields), read(llm, **fields)
    assert first.prompt_logprobs[3] and first.prompt_logprobs.lse.size
    for name, table in second.prompt_tables.arrays().items():
        np.testing.assert_array_equal(first.prompt_tables.arrays()[name], table, err_msg=name)


def test_short_prompts_and_requests_without_readings(llm):
    empty = read(llm, [5], prompt_logprobs=2).prompt_tables
    assert empty.token_ids.shape[0] == len(empty.lse) == 0 and empty.kl([]).reverse.shape == (0,)
    assert read(llm, logprobs=1).prompt_tables is None
    few = read(llm, prompt_logprobs=2, logprob_ranks=False).prompt_tables
    assert few.ranks is few.own_ranks is None and few.logprobs.shape == (NUM_ROWS, 2)


def expected_kl(p, q):
    """The divergence of masses of the same buckets, in float64."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * (np.log(p) - np.log(q)), 0).sum(axis=1)


def test_divergences_are_those_of_the_buckets(llm, reference):
    rng = np.random.default_rng(2)
    lists = ragged(rng, NUM_ROWS, 6)
    student = log_softmax(rng.normal(size=reference.shape) * 3)
    given = [student[row][own].tolist() for row, own in enumerate(lists)]
    tables = read(llm, prompt_logprob_token_ids=lists, prompt_logprobs=1).prompt_tables
    found = tables.kl(given)
    for row, own in enumerate(lists):
        masses = []
        for logprobs in (student[row], log_softmax(reference[row])):
            chosen = np.exp(logprobs[own])
            masses.append(np.append(chosen, np.delete(np.exp(logprobs), own).sum())[None])
        p, q = masses
        assert found.reverse[row] == pytest.approx(expected_kl(p, q)[0], abs=1e-4)
        assert found.forward[row] == pytest.approx(expected_kl(q, p)[0], abs=1e-4)
    table = np.full(padded(lists).shape, np.nan)  # what is given without an id does not count
    for row, values in zip(table, given, strict=True):
        row[: len(values)] = values
    for one, other in zip(tables.kl(table), found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_whole_vocabulary_has_no_tail(llm, reference):
    tables = read(llm, prompt_logprob_token_ids=list(range(VOCAB_SIZE))).prompt_tables
    student = log_softmax(np.random.default_rng(3).normal(size=reference.shape)).astype(np.float32)
    p, q = np.exp(student.astype(np.float64)), np.exp(log_softmax(reference))
    found = tables.kl(student)
    np.testing.assert_allclose(found.reverse, expected_kl(p, q), atol=1e-4)
    np.testing.assert_allclose(found.forward, expected_kl(q, p), atol=1e-4)
    own = tables.kl(tables.logprobs)
    assert max(np.abs(own.reverse).max(), np.abs(own.forward).max()) < 1e-5


def test_edges_of_divergences():
    def terms(student, teacher):
        reverse, forward = kl_terms(np.array([student], np.float32), np.array([teacher], np.float32))
        return reverse[0].item(), forward[0].item()

    half, none = np.log(0.5), -np.inf
    assert terms([none, none], [none, none]) == (0, 0)  # a row without ids
    # Certain of one id: no tail, whatever rounding makes of the sum.
    assert terms([0.0, none], [half, half]) == (pytest.approx(-half), np.inf)
    assert terms([1e-6, none], [0.0, none]) == (pytest.approx(0, abs=2e-6), pytest.approx(0, abs=2e-6))
    # Possible for the student and not for the teacher, and the other way round.
    assert terms([half, half], [0.0, none]) == (np.inf, pytest.approx(-half))
    # The teacher's tail is nothing but rounding.
    reverse, forward = terms([half], [0.0])
    assert reverse == pytest.approx(0.5 * half + 0.5 * (half - np.log(TAIL_RESOLUTION)), rel=1e-6)
    assert forward == pytest.approx(-half)


IDS_OF_TWO = np.array([[4, 7], [9, -1]])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (7, "must be a list of lists"),
        ("ab", "must be a list of lists"),
        ([[-1.0, -2.0]], "has 1 lists, but 2 positions are read"),
        ([[-1.0], [-2.0]], r"\[0\] must have a number for each of 2 ids, got 1 numbers"),
        ([[-1.0, "x"], [-1.0]], r"\[0\] must hold numbers, got 'x'"),
        ([[-1.0, True], [-1.0]], r"\[0\] must hold numbers, got True"),
        ([[-1.0, -2.0], -1.0], r"\[1\] must have a number for each of 1 ids, got -1.0"),
        ([[0.5, -2.0], [-1.0]], r"\[0\] must be logprobs, at most 0 each, got 0.5"),
        ([[float("nan"), -2.0], [-1.0]], r"\[0\] must be logprobs, at most 0 each, got nan"),
        ([[-0.1, -0.1], [-1.0]], r"\[0\] must have a probability of at most 1 in all, got 1.80967"),
        (np.zeros((2, 2), int), "must be logprobs, got an array of int64"),
        (np.full((3, 2), -1.0), r"must be \[2, 2\], a number for each id that is read, got \[3, 2\]"),
    ],
)
def test_bad_logprobs_of_a_student(values, says):
    with pytest.raises(VLLMValidationError, match=says) as caught:
        student_table(values, IDS_OF_TWO)
    assert caught.value.parameter == "prompt_student_logprobs"


def test_good_logprobs_of_a_student():
    expected = [[np.float32(-1), -np.inf], [np.float32(-0.5), -np.inf]]
    for values in ([[-1, None], [-0.5]], [[-1, None], [-0.5, 3]], np.array([[-1, -np.inf], [-0.5, np.nan]])):
        np.testing.assert_array_equal(student_table(values, IDS_OF_TWO), expected)
    assert student_table([[np.log(LARGEST_MASS) / 2, None], [0]], IDS_OF_TWO)[0, 0] > 0  # by rounding
    with pytest.raises(VLLMValidationError, match=r"prompt_logprob_token_ids\[1\] has 5 twice"):
        student_table([[-1.0, -2.0]] * 2, np.array([[1, 2], [5, 5]]))
