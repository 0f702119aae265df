"""Cost of reading chosen ids in a decode step.

    python benchmarks/ids_cost.py                                   # the embedded model, 64 sequences, 20 ids
    python benchmarks/ids_cost.py --model FOLDER --sequences 8 --runs 20

Two engines in this process decode prompts of equal lengths, one with ids and one without, in alternating steps: whole
runs differ by more than the cost. The engines swap roles from run to run, as the memory of one may be placed better;
the cost is the mean over even and odd runs of the median difference of a pair of steps, plus the time of taking the
readings out of the outputs, divided by the steps. Prints text and JSON.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from common import add_counts, make_parser, print_result, use_all_cores
from workloads import READ_IDS, make_workload

if TYPE_CHECKING:
    from vllm import LLM

_PREFILL_STEPS = 4  # the first steps of a run compute prompts


def main() -> None:
    """Measure, print text and JSON."""
    parser = make_parser("The cost of reading ids in a decode step.")
    add_counts(parser, sequences=(64, "requests decoded together"), tokens=(64, "tokens of each"))
    add_counts(parser, runs=(10, "batches measured, an even number"))
    args = parser.parse_args()
    use_all_cores()
    from vllm import LLM

    engines = [LLM(args.model, seed=0) for _ in range(2)]
    _run(engines, args, -1)
    runs = [_run(engines, args, number) for number in range(2 * ((args.runs + 1) // 2))]
    steps = [pairs for pairs, _ in runs]
    reading = np.median([seconds / (len(pairs) + _PREFILL_STEPS) for pairs, seconds in runs])
    _report(steps, float(reading), args)


def _run(engines: list[LLM], args: argparse.Namespace, number: int) -> tuple[np.ndarray, float]:
    """Decode one batch in each engine: seconds of each pair of steps [P, 2], without ids and with; seconds of reading
    the outputs."""
    outputs: list[Any] = []
    engines = engines[:: 1 if number % 2 else -1]
    for engine, row in zip(engines, ("decode64", "decode64_ids"), strict=True):
        _add_requests(engine, row, args, number)
    seconds = []
    while engines[0].llm_engine.has_unfinished_requests():
        pair = [0.0, 0.0]
        # Alternating, as the first one finds other data in the caches.
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


def _report(runs: list[np.ndarray], reading: float, args: argparse.Namespace) -> None:
    pairs = np.concatenate(runs)
    plain = float(np.median(pairs[:, 0]))
    parts = [_median_with_interval(np.concatenate(runs[first::2])) for first in (0, 1)]
    added = np.mean(parts, axis=0) + reading
    low, middle, high = 100 * added / plain
    step = f"{args.sequences} sequences: a step takes {1e3 * plain:.2f} ms"
    print(f"{step}, with {len(READ_IDS)} ids {middle:+.2f} % ({low:+.2f} to {high:+.2f} %)")
    print_result(
        sequences=args.sequences,
        ids=len(READ_IDS),
        step_pairs=len(pairs),
        step_ms=round(1e3 * plain, 3),
        added_ms=round(1e3 * float(added[1]), 3),
        reading_outputs_ms=round(1e3 * reading, 3),
        added_percent=round(float(middle), 2),
        added_percent_95=[round(float(low), 2), round(float(high), 2)],
    )


def _median_with_interval(pairs: np.ndarray) -> np.ndarray:
    """The median of what ids add to a step, between the limits of its 95 % confidence interval."""
    # By order statistics: 95 % of samples of this size have the median between these quantiles.
    reach = 0.98 / np.sqrt(len(pairs))
    return np.quantile(pairs[:, 1] - pairs[:, 0], [max(0.5 - reach, 0.0), 0.5, min(0.5 + reach, 1.0)])


if __name__ == "__main__":
    main()
