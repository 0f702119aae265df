"""The sampler over slices of the vocabulary equals the sampler over whole rows: N = 2 and 3 against N = 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from memory_group import run_ranks
from sampling_harness import Harness, random_logits, reading

from vllm.distributed.communicator import ALONE, Communicator
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.processors import LogitsProcessorError

T = TypeVar("T")

VOCAB = 6001
PROMPT, GENERATED = [3, 4, 5, 3000, VOCAB - 1], [10, 11, 10, 5990, 2000]


def double_even(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[::2] *= 2
    return logits


# A batch in which every way to sample and to read has a row.
ROWS: dict[str, dict] = {
    "greedy": {"temperature": 0},
    "greedy, ids": {"temperature": 0, "logprob_token_ids": [0, 1999, 2000, 2001, 3000, 3001, 4000, 4001, VOCAB - 1]},
    "greedy, top-k and ids": {"temperature": 0, "logprobs": 5, "logprob_token_ids": [7, 6000]},
    "greedy, entropy": {"temperature": 0, "logprobs": 1, "logprob_entropy": True},
    "greedy, the vocabulary": {"temperature": 0, "logprobs": -1},
    "greedy, many ids": {"temperature": 0, "logprob_token_ids": list(range(2900, 3100))},
    "greedy, penalised": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 2},
    "random": {"seed": 1},
    "random, raw": {"seed": 2, "logprobs": 3, "logprob_token_ids": [5999, 0], "temperature": 1.7},
    "random, processed": {
        "seed": 3,
        "logprobs": 4,
        "logprob_token_ids": [4, 10],
        "presence_penalty": 1.0,
        "temperature": 0.5,
        "logprobs_mode": "processed_logprobs",
        "logprob_entropy": True,
    },
    "penalties": {"seed": 4, "repetition_penalty": 0.7, "frequency_penalty": -0.3, "presence_penalty": 0.2},
    "bias": {"seed": 5, "logit_bias": {0: 4.0, 2999: -100.0, 3000: 5.0, VOCAB - 1: 6.0}},
    "one allowed": {"seed": 6, "allowed_token_ids": [5000]},
    "allowed": {"seed": 7, "allowed_token_ids": [0, 1999, 2001, 2999, 3001, 6000]},
    "min_tokens": {"seed": 8, "min_tokens": 9, "stop_token_ids": [30, 5990]},
    "min_p": {"seed": 9, "min_p": 0.02},
    "top_k": {"seed": 10, "top_k": 40, "logprobs": 2, "logprobs_mode": "processed_logits"},
    "top_k one": {"seed": 11, "top_k": 1},
    "top_k wide": {"seed": 12, "top_k": 3500},
    "top_k top_p": {"seed": 13, "top_k": 200, "top_p": 0.6, "temperature": 2.0},
    "top_p": {"seed": 14, "top_p": 0.6, "temperature": 0.5},
    "top_p flat": {"seed": 15, "top_p": 0.9, "temperature": 50.0},
    "bad words": {"seed": 16, "temperature": 0.3},
    "callable": {"seed": 17, "logits_processors": [double_even], "logprobs": 1},
    "all together": {
        "seed": 18,
        "temperature": 0.8,
        "top_k": 90,
        "top_p": 0.9,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "logit_bias": {10: 4.0, 5999: 3.0},
        "allowed_token_ids": list(range(1500, 4600)),
        "logprob_token_ids": [1500, 1, 4000],
        "logprobs_mode": "processed_logprobs",
    },
}
BAD_WORDS = [[10, 5990, 2000, 17], [2000, 4444], [21], [6000]]


def params_of(name: str) -> SamplingParams:
    params = SamplingParams(**ROWS[name])
    if name == "bad words":
        params.bad_words_token_ids = BAD_WORDS
    return params


def own_columns(output: SamplerOutput, row: int, params: SamplingParams) -> dict[str, np.ndarray] | None:
    num_topk = VOCAB if params.logprobs == -1 else params.logprobs or 0
    return reading(output, row, num_topk, len(params.logprob_token_ids or ()))


def entropies(output: SamplerOutput) -> dict[int, float]:
    return {
        row: float(value)
        for rows, tensors in output.logprobs
        if tensors.entropy is not None
        for row, value in zip(rows, tensors.entropy, strict=True)
    }


def on_each(world_size: int, run: Callable[[Communicator], T]) -> list[T]:
    return [run(ALONE)] if world_size == 1 else run_ranks(world_size, run)


def run_batch(names: list[str], logits: torch.Tensor, group: Communicator) -> SamplerOutput:
    harness = Harness(VOCAB, group=group)
    return harness.step(logits, [harness.add(params_of(name), PROMPT, GENERATED) for name in names])


def assert_same(got: SamplerOutput, wanted: SamplerOutput, names: list[str]) -> None:
    """Tokens, ids, logits and ranks are equal; sums may differ by the rounding of their order."""
    assert torch.equal(got.sampled_token_ids, wanted.sampled_token_ids)
    assert got.errors() == wanted.errors() == {}
    assert entropies(got) == pytest.approx(entropies(wanted), rel=1e-6, abs=1e-6)
    for row, name in enumerate(names):
        params = params_of(name)
        mine, whole = own_columns(got, row, params), own_columns(wanted, row, params)
        assert (mine is None) == (whole is None) == (params.num_logprobs is None)
        if mine is None or whole is None:
            continue
        for field in ("token_ids", "ranks", "logits"):
            np.testing.assert_array_equal(mine[field], whole[field], err_msg=f"{field} of {name}")
        # A slice's log-sum-exp is rounded to float32, and so is what they are joined to.
        rounding = 2 * np.finfo(np.float32).eps * np.abs(whole["lse"]).max(initial=1.0)
        for field in ("logprobs", "lse"):
            np.testing.assert_allclose(mine[field], whole[field], rtol=0, atol=rounding, err_msg=f"{field} of {name}")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixed_batch(world_size: int, dtype: torch.dtype) -> None:
    names = list(ROWS)
    for first in range(0, len(names), 9):
        some = names[first : first + 9]
        logits = random_logits(len(some), VOCAB, seed=first).to(dtype)
        before = logits.clone()
        wanted = run_batch(some, logits, ALONE)
        outputs = on_each(world_size, lambda group, some=some, logits=logits: run_batch(some, logits, group))
        assert torch.equal(logits, before)
        for output in outputs:
            assert_same(output, wanted, some)


@pytest.mark.parametrize("name", ROWS)
def test_each_row_alone_for_many_steps(name: str) -> None:
    """Seeded streams stay the same for as long as they run."""

    def generate(group: Communicator) -> list[int]:
        harness = Harness(VOCAB, group=group, max_model_len=64)
        slot = harness.add(params_of(name), PROMPT, GENERATED)
        table = random_logits(8, VOCAB, seed=len(name), scale=2.0)
        tokens: list[int] = []
        for _ in range(12):
            last = tokens[-1] if tokens else 0
            sampled = harness.step(table[last % 8 : last % 8 + 1], [slot]).sampled_token_ids.numpy()
            harness.states.append_sampled(np.array([slot]), sampled)
            tokens += sampled.tolist()
        return tokens

    wanted = generate(ALONE)
    assert run_ranks(2, generate) == [wanted] * 2


def test_ties_go_to_the_lowest_id_over_all_ranks() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [5990, 3100, 4000]] = 5.0
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=4),
        SamplingParams(temperature=0, logit_bias={0: 1.0}, logprobs=4),
    ]

    def run(group: Communicator) -> SamplerOutput:
        harness = Harness(VOCAB, group=group)
        return harness.step(logits, [harness.add(each) for each in params])

    for output in run_ranks(3, run):
        assert output.sampled_token_ids.tolist() == [3100] * 3
        for row in (1, 2):
            found = reading(output, row, 4, 0)
            assert found is not None
            assert found["token_ids"].tolist() == [3100, 3100, 4000, 5990, 0]
            assert found["ranks"].tolist() == [1, 1, 1, 1, 4]


def test_unsound_rows_are_known_wherever_the_logits_are() -> None:
    logits = random_logits(6, VOCAB)
    logits[0, VOCAB - 1], logits[1, 0], logits[2, 3000] = torch.nan, torch.inf, torch.nan
    logits[4] = -torch.inf
    params = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 1},
        {},
        {},
        {},
        {"allowed_token_ids": [5], "min_tokens": 9},
    ]

    def run(group: Communicator) -> dict[int, str]:
        harness = Harness(VOCAB, group=group)
        slots = [harness.add(SamplingParams(stop_token_ids=[5], **each)) for each in params]
        return harness.step(logits, slots).errors()

    wanted = run(ALONE)
    assert wanted.keys() == {0, 1, 2, 4, 5}
    assert run_ranks(2, run) == [wanted] * 2


# -- what only rank 0 has ------------------------------------------------------------------------------------


def stand_in(*arguments: Any) -> Any:
    raise AssertionError("a rank other than 0 called a request's function")


def with_callables(group: Communicator, callables: list[Callable[..., Any]], **fields: Any) -> SamplingParams:
    """As the executor hands them to the ranks."""
    own = callables if group.rank == 0 else [stand_in] * len(callables)
    return SamplingParams(logits_processors=own, **fields)


def test_callables_run_once_on_rank_0() -> None:
    seen: Counter[tuple[int, ...]] = Counter()

    def note(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen[(*output_ids, len(logits))] += 1
        return logits + torch.linspace(0, 9, VOCAB)

    def fail(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")

    logits = random_logits(3, VOCAB)

    def run(group: Communicator) -> tuple[list[int], dict[int, str]]:
        harness = Harness(VOCAB, group=group)
        slots = [
            harness.add(with_callables(group, [note], seed=1), PROMPT, GENERATED),
            harness.add(SamplingParams(seed=2), PROMPT, GENERATED),
            harness.add(with_callables(group, [fail], seed=3), PROMPT, GENERATED),
        ]
        output = harness.step(logits, slots)
        return output.sampled_token_ids.tolist(), output.errors()

    tokens, errors = run(ALONE)
    assert list(errors) == [2] and seen == {(*GENERATED, VOCAB): 1}
    results = run_ranks(2, run)
    assert seen == {(*GENERATED, VOCAB): 2}
    assert [own[:2] for own, _ in results] == [tokens[:2]] * 2
    assert results[0][1] == errors, "rank 0 reports"


class Shift(LogitsProcessor):
    """Moves the logits of requests with `extra_args["shift"]`; sees the whole batch."""

    fails = ""
    built: ClassVar[Counter[str]] = Counter()

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.shifts: dict[int, float] = {}
        self.built[type(self).__name__] += 1

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.shifts, batch_update, lambda params, *_: (params.extra_args or {}).get("shift"))
        if Shift.fails == "update_state":
            raise OSError("in update_state")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[1] == VOCAB
        if Shift.fails == "apply":
            raise OSError("in apply")
        for index, shift in self.shifts.items():
            logits[index, 1::2] += shift
        return logits


class InvariantShift(Shift):
    def is_argmax_invariant(self) -> bool:
        return True


class ByRow(AdapterLogitsProcessor):
    """Gives requests with `extra_args["shift"]` a function of their own."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        shift = (params.extra_args or {}).get("shift")
        if shift is None:
            return None
        return lambda output_ids, logits: logits.index_add(0, torch.tensor([40, 5000]), torch.tensor([shift, shift]))


