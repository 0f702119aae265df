"""What reading chosen ids adds to a decode step, told apart from the machine's moods.

    python benchmarks/ids_cost.py                                   # the embedded model, 64 sequences, 20 ids
    python benchmarks/ids_cost.py --model FOLDER --sequences 8 --runs 20

Two engines in this process decode equally long prompts, one with ids and one without, a step of one and a step of the
other in turn: a step's pair is milliseconds apart, where whole runs are seconds apart and differ by more than what is
looked for. From run to run they change parts, because one engine's memory may lie better than the other's, by as much.
A step's cost is the median over pairs of the difference, the mean of that of even and of odd runs; taking the readings
of a run out of its outputs is added, shared out over its steps. The last line of stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from common import add_counts, describe_machine, make_parser, use_all_cores
from workloads import READ_IDS, make_workload

if TYPE_CHECKING:
    from vllm import LLM

# The first steps of a run compute prompts.
_PREFILL_STEPS = 4


def main() -> None:
    """Measure, print a line for people and one for programs."""
    args = _parse_args()
    use_all_cores()
    from vllm import LLM

    engines = [LLM(args.model, seed=0) for _ in range(2)]
    _run(engines, args, -1)
    steps, seconds_to_read = [], []
    for number in range(2 * ((args.runs + 1) // 2)):
        pairs, seconds = _run(engines, args, number)
        steps.append(pairs)
        seconds_to_read.append(seconds / (len(pairs) + _PREFILL_STEPS))
    print(json.dumps(_summary(steps, np.array(seconds_to_read), args)), flush=True)


def _run(engines: list[LLM], args: argparse.Namespace, number: int) -> tuple[np.ndarray, float]:
    """Decode one batch in each engine: seconds of each pair of steps [P, 2], without ids and with, and the seconds that
    it took to read the outputs."""
    outputs: list[Any] = []
    engines = engines[:: 1 if number % 2 else -1]
    for engine, row in zip(engines, ("decode64", "decode64_ids"), strict=True):
        _add_requests(engine, row, args, number)
    seconds = []
    while engines[0].llm_engine.has_unfinished_requests():
        pair = [0.0, 0.0]
        # Who goes first finds the caches as the other left them.
        for which in (0, 1) if len(seconds) % 2 else (1, 0):
            began = time.perf_counter()
            done = engines[which].llm_engine.step()
            pair[which] = time.perf_counter() - began
            outputs += done if which else []
        seconds.append(pair)
    assert not engines[1].llm_engine.has_unfinished_requests(), "the engines took different numbers of steps"
    began = time.perf_counter()
    readings = [output.outputs[0].logprobs.select(READ_IDS).logprobs for output in outputs]
    reading = time.perf_counter() - began
    assert len(readings) == args.sequences and all(np.isfinite(each).all() for each in readings)
    return np.array(seconds[_PREFILL_STEPS:]), reading


def _add_requests(engine: LLM, row: str, args: argparse.Namespace, number: int) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    work = make_workload(row, number, args.sequences / 64)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=args.tokens,
        ignore_eos=True,
        logprob_token_ids=list(work.read_ids) or None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for index, ids in enumerate(work.prompts[: args.sequences]):
        engine.llm_engine.add_request(f"{row}-{number}-{index}", {"prompt_token_ids": ids}, params)


def _summary(runs: list[np.ndarray], reading: np.ndarray, args: argparse.Namespace) -> dict[str, object]:
    pairs = np.concatenate(runs)
    plain = float(np.median(pairs[:, 0]))
    parts = [_median_with_reach(np.concatenate(runs[first::2])) for first in (0, 1)]
    low, middle, high = np.mean(parts, axis=0) + np.median(reading)
    print(
        f"{args.sequences} sequences: a step takes {1e3 * plain:.2f} ms, with {len(READ_IDS)} ids "
        f"{100 * middle / plain:+.2f} % ({100 * low / plain:+.2f} to {100 * high / plain:+.2f} %)"
    )
    return {
        "sequences": args.sequences,
        "ids": len(READ_IDS),
        "step_pairs": len(pairs),
        "step_ms": round(1e3 * plain, 3),
        "added_ms": round(1e3 * middle, 3),
        "reading_outputs_ms": round(1e3 * float(np.median(reading)), 3),
        "added_percent": round(100 * middle / plain, 2),
        "added_percent_95": [round(100 * low / plain, 2), round(100 * high / plain, 2)],
        "machine": describe_machine(),
    }


def _median_with_reach(pairs: np.ndarray) -> np.ndarray:
    """What ids add to a step: between which values the median is with 95 % probability, and itself, in the middle."""
    # Order statistics of a median: 95 % of samples of this size have theirs between these quantiles.
    reach = 0.98 / np.sqrt(len(pairs))
    return np.quantile(pairs[:, 1] - pairs[:, 0], [max(0.5 - reach, 0.0), 0.5, min(0.5 + reach, 1.0)])


def _parse_args() -> argparse.Namespace:
    parser = make_parser("The cost of reading ids in a decode step.")
    add_counts(parser, sequences=(64, "requests decoded together"), tokens=(64, "tokens of each"))
    add_counts(parser, runs=(10, "batches measured, an even number"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
