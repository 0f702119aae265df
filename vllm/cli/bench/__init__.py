"""Measure the engine in this process, or a server, with prompts of random tokens."""

from __future__ import annotations

from vllm.cli.bench import latency as bench_latency
from vllm.cli.bench import serve as bench_serve
from vllm.cli.bench import throughput as bench_throughput

NAME = "bench"
HELP = "measure the engine or a server"
COMMANDS = (bench_latency, bench_throughput, bench_serve)
REFUSED = {
    "startup": "the log of `vllm serve` says what a start takes",
    "sweep": "run `vllm bench serve` once for each value",
    "mm-processor": "inputs of media are not measured",
}
"""Upstream's commands that are not here, and what to do instead."""
