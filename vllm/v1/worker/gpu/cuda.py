"""What only CUDA has: a stream that copies results beside the one that computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm.v1.worker.gpu.sample.output import SamplerOutput


class HostCopies:
    """Copies results to pinned host memory on a stream of its own. The host waits only for what it takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, output: SamplerOutput) -> tuple[SamplerOutput, Callable[[], None]]:
        """Copy what the current stream computes; the copy's tensors may be read after the returned call."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy = output.moved(_to_pinned)
            done = self._stream.record_event()

        def wait(source: SamplerOutput = output) -> None:
            # Until then nobody may have the memory of `source`, which the other stream's allocations could take.
            done.synchronize()

        return copy, wait


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    # The host's allocator hands the memory out again only when the copy is done.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
