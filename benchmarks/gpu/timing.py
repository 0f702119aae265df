"""Seconds of alternatives, measured in turns, so that all have the same clocks."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]

_WARM_UP = 3


def time_in_turns(
    contenders: Mapping[str, Sequence[Call]], device: torch.device, repeats: int, graphs: bool = True
) -> dict[str, float]:
    """Median seconds of one call of each contender.

    On CUDA between events on the stream, after a pass over more memory than the L2 cache, during which the host
    enqueues the timed work.

    Args:
        contenders: name -> the same work on different inputs, done one after another.
        graphs: replay the calls as one CUDA graph, as a decode step would, without the time of launches. For calls that
            only launch kernels.
    """
    runs = {name: _prepare(calls, device, graphs) for name, calls in contenders.items()}
    watch = _time_on_cuda if device.type == "cuda" else _time_on_cpu
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs) if repeat % 2 else list(reversed(runs))
        for name in names:
            spent[name].append(watch(runs[name]) / len(contenders[name]))
    return {name: statistics.median(values) for name, values in spent.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prepare(calls: Sequence[Call], device: torch.device, graphs: bool) -> Call:
    def run() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return _capture(run) if graphs else run


def _capture(run: Call) -> Call:
    """The calls as a graph; unchanged if one of them cannot be captured."""
    before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"not captured, so launches are timed, too: {error}", file=sys.stderr)
        torch.cuda.set_stream(before)
        torch.cuda.synchronize()
        return run
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _time_on_cpu(run: Call) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _time_on_cuda(run: Call) -> float:
    _flush_cache()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _flush_cache() -> None:
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    torch.empty(max(2**30, 4 * size), dtype=torch.int8, device="cuda").zero_()
