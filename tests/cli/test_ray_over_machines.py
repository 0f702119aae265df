"""Ray over two machines whose link fails: no batch is lost or scored into the output twice, and no request hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ray_cluster import DEAD_SOON, environment, join
from tiny_llm import make_tiny_llm, make_tiny_model
from two_machines import TwoMachines, two_machines

from vllm.cli.main import main
from vllm.scoring import batches as score_batches
from vllm.scoring import run as score_run

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

NUM_TEXTS, BATCH_ROWS = 240, 8
LINK_SECONDS = 6
# An engine has its place once its process runs: seconds, where the cores are busy.
PLACE_SECONDS = 20
NOTICE_SECONDS = 10.0
_PATIENCE_SECONDS = 150.0
# A driver on the head's machine: a model split over both, whose requests follow each other, beside `vllm score`.
DRIVER = """
import os, sys, threading, time
from pathlib import Path
from tiny_llm import make_tiny_llm
from vllm import SamplingParams
from vllm.cli.main import main
from vllm.scoring import batches, ray_engines
from vllm.scoring.labels import task
from vllm.scoring.rows import PartFolder

class Slow(task.LabelTask):
    def engine_scorer(self, llm):
        scorer = super().engine_scorer(llm)
        score = scorer.score
        def slowly(*args):
            time.sleep(0.4)
            with open(f"{folder}/scored", "a") as file:
                print(os.readlink("/proc/self/ns/net"), file=file)
            return score(*args)
        scorer.score = slowly
        return scorer

def write(self, number, content):
    assert number not in self.parts()
    plain(self, number, content)
    print("part", flush=True)

def generate():
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    while True:
        began = time.monotonic()
        try:
            llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
        except Exception as error:
            print("split:", time.monotonic() - began, type(error).__name__, str(error), flush=True)
            return
        print("generated", flush=True)

folder, rows, place_seconds, *command = sys.argv[1:]
plain, PartFolder.write = PartFolder.write, write
batches.BATCH_ROWS, task.LabelTask = int(rows), Slow
ray_engines._PLACE_SECONDS = float(place_seconds)
llm = make_tiny_llm(Path(folder), tensor_parallel_size=2, distributed_executor_backend="ray")
generating = threading.Thread(target=generate)
generating.start()
print("exit status", main(command), flush=True)
generating.join()
llm.llm_engine.engine_core.shutdown()
input()
print("exit status", main([*command, "--resume", "--replicas", "2"]), flush=True)
"""


class Driver:
    """A program on machine 0, and what it says."""

    def __init__(self, machines: TwoMachines, environment: dict[str, str], *arguments: str) -> None:
        command = machines.command(0, sys.executable, "-c", DRIVER, *arguments)
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(map(str.rstrip, self._process.stdout))

    def go_on(self) -> None:
        """Let it resume the output."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def lines_with(self, beginning: str) -> list[str]:
        return [line for line in list(self.lines) if line.startswith(beginning)]

    def wait_for(self, beginning: str, count: int = 1) -> str:
        """Wait for so many lines that begin so; returns the last."""
        self.wait_until(lambda: len(self.lines_with(beginning)) >= count)
        return self.lines_with(beginning)[-1]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < deadline and (self._process.poll() is None or is_so()), "\n".join(
                line for line in self.lines if line != "generated"
            )
            time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, with the texts and what `vllm score` makes of them without Ray."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"the stop {i}"}) + "\n" for i in range(NUM_TEXTS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_run, "load", lambda args: make_tiny_llm(folder))
        patch.setattr(score_batches, "BATCH_ROWS", BATCH_ROWS)
        assert main([*score(folder, "whole.jsonl"), "--no-picture"]) == 0
    return folder


def score(folder: Path, output: str) -> list[str]:
    engine = ["--model", str(folder), "--dtype", "float32", "--max-model-len", "128"]
    return [
        "score",
        str(folder / "a.jsonl"),
        "--labels",
        "a",
        "b",
        "--output",
        str(folder / output),
        "--quiet",
        *engine,
    ]


