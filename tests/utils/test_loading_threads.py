"""side_by_side: results in order, PyTorch's threads as before, errors to the caller; a call beside them; and calls that
are handed over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partial

import pytest
import torch

from vllm.utils.loading_threads import (
    hand_over,
    helped,
    in_thread,
    meanwhile,
    native_work_begins,
    one_thread,
    side_by_side,
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_while_others_are_made() -> None:
    second_ran = threading.Event()
    calls = [
        lambda: (second_ran.wait(20), torch.get_num_threads()),
        lambda: (second_ran.set(), torch.is_inference_mode_enabled()),
    ]
    assert list(side_by_side(calls)) == [(True, 1), (None, True)]
    assert torch.get_num_threads() == 2


def test_an_error_is_the_caller_s() -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise ValueError("the third")
        return number

    results = side_by_side(partial(fail, number) for number in range(9))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the third"):
        next(results)
    assert torch.get_num_threads() == 2


def test_a_call_runs_beside_the_work_or_after_it() -> None:
    ran = threading.Event()
    with meanwhile(lambda: ran.set() or threading.current_thread()) as thread:
        assert not ran.wait(0.05)
        native_work_begins()
        assert ran.wait(20)
    assert thread.result() is not threading.current_thread()
    with meanwhile(lambda: "at the end") as late:
        assert not late.done()
    assert late.done() and late.result() == "at the end"


def test_a_block_in_one_thread() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    assert in_thread(threading.current_thread).result() is not threading.current_thread()


def test_an_error_of_the_block_comes_before_the_call_s() -> None:
    began = threading.Event()

    def fail() -> None:
        began.set()
        raise ValueError("the call's")

    with pytest.raises(RuntimeError, match="the block's"), meanwhile(fail) as failed:
        native_work_begins()
        assert began.wait(20)
        raise RuntimeError("the block's")
    with pytest.raises(ValueError, match="the call's"):
        failed.result()
    # Work that had not begun by then is not done any more.
    with pytest.raises(RuntimeError, match="the block's"), meanwhile(fail) as failed:
        raise RuntimeError("the block's")
    with pytest.raises(CancelledError):
        failed.result()
    with meanwhile(fail) as failed:
        pass
    with pytest.raises(ValueError, match="the call's"):
        failed.result()


def test_what_is_handed_over_is_done_beside_the_block() -> None:
    caller, made, goes_on = threading.current_thread(), [], threading.Event()

    def make(number: int) -> None:
        assert goes_on.wait(20)
        made.append((number, threading.current_thread() is caller, torch.is_inference_mode_enabled()))

    with helped():
        hand_over(partial(make, 0))
        assert not made
        goes_on.set()
        for number in range(1, 20):
            hand_over(partial(make, number))
    assert sorted(made) == [(number, False, True) for number in range(20)]
    assert torch.get_num_threads() == 2
    hand_over(partial(make, 20))
    assert made[-1][:2] == (20, True)


def test_an_error_of_what_was_handed_over_is_the_block_s() -> None:
    def fail() -> None:
        raise ValueError("beside")

    with pytest.raises(ValueError, match="beside"), helped():
        hand_over(fail)
    assert torch.get_num_threads() == 2
