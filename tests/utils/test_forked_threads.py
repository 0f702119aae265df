import os

import pytest
import torch
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.utils.forked_threads import check_threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_fork(function):
    """The small number that `function` returns in a fork of this process."""
    if not (pid := os.fork()):
        code = 255
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_refused():
    try:
        check_threads()
    except RuntimeError as error:
        return int("'spawn'" in str(error))
    return 0


def test_several_threads_are_refused_in_a_fork_alone(two_threads):
    check_threads()
    check_threads()
    assert in_fork(is_refused) == 1


def test_one_thread_needs_no_other(two_threads):
    check_threads()

    def with_one():
        torch.set_num_threads(1)
        return is_refused()

    assert in_fork(with_one) == 0


def test_an_engine_checks(two_threads, tmp_path):
    llm = make_tiny_llm(make_tiny_model(tmp_path))
    params = SamplingParams(max_tokens=1)
    llm.generate([[1, 2, 3]], params)

    def refusals():
        count = 0
        for compute in (lambda: llm.generate([[1, 2, 3]], params), lambda: make_tiny_llm(tmp_path)):
            try:
                compute()
            except RuntimeError as error:
                count += "'spawn'" in str(error)
        return count

    assert in_fork(refusals) == 2