def run_custom(processors: tuple[type, ...], group: Communicator) -> tuple[list[int], dict[int, str], list[float]]:
    """Two steps of a batch of which two rows are shifted; the tokens, errors and first readings."""
    harness = Harness(VOCAB, group=group, logits_processors=processors)
    params = [
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(seed=1, min_p=0.001, logprobs=1, logprobs_mode="processed_logprobs"),
        SamplingParams(temperature=0, extra_args={"shift": 9.0}, logprobs=1, logprobs_mode="processed_logprobs"),
        SamplingParams(seed=2, extra_args={"shift": 8.0}, top_k=50, logprobs=1),
    ]
    slots = [harness.add(each, PROMPT, GENERATED) for each in params]
    tokens: list[int] = []
    errors: dict[int, str] = {}
    for step in range(2):
        output = harness.step(random_logits(4, VOCAB, seed=step), slots)
        errors |= output.errors()
        tokens += output.sampled_token_ids.tolist()
        harness.states.append_sampled(np.array(slots), output.sampled_token_ids.numpy())
    columns = [reading(output, row, 1, 0) for row in range(4)]
    return tokens, errors, [float(logprob) for each in columns if each for logprob in each["logprobs"]]


@pytest.mark.parametrize("processors", [(Shift,), (InvariantShift,), (ByRow,), (ByRow, InvariantShift, Shift)])
def test_custom_processors_see_whole_rows_on_rank_0(processors: tuple[type, ...]) -> None:
    Shift.built.clear()
    tokens, errors, logprobs = run_custom(processors, ALONE)
    once = dict(Shift.built)
    assert not errors and len(logprobs) == 8
    for got in run_ranks(3, lambda group: run_custom(processors, group)):
        assert got[:2] == (tokens, {})
        np.testing.assert_allclose(got[2], logprobs, atol=2e-6)
    assert Shift.built == {name: 2 * count for name, count in once.items()}, "rank 0 alone builds them"


@pytest.mark.parametrize("where", ["update_state", "apply"])
def test_a_failing_custom_processor_fails_the_step_on_all_ranks(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(Shift, "fails", where)
    results = run_ranks(2, lambda group: run_custom((Shift,), group))
    assert [list(errors) for _, errors, _ in results] == [[0, 1, 2, 3]] * 2
    assert results[0][1][0] == f"logits processor Shift raised OSError: in {where}"
    assert results[0][0] == results[1][0]


def test_a_custom_processor_that_cannot_be_built_is_an_error_on_rank_0() -> None:
    class Broken(Shift):
        def __init__(self, *arguments: Any) -> None:
            raise OSError("on purpose")

    def build(group: Communicator) -> str | None:
        try:
            Harness(VOCAB, group=group, logits_processors=(Broken,))
        except LogitsProcessorError as error:
            return str(error)
        return None

    assert run_ranks(2, build) == ["logits processor Broken raised OSError: on purpose", None]
