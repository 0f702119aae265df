"""What batch invariance costs: one workload with it and without, each in an engine and a process of its own.

Run as a module, this is such a process: it reads the engine's arguments and then names of workloads, a JSON line each,
and answers each with the seconds that a run took.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.selftest.probes import Probe, run_probes

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

SWITCH = "VLLM_BATCH_INVARIANT"
WORKLOADS = {
    "scoring": "12 prompts of 40 tokens, 2 ids",
    "decode": "8 sequences, 16 tokens",
}


def measure_cost(engine_args: EngineArgs, repeats: int) -> dict[str, dict[str, Any]]:
    """By workload: seconds of each run without and with the switch, and their ratio, invariant to default.

    The two processes take turns, so that both meet the machine as it happens to be. One run of each does not count.

    Raises:
        RuntimeError: a process failed; its own words went to stderr.
    """
    sides = [_Side(engine_args, switch) for switch in ("0", "1")]
    try:
        result = {}
        for workload, words in WORKLOADS.items():
            seconds: list[list[float]] = [[], []]
            for repeat in range(repeats + 1):
                for which in (0, 1) if repeat % 2 else (1, 0):
                    seconds[which].append(sides[which].run(workload))
            default, invariant = (each[1:] for each in seconds)
            ratios = [ours / theirs for ours, theirs in zip(invariant, default, strict=True)]
            result[workload] = {
                "workload": words,
                "default_seconds": default,
                "invariant_seconds": invariant,
                "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            }
        return result
    finally:
        for side in sides:
            side.close()


class _Side:
    """A process with one setting of the switch."""

    def __init__(self, engine_args: EngineArgs, switch: str) -> None:
        environment = {**os.environ, SWITCH: switch, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.selftest.cost"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._send(asdict(engine_args))

    def run(self, workload: str) -> float:
        """Seconds of one run."""
        self._send(workload)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures with {SWITCH} ended with status {self._process.wait()}")
        return float(json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer that does not come will tell


def _workload(name: str, engine: LLMEngine, rng: random.Random) -> list[Probe]:
    """Fresh random prompts, that no cache can answer."""
    vocab_size = engine.model_config.vocab_size
    room = engine.model_config.max_model_len

    def requests(count: int, length: int, **fields: Any) -> list[Probe]:
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **fields
        )
        length = max(1, min(length, room - (params.max_tokens or 0)))
        return [Probe(rng.choices(range(vocab_size), k=length), name, params) for _ in range(count)]

    if name == "scoring":
        return requests(12, 40, max_tokens=1, logprob_token_ids=rng.sample(range(vocab_size), min(2, vocab_size)))
    return requests(8, 4, max_tokens=16)


def _serve(orders: TextIO, answers: TextIO) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**json.loads(orders.readline())))
    rng = random.Random(0)
    for line in orders:
        requests = _workload(json.loads(line), engine, rng)
        started = time.perf_counter()
        run_probes(engine, requests)
        print(json.dumps(time.perf_counter() - started), file=answers, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Be one of the two processes. Whatever else prints does so on stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
