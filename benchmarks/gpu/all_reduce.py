"""A row of the table: sums over the devices of one machine. Run as a program, it is one of the ranks:

python benchmarks/gpu/all_reduce.py DEVICE RANK WORLD_SIZE PORT
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

_KIB = 64
_CALLS = 50  # of one timed run
_RUNS = 20
_TIMEOUT_SECONDS = 100.0


def measure(device: str) -> dict[str, float]:
    """Seconds of a sum of 64 KiB of bfloat16, by the engine's group and by NCCL alone, over two devices."""
    from vllm.distributed.process_group import host_store

    store = host_store("127.0.0.1", 2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, Path(__file__), device]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(store.port)], stdout=subprocess.PIPE, env=environment)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(outputs[0].splitlines()[-1])


def _run_rank(device: torch.device, rank: int, world_size: int, port: int) -> dict[str, float]:
    import torch.distributed as dist

    from vllm.distributed.process_group import connect_store, join_group

    store = connect_store("127.0.0.1", port, world_size)
    seconds: dict[str, float] = {}
    for name, custom in (("ours", True), ("nccl", False)):
        own = dist.PrefixStore(name, store)
        group = join_group(own, rank, world_size, device, "127.0.0.1", custom)
        seconds[name] = _time(group, torch.ones(_KIB * 512, dtype=torch.bfloat16, device=device))
    return seconds


def _time(group: Any, tensor: torch.Tensor) -> float:
    """Median seconds of a sum, of many that follow each other."""

    def run() -> None:
        for _ in range(_CALLS):
            group.all_reduce(tensor.fill_(1))
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    spent = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        run()
        spent.append((time.perf_counter() - began) / _CALLS)
    return statistics.median(spent)


def main() -> None:
    """Join the others and print what was measured."""
    parser = argparse.ArgumentParser(description="One rank of a sum over devices; gpu_check.py starts them.")
    parser.add_argument("device", help="cpu or cuda")
    for name in ("rank", "world_size", "port"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    device = torch.device(args.device, args.rank) if args.device == "cuda" else torch.device(args.device)
    print(json.dumps(_run_rank(device, args.rank, args.world_size, args.port)), flush=True)
    os._exit(0)  # a library's threads may wait for ranks that have gone


if __name__ == "__main__":
    main()
