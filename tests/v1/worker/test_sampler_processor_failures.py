"""The sampler, when a logits processor or a request's callable fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_harness import Custom, Harness, random_logits

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample.processors import LogitsProcessorError

GREEDY = {"temperature": 0}


def raising(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits.fill_(-torch.inf)
    raise ZeroDivisionError("on purpose")


class Fragile(LogitsProcessor):
    """Fails where `fail` says; counts how often it was built."""

    fail: str | None = None
    built = 0
    invariant = False

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.sizes: dict[int, SamplingParams] = {}
        type(self).built += 1
        self._maybe_fail("__init__")

    def _maybe_fail(self, where: str) -> None:
        if Fragile.fail == where:
            raise OSError(f"in {where}")

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.sizes, batch_update, lambda params, *_: params)
        self._maybe_fail("update_state")

    def apply(self, logits: torch.Tensor) -> Any:
        assert len(self.sizes) == len(logits)
        self._maybe_fail("apply")
        if Fragile.fail == "result":
            return logits[:, :-1]
        if Fragile.fail == "none":
            return None
        if Fragile.fail == "nan":
            logits[0, 0] = torch.nan
        return logits


class FragileInvariant(Fragile):
    invariant = True


@pytest.fixture(autouse=True)
def nothing_fails() -> Any:
    Fragile.fail = None
    yield
    Fragile.fail = None


@pytest.mark.parametrize("params", [GREEDY, {"seed": 1}, {"seed": 1, "top_k": 3, "logprobs": 2}], ids=str)
def test_a_raising_callable_ends_its_row_only(params: dict) -> None:
    harness = Harness()
    logits = random_logits(3, seed=1)
    slots = [harness.add(SamplingParams(**params)) for _ in range(3)]
    expected = harness.step(logits, slots).sampled_token_ids
    harness.remove(slots[1])
    assert harness.add(SamplingParams(logits_processors=[raising], **params)) == slots[1]
    output = harness.step(logits, slots)
    assert output.errors() == {1: "logits processor raising raised ZeroDivisionError: on purpose"}
    if params == GREEDY:
        assert output.sampled_token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda o, x: "text", "returned str, not a tensor"),
        (lambda o, x: x[:-1], r"returned a tensor of shape \(198,\), not \(199,\)"),
        (lambda x: x[0], r"returned a tensor of shape \(199,\), not \(1, 199\)"),
        (lambda o, x: x.fill_(torch.nan), "a logits processor left NaN or infinity"),
        (lambda o, x: x.fill_(torch.inf), "a logits processor left NaN or infinity"),
        (lambda o, x: x.fill_(-torch.inf), "logits processors, .* rule out every one"),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, {"top_k": 3, "seed": 1}, {"top_p": 0.5, "min_p": 0.1}], ids=str)
def test_what_a_callable_must_not_return(processor: Any, message: str, params: dict) -> None:
    harness = Harness()
    slots = [harness.add(SamplingParams(**params)) for _ in range(2)]
    slots.insert(1, harness.add(SamplingParams(logits_processors=[processor], **params)))
    errors = harness.step(random_logits(3), slots).errors()
    assert list(errors) == [1]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(errors[1])


def test_unsound_logits_of_the_model_are_not_blamed_on_processors() -> None:
    harness = Harness(logits_processors=(Custom,))
    logits = random_logits(2)
    logits[0, 3] = torch.nan
    errors = harness.step(logits, [harness.add(SamplingParams()) for _ in range(2)]).errors()
    assert list(errors) == [0] and "the model's logits" in errors[0]


def test_the_callables_after_one_that_raised_do_not_run() -> None:
    harness = Harness()
    slot = harness.add(SamplingParams(logits_processors=[raising, lambda o, x: [][0]]))
    assert "ZeroDivisionError: on purpose" in harness.step(random_logits(1), [slot]).errors()[0]


class OfRequest(AdapterLogitsProcessor):
    """Raises for those who ask for it, when they join or when they sample."""

    invariant = False

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        when = (params.extra_args or {}).get("raise")
        if when == "join":
            raise LookupError("cannot join")
        return raising if when == "sample" else None


@pytest.mark.parametrize(
    ("when", "message"),
    [("join", "LookupError: cannot join"), ("sample", "ZeroDivisionError: on purpose")],
)
def test_a_raising_request_processor_ends_its_row_only(when: str, message: str) -> None:
    harness = Harness(logits_processors=(OfRequest,))
    logits = random_logits(3, seed=1)
    slots = [harness.add(SamplingParams(**GREEDY)) for _ in range(2)]
    slots.insert(1, harness.add(SamplingParams(extra_args={"raise": when}, **GREEDY)))
    output = harness.step(logits, slots)
    assert output.errors() == {1: f"logits processor OfRequest raised {message}"}
    assert output.sampled_token_ids[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=1).tolist()
    # It is no error of a step in which the request does not sample.
    assert harness.step(logits[[2, 0]], [slots[2], slots[0]]).errors() == {}
    harness.remove(slots[1])
    assert harness.step(logits[[2, 0]], [slots[2], slots[0]]).errors() == {}


def test_an_invariant_request_processor_cannot_end_a_greedy_request() -> None:
    """It does not run when all are greedy, so neither may it count when others are not."""

    class InvariantOfRequest(OfRequest):
        invariant = True

    harness = Harness(logits_processors=(InvariantOfRequest,))
    slots = [harness.add(SamplingParams(extra_args={"raise": "sample"}, temperature=t)) for t in (0.0, 1.0)]
    assert list(harness.step(random_logits(2), slots).errors()) == [1]


@pytest.mark.parametrize("cls", [Fragile, FragileInvariant])
@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("update_state", "raised OSError: in update_state"),
        ("apply", "raised OSError: in apply"),
        ("result", "returned a tensor of shape (3, 198), not (3, 199)"),
        ("none", "returned NoneType, not a tensor"),
    ],
)
def test_a_failing_processor_of_the_batch_ends_the_step(cls: type[Fragile], fail: str, message: str) -> None:
    cls.built = 0
    harness = Harness(logits_processors=(Custom, cls))
    params = SamplingParams(seed=1, logprobs=1)
    slots = [harness.add(params) for _ in range(4)]
    logits = random_logits(4, seed=1)
    assert harness.step(logits, slots).errors() == {}
    if fail in ("result", "none"):
        harness.remove(slots.pop())
    Fragile.fail = fail
    output = harness.step(logits[:3], slots[:3])
    assert output.errors() == dict.fromkeys(range(3), f"logits processor {cls.__name__} {message}")
    assert output.logprobs == []
    Fragile.fail = None
    for slot in slots[:2]:
        harness.remove(slot)
    new = harness.add(params)
    output = harness.step(logits[:2], [new, slots[2]])  # the processors check what they are told
    assert output.errors() == {}
    assert cls.built == 2


def test_a_processor_that_cannot_be_built_again_fails_its_steps_until_it_can() -> None:
    harness = Harness(logits_processors=(Fragile,))
    slot = harness.add(SamplingParams())
    logits = random_logits(1)
    for fail in ("apply", "__init__", "__init__"):
        Fragile.fail = fail
        message = f"logits processor Fragile raised OSError: in {fail}"
        assert harness.step(logits, [slot]).errors() == {0: message}
    Fragile.fail = None
    assert harness.step(logits, [slot]).errors() == {}


@pytest.mark.parametrize("fail", ["update_state", "apply"])
def test_an_interrupt_leaves_processors_consistent(fail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(logits_processors=(Fragile, Custom))
    slots = [harness.add(SamplingParams()) for _ in range(2)]

    def interrupt(self: Fragile, where: str) -> None:
        if where == fail:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Fragile, "_maybe_fail", interrupt)
        with pytest.raises(KeyboardInterrupt):
            harness.step(random_logits(2), slots)
    assert harness.step(random_logits(2), slots).errors() == {}


@pytest.mark.parametrize("cls", [Fragile, FragileInvariant])
def test_nan_from_a_processor_is_an_error_of_its_row(cls: type[Fragile]) -> None:
    harness = Harness(logits_processors=(cls,))
    Fragile.fail = "nan"
    errors = harness.step(random_logits(3), [harness.add(SamplingParams()) for _ in range(3)]).errors()
    assert list(errors) == [0] and "a logits processor left NaN" in errors[0]


def test_a_constructor_that_raises_is_named_at_start() -> None:
    Fragile.fail = "__init__"
    with pytest.raises(LogitsProcessorError, match="logits processor Fragile raised OSError: in __init__"):
        Harness(logits_processors=(Fragile,))
