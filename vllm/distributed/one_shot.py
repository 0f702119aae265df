"""Sums of small tensors over the devices of one machine: each reads the others' memory, in one kernel of Torch's, where
NCCL passes parts around in several hops."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.logger import init_logger

logger = init_logger(__name__)

# Each device would read too much of larger tensors.
MAX_BYTES = 512 * 2**10
# For these Torch's kernel adds in the order of ranks, so that all ranks get the same bits.
_WORLD_SIZES = (2, 4, 8)
_DTYPES = (torch.float32, torch.bfloat16)
_VECTOR_BYTES = 16
_TRIAL_VALUES = 4096
# A trial takes milliseconds; where devices do not see each other's writes, its kernel would wait forever.
TRIAL_SECONDS = 30.0


class TrialHangs(RuntimeError):
    """The device waits in a kernel that does not end, so that nothing else can run on it."""


class OneShotAllReduce:
    """`buffer`, uint8 [MAX_BYTES], is memory that all ranks' devices map, known to Torch as the group `name`."""

    def __init__(self, buffer: Tensor, name: str) -> None:
        self._buffer, self._name = buffer, name

    def takes(self, tensor: Tensor) -> bool:
        """Whether the kernel can add such tensors, and faster than NCCL."""
        fits = 0 < tensor.nbytes <= MAX_BYTES and tensor.nbytes % _VECTOR_BYTES == 0
        return fits and tensor.dtype in _DTYPES

    def __call__(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place in a contiguous tensor, on the current stream."""
        flat = tensor.view(-1)
        staged = self._buffer[: tensor.nbytes].view(tensor.dtype)
        staged.copy_(flat)
        # Its end waits until all ranks have read, so that the buffer is free again.
        torch.ops.symm_mem.one_shot_all_reduce_out(staged, "sum", self._name, flat)


def make_one_shot(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    gather: Callable[[Tensor], Tensor],
) -> OneShotAllReduce | None:
    """An object that sums small tensors over the ranks of `store`, all of which make this call; None on all ranks,
    if it is missing, or does not work, on any. `gather` is all_gather.

    Raises:
        TrialHangs: a trial sum has not ended after TRIAL_SECONDS.
    """
    made: OneShotAllReduce | None = None
    reason = ""

    def agreed(step: Callable[[], Any]) -> bool:
        nonlocal reason
        works = not reason
        if works:
            try:
                step()
            except TrialHangs:
                raise
            except Exception as error:  # NCCL is there in its place
                works, reason = False, f"{type(error).__name__}: {error}"
        if gather(torch.tensor([int(works)], device=device)).all():
            return True
        reason = reason or "another rank cannot"
        return False

    def allocate() -> None:
        nonlocal made
        made = _allocate(store, rank, world_size, device)

    def rendezvous() -> None:
        assert made is not None
        _symmetric_memory().rendezvous(made._buffer, made._name)

    def trial() -> None:
        assert made is not None
        generator = torch.Generator().manual_seed(rank)
        own = torch.randn(_TRIAL_VALUES, generator=generator).to(device, torch.bfloat16)
        wanted, summed = gather(own).double().sum(0), own.clone()
        made(summed)
        _await(device)
        everywhere = gather(summed)
        if not (everywhere == summed).all() or not torch.allclose(summed.double(), wanted, rtol=0.05, atol=0.1):
            raise ValueError("a trial sum is wrong")

    if world_size in _WORLD_SIZES and all(agreed(step) for step in (allocate, rendezvous, trial)):
        return made
    logger.info("Ranks add up by NCCL alone: %s", reason or f"there are {world_size} of them, not 2, 4 or 8")
    return None


def _allocate(store: dist.Store, rank: int, world_size: int, device: torch.device) -> OneShotAllReduce:
    """Memory that may be shared. ValueError: the ranks are on several machines."""
    memory = _symmetric_memory()
    if not rank:
        store.set("one_shot/name", f"vllm-{uuid.uuid4().hex}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    store.set(f"one_shot/place/{rank}", f"{socket.gethostname()} {visible} {device.index}")
    places = [store.get(f"one_shot/place/{each}").decode().rsplit(" ", 1) for each in range(world_size)]
    if len({place.partition(" ")[0] for place, _ in places}) > 1:
        raise ValueError("the ranks are on several machines")
    # Numbers of devices mean the same only to processes that see the same ones.
    if device.type == "cuda" and len({place for place, _ in places}) == 1:
        others = [int(number) for each, (_, number) in enumerate(places) if each != rank]
        if hidden := [number for number in others if not torch.cuda.can_device_access_peer(device, number)]:
            raise ValueError(f"{device} has no peer access to device {', '.join(map(str, hidden))}")
    name = store.get("one_shot/name").decode()
    memory.set_group_info(name, rank, world_size, dist.PrefixStore("one_shot/memory", store))
    return OneShotAllReduce(memory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device, name), name)


def _await(device: torch.device) -> None:
    """Wait until the device has done what it was given; TrialHangs if that takes too long."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + TRIAL_SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            raise TrialHangs(
                f"a sum over the ranks' shared memory has not ended after {TRIAL_SECONDS:g} s: the devices claim peer "
                "access that does not work. Start with disable_custom_all_reduce=True"
            )
        time.sleep(0.001)


def _symmetric_memory() -> Any:
    """Torch's class. ImportError where this version has none."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory
