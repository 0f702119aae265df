"""The scheduler's questions to its guests.

A guest is a feature that only some requests need: it has a room in `vllm/v1/features`, where also the list of guests
and its order are. The scheduler calls lists of their methods and knows nothing else of them.
Nothing here imports torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_groups import Blocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.messages import EngineCoreOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class SchedulerGuest:
    """A feature's side in the scheduler. Every method is optional: only those that a class defines are ever called, in
    the order of the list of guests.

    Attributes:
        takes_whole_steps: what is computed at once may need all tokens of a step, however many steps are in flight.
    """

    takes_whole_steps: bool = False

    # -- requests -------------------------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        """A valid request is about to be queued.

        Raises:
            VLLMValidationError: it cannot be.
        """

    def waits(self, request: Request) -> None:
        """A request waits to be admitted: it has been queued, or was preempted."""

    def prepares(self, request: Request) -> bool:
        """Whether a request cannot be admitted yet: it is in no queue until `prepared`, which whoever defines this
        defines, too, gives it. Then the guests after this one are asked."""
        return False

    def prepared(self, is_idle: bool) -> Sequence[tuple[Request, str | None]]:
        """Requests that can be admitted now, and why one never can be. `is_idle`: no other request is there, so wait a
        moment."""
        return ()

    def next(self, waiting: RequestQueue) -> Request | None:
        """The waiting request to admit next; None: none may be. The first guest that defines this chooses."""

    def ready(self, request: Request) -> str | None:
        """A request is to be admitted. Returns why it can never be: then it ends."""
        return None

    def awaits(self, request: Request, num_cached: int) -> bool:
        """Whether a request that could be admitted with so many cached tokens should rather begin further on in the
        next step."""
        return False

    def admitted(self, request: Request) -> None:
        """It has a slot."""

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        """It has lost slot and blocks, while `step` is scheduled; what the step was to compute of it, it does not."""

    def ended(self, request: Request) -> None:
        """It ends; its status is still that before."""

    # -- steps ----------------------------------------------------------------------------------------------------

    def grow(
        self, step: SchedulerOutput, request: Request, num_new: int, room: int
    ) -> tuple[int, Blocks | None] | None:
        """Allocate for the request's next `num_new` known tokens and for more, which are not certain, up to `room` for
        both. Returns how many tokens that is, and the blocks added, None: too few are free; or None: it is as any
        other."""
        return None

    def share(self, request: Request, begin: int, num_new: int) -> int:
        """How many of the request's `num_new` next tokens the step, which computes from `begin`, should take; 0: it
        waits for the next step. Not asked where a request that runs has one left."""
        return num_new

    def computes(self, request: Request, begin: int, end: int, step: SchedulerOutput) -> None:
        """The step computes these positions of it; blocks are allocated. One that has just been admitted begins after
        its cached prefix."""

    def fill(self, step: SchedulerOutput) -> None:
        """The step's requests are chosen: add what the guest's side in the worker needs to know of them."""

    def transfers(self) -> bool:
        """Whether something goes on beside steps, for which it may keep blocks. Meanwhile steps are run, be they empty,
        and requests may have to wait for blocks."""
        return False

    def let_go(self) -> None:
        """Give back the blocks that it keeps so: what they hold is of no use any more."""

    def begin_update(self, output: ModelRunnerOutput) -> dict[str, EngineCoreOutput]:
        """Results have come; their tokens are not appended yet. Returns outputs that begin with what they give."""
        return {}

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        """The results of a step are in `outputs`, and requests have ended by them."""

    def discarded(self, step: SchedulerOutput) -> None:
        """A step has failed: what it was to do may not have been done. Its requests end or begin anew afterwards."""

    def heard(self, output: ModelRunnerOutput) -> None:
        """The results of a step that was discarded as one before it had failed: what the workers said counts, though no
        token does."""

    # -- cached content -------------------------------------------------------------------------------------------
    # Content of a block in a KV group is known by a key, which begins with the hash of the tokens up to its end. Final
    # hidden states beside the first group's have a key of their own (`hidden_key`), and are brought after the content;
    # so has the recurrent state after it (`state_key`), which is brought into a snapshot in place of a block.

    def longest_prefix(self, request: Request, hashes: list[bytes], count: int) -> int:
        """The most leading blocks, at most `count`, after which the request can begin. `hashes` are of whole blocks."""
        return count

    def take(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        """A block is given to another while `step` is scheduled, and holds this content until the step begins to write.
        Whether the guest keeps it; then no further one is asked."""
        return False

    def lost(self, key: bytes) -> None:
        """Content has been evicted, and no guest keeps it."""

    def holds(self, key: bytes) -> bool:
        """Whether the guest can bring this content."""
        return False

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many of these contents, from the first on, it can bring, as far as that is known at once: `holds` is
        asked for those after them."""
        return 0

    def keep(self, keys: list[bytes]) -> None:
        """It will be asked for these in this step, of those that it holds: do not lose them for others."""

    def bring(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        """Fill a block with this content before the step's forward pass. False: the guest does not hold it."""
        return False

    def broken(self, request: Request, keys: list[bytes]) -> None:
        """Stop using what was computed of the request; `keys` are of content that it was first with."""

    def reset_cache(self) -> None:
        """Forget all content."""

    def weights_changed(self) -> None:
        """The model computes other values from now on; `reset_cache` follows."""

    # -- the engine -----------------------------------------------------------------------------------------------

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """The calls upon an engine that it answers (vllm/v1/engine/calls.py), by their names in the core."""
        return {}

    def counts(self) -> dict[str, Any]:
        """Fields of SchedulerStats."""
        return {}

    def closed(self) -> None:
        """The engine ends."""


def hooks(guests: Sequence[SchedulerGuest], name: str) -> tuple[Any, ...]:
    """The methods of this name, bound, of the guests that define one, in their order."""
    base = getattr(SchedulerGuest, name)
    return tuple(getattr(guest, name) for guest in guests if getattr(type(guest), name) is not base)


class Rest:
    """A rest ends early once `wake` is called, from any thread, also if that was before it began."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def __call__(self, seconds: float) -> None:
        """Let so many seconds pass at most."""
        self._woken.wait(seconds)
        self._woken.clear()

    def wake(self, _: object = None) -> None:
        """Something that is waited for is there; also a future's callback."""
        self._woken.set()
