"""Measure the engine in this process, with prompts of random tokens."""

from __future__ import annotations

from vllm.entrypoints.cli import bench_latency, bench_throughput

NAME = "bench"
HELP = "measure the engine"
COMMANDS = (bench_latency, bench_throughput)
