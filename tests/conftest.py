"""Shared set-up: helpers beside the tests are importable, and nothing reaches for a network."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

# Else each of some hundred processes would compile torch and transformers anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

import pytest
import torch

if TYPE_CHECKING:
    from vllm import LLM

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nothing is written into the user's cache.
os.environ.setdefault("VLLM_PACKED_CACHE", "0")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A parent ignores it (a shell's background job), and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    # Read when Triton is first imported, which may happen in any test. With a device kernels are compiled.
    os.environ["TRITON_INTERPRET"] = "1"

    @wraps(torch.manual_seed)
    def seed_here(seed: int) -> torch.Generator:
        """PyTorch's own also notes the seed for devices that are not there, with a text of the stack for each."""
        return torch.default_generator.manual_seed(seed)

    torch.manual_seed = torch.random.manual_seed = seed_here
sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.append(str(Path(__file__).parent / "models"))  # tiny_vision has the sizes of text decoders from there

from embedded_reference import embedded_reference  # noqa: F401 - a fixture
from emulated import use_emulated_library
from file_order import in_order, is_on_ray
from forked_tests import ForkedTests
from lean_interpreter import install as make_interpreter_lean
from preloaded import install
from ray_cluster import end_cluster, ray_cluster  # noqa: F401 - a fixture

install()
# Nothing that collecting tests makes is garbage, and looking through it takes a seventh of the time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run over C++ kernels that emulate instructions which the CPU may lack (see tests/support/emulated.py)"
    parser.addoption("--emulated", action="store_true", help=told)
    parser.addoption(
        "--processes", type=int, default=1, help="how many run the files (see tests/support/forked_tests.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    with suppress(ImportError):
        from hypothesis import settings

        # The same examples each time, and none fails for being slow.
        settings.load_profile("ci")
    if config.getoption("--emulated"):
        use_emulated_library()
    if config.getoption("--processes") > 1:
        config.pluginmanager.register(ForkedTests(config.getoption("--processes")))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the engine runs: for tests that state what is right on any device."""
    return request.param


@pytest.fixture
def vllm_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The records that are logged under `vllm`, each record once: pytest captures at the root and where nothing
    propagates."""
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    return caplog


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Collections look at what a file makes, not at all that was imported and collected before: half a second each."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small products in the tests' own process: threads would wait for each other longer than they compute, and
    take cores from a server beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread_a_rank() -> Iterator[None]:
    """For engines of several processes, which inherit the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of make_tiny_model, which no test changes."""
    from tiny_llm import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The embedded model, loaded once for the commands and examples that need a real one."""
    from vllm import LLM

    return LLM(max_model_len=256)


def pytest_unconfigure() -> None:
    """Libraries complain about objects that are never collected."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests out that need a CUDA device where there is none, and put the others in order."""
    items[:] = in_order(items)
    if os.environ.get("TRITON_INTERPRET") and any("triton" in item.nodeid for item in items):
        make_interpreter_lean()
    if torch.cuda.is_available():
        return
    # A folder's name is a keyword, too.
    without = [item for item in items if item.get_closest_marker("gpu")]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ray's processes are busy even when they have nothing to do."""
    if not is_on_ray(nextitem):
        end_cluster()
