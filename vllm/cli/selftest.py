"""Check on the model at hand what the engine promises."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.cli import selftest_trainer
from vllm.cli.bench.run import check_json_path, print_about
from vllm.cli.generation import add_engine_arguments, load_engine
from vllm.cli.selftest_report import about, conclude
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least

if TYPE_CHECKING:
    from vllm.selftest.invariance import Check, Difference
    from vllm.v1.engine.llm_engine import LLMEngine

NAME = "selftest"
HELP = "check the engine's promises on a model"

_INVARIANCE = """Does a request's result depend on what else the engine does?

With VLLM_BATCH_INVARIANT=1, which this command sets, it must not: every token, logprob, logit, rank and entropy has the
bits that the request has alone.

Requests of several kinds run alone in an empty engine; then in random batch compositions, in steps of few tokens, with
parts of their prompts in the prefix cache, preempted, and with another number of threads. Each result is compared with
that of the request alone. Then small workloads are timed with the variable and without, in two engines in turn.

The exit code is 0 if no bit differs, 1 if one does or a check could not be made.

example: vllm selftest invariance ./model --dtype bfloat16
"""
_SWITCH = "VLLM_BATCH_INVARIANT"
_LEAST_CONTEXT = 16


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("self-test")
    repeats = "timed runs of each workload; 0 = no timing"
    group.add_argument("--repeats", metavar="N", type=at_least(0), default=3, help=repeats)
    group.add_argument("--json", metavar="FILE", type=Path, help="write the checks and the cost as JSON")
    add_engine_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    check_json_path(args.json)
    # Whole rows of logits are compared.
    args.max_logprobs = args.max_logprob_token_ids = -1
    started = time.monotonic()
    engine = _load(args, "1")
    if engine.model_config.max_model_len < _LEAST_CONTEXT:
        raise CliError(f"max_model_len must be at least {_LEAST_CONTEXT}, got {engine.model_config.max_model_len}")
    said = about("invariance", engine.model_config, dtype=engine.model_config.dtype)
    print_about(said)
    checks = _run_checks(engine, args.seed)
    del engine
    results = [{**asdict(check), "passed": check.passed} for check in checks]
    result: dict[str, Any] = {**said, "checks": results}
    if args.repeats:
        result["cost"] = _measure_cost(args)
    return conclude(result, all(check.passed for check in checks), started, args.json)


def _load(args: argparse.Namespace, switch: str) -> LLMEngine:
    """An engine with VLLM_BATCH_INVARIANT=`switch`, which is read while it loads."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = switch
    try:
        return load_engine(args)
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _run_checks(engine: LLMEngine, seed: int) -> list[Check]:
    from vllm.selftest.invariance import InvarianceTest

    print(f"{'check':24} {'requests':>8} {'values':>11}  result")
    checks = []
    for check in InvarianceTest(engine, seed).run():
        checks.append(check)
        detail = f" ({check.detail})" if check.detail else ""
        print(f"{check.name:24} {check.requests:8} {check.values:11,}  {_verdict(check)}{detail}", flush=True)
    for check in checks:
        if check.first is not None:
            print(f"first difference, {check.name}: {_described(check.first)}")
            break
    return checks


def _verdict(check: Check) -> str:
    if check.differing:
        return f"DIFFERENT in {check.differing:,} values"
    return "identical" if check.missed is None else f"NOT CHECKED: {check.missed}"


def _described(first: Difference) -> str:
    place = f"request {first.probe} ({first.kind}, {first.prompt_len} tokens), {first.field}"
    if first.index is None:
        return f"{place}: {first.expected:.0f} values alone, {first.got:.0f} here"
    others = f"; {first.differing:,} of the array differ, by at most {first.largest:.3g}"
    return f"{place}[{first.index}]: {first.expected!r} alone, {first.got!r} here{others}"


def _measure_cost(args: argparse.Namespace) -> dict[str, Any]:
    from vllm.selftest.invariance import measure_cost

    cost = measure_cost(_load(args, "0"), _load(args, "1"), args.repeats)
    print(f"{'cost':24} {'default':>8} {'invariant':>11}  ratio (least to greatest of {args.repeats})")
    for name, figures in cost.items():
        default, invariant = min(figures["default_seconds"]), min(figures["invariant_seconds"])
        ratio = figures["ratio"]
        shown = f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
        print(f"{name:24} {default:6.3f} s {invariant:9.3f} s  {shown}: {figures['workload']}")
    return cost


_ABOUT = {"HELP": "no request's result depends on the batch composition", "__doc__": _INVARIANCE}
COMMANDS = (
    SimpleNamespace(NAME="invariance", **_ABOUT, add_arguments=_add_arguments, run=_run),
    selftest_trainer,
)