def drive(
    machines: TwoMachines, folder: Path, environment: dict[str, str], output: str, place_seconds: float
) -> Driver:
    """Scoring by an engine for which there is room on machine 1 alone, beside a model split over both."""
    join(machines, 0, 1, environment)
    join(machines, 1, 2, environment)
    (folder / "scored").write_text("")
    command = [*score(folder, output), "--backend", "ray", "--replicas", "1", "--replica-cpus", "1"]
    driver = Driver(machines, environment, str(folder), str(BATCH_ROWS), str(place_seconds), *command)
    driver.wait_for("part", 2)
    driver.wait_for("generated")
    return driver


def check_output(folder: Path, output: str) -> None:
    """All rows, once each, with the bytes of a run that nothing disturbed."""
    parts = sorted((folder / output).iterdir())
    assert len(parts) == NUM_TEXTS // BATCH_ROWS
    assert b"".join(part.read_bytes() for part in parts) == (folder / "whole.jsonl").read_bytes()


def test_a_machine_that_cannot_be_reached_and_one_that_is_killed(folder: Path) -> None:
    """The first while no other has room for its engine, the second beside one that goes on."""
    with two_machines() as machines:
        limits = environment(machines, VLLM_WORKER_LINK_TIMEOUT_S=str(LINK_SECONDS), **DEAD_SOON)
        driver = drive(machines, folder, limits, "lost", PLACE_SECONDS)
        began = time.monotonic()
        machines.link(is_cut=True)
        error = driver.wait_for("split:")
        assert time.monotonic() - began < LINK_SECONDS + NOTICE_SECONDS
        assert "EngineDeadError tensor-parallel rank 1 cannot be reached or hangs" in error
        assert f"VLLM_WORKER_LINK_TIMEOUT_S={LINK_SECONDS}" in error
        error = driver.wait_for("vllm score: error:")
        assert f"the Ray cluster gave up: for {PLACE_SECONDS} s no node has had room for an engine (1 CPU); " in error
        num_rows = BATCH_ROWS * len(driver.lines_with("part"))
        assert f"{num_rows} of {NUM_TEXTS} rows are in {folder / 'lost'}, --resume continues it" in error
        driver.wait_for("exit status 2")

        machines.kill(1)
        machines.link()
        join(machines, 1, 1, limits)
        (folder / "scored").write_text("")
        driver.go_on()
        driver.wait_until(lambda: len(set((folder / "scored").read_text().split())) == 2)
        machines.link(delay_seconds=0.2, loss=0.05)
        driver.wait_for("part", len(driver.lines_with("part")) + 4)
        machines.kill(1)
        driver.wait_for("exit status 0")
        check_output(folder, "lost")


@pytest.mark.skipif(not os.environ.get("VLLM_TEST_LINKS"), reason="takes minutes: VLLM_TEST_LINKS=1")
def test_a_link_that_is_slow_and_cut_for_a_while_and_for_good(folder: Path) -> None:
    """With the limits as they are when nothing is set."""
    with two_machines() as machines:
        driver = drive(machines, folder, environment(machines), "slow", 300)
        machines.link(delay_seconds=0.2, loss=0.05)
        driver.wait_for("part", 8)
        machines.link(is_cut=True)
        time.sleep(20)
        machines.link()
        driver.wait_for("exit status 0")
        check_output(folder, "slow")
        driver.wait_for("generated", len(driver.lines_with("generated")) + 2)
        assert not driver.lines_with("split:")

        began = time.monotonic()
        machines.link(is_cut=True)
        assert "gives no sign of life for VLLM_WORKER_LINK_TIMEOUT_S=60" in driver.wait_for("split:")
        assert time.monotonic() - began < 60 + NOTICE_SECONDS
