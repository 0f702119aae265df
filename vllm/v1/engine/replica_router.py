"""Which replica of the model a request goes to: where its first token is due soonest.

All is counted in tokens to compute. A replica's load is what it has still to do for the requests that were sent to it;
a prompt adds what the replica's prefix cache lacks of it. So a request follows its prefix until that replica has more
to do than the others by as much as computing the prefix anew costs, and goes to the least loaded one otherwise.

That alone could keep a replica idle for good: under few requests with one long prefix the loads never differ by as much
as the prefix is long. But a prefill is paid once, while waiting for a busier replica is paid by request after request.
What requests wait for the sake of a prefix while a replica has nothing to do is therefore credited to that replica;
once the credit pays for the prefill, it is done there, and both have the prefix. As with skis that are bought when
their price has gone into renting, what is so computed again never exceeds what was waited. A replica with other work
earns nothing: a prefill there would make that wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import hash_full_blocks

GENERATED_TOKENS = 128
"""How long a generation is taken to be where max_tokens allows for it: when it ends is not known before."""

MAX_KNOWN_BLOCKS = 100_000
"""Of each replica: some 15 MB. Prefixes of large caches are forgotten earlier than the caches forget them."""


@dataclass(slots=True)
class _Request:
    """A request that has not ended."""

    replica: int
    prompt_tokens: int  # to compute before the first token
    generated_tokens: int  # expected of all its sequences


class _Replica:
    """What is known of a replica from what was sent there and came back."""

    def __init__(self, max_blocks: int) -> None:
        self.load = 0  # tokens
        self.credit = 0  # tokens
        self.last_route = -1
        self._max_blocks = max_blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()  # least recently sent first

    @property
    def num_known(self) -> int:
        """Blocks that the replica's cache should hold."""
        return len(self._known)

    def count_known(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks are among them."""
        known = self._known
        for index, each in enumerate(hashes):
            if each not in known:
                return index
        return len(hashes)

    def remember(self, hashes: Sequence[bytes]) -> None:
        """The replica is about to have these blocks. As in its cache, a prompt's end is forgotten first."""
        known = self._known
        for each in reversed(hashes[: self._max_blocks]):
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self) -> None:
        """The replica's cache is empty."""
        self._known.clear()


class ReplicaRouter:
    """Chooses replicas, and keeps count of what each has to do. Belongs to one thread.

    Args:
        num_blocks: of each replica's KV cache.
        block_size: tokens a block.
        caches_prefixes: whether the replicas do; otherwise the least loaded one is chosen.
    """

    def __init__(self, num_blocks: Sequence[int], block_size: int, caches_prefixes: bool = True) -> None:
        self._replicas = [_Replica(min(each, MAX_KNOWN_BLOCKS)) for each in num_blocks]
        self._block_size = block_size
        self._caches_prefixes = caches_prefixes
        self._requests: dict[str, _Request] = {}
        self._num_routes = 0

    def __contains__(self, request_id: str) -> bool:
        """Whether the request was added and has not ended."""
        return request_id in self._requests

    @property
    def num_known_blocks(self) -> list[int]:
        """Blocks that each replica's prefix cache is thought to hold."""
        return [replica.num_known for replica in self._replicas]

    @property
    def loads(self) -> list[int]:
        """What each replica has to do, in tokens: prompts without their known prefixes until the first token is there,
        and the expected generations until the request's end."""
        return [replica.load for replica in self._replicas]

    def route(
        self, request_id: str, token_ids: list[int], cache_salt: str | None, num_sequences: int, max_tokens: int
    ) -> int:
        """Choose the replica that a request is to be sent to, and count it there until its end.

        Args:
            request_id: a name that no unfinished request has.
            token_ids: the prompt's.
            cache_salt: the prompt's.
            num_sequences: to generate.
            max_tokens: of each.
        """
        hashes = hash_full_blocks(token_ids, self._block_size, cache_salt, []) if self._caches_prefixes else []
        # The last token is always computed: its logits are what is asked for.
        reusable = hashes[: (len(token_ids) - 1) // self._block_size]
        missing = [len(token_ids) - each.count_known(reusable) * self._block_size for each in self._replicas]
        chosen = self._choose(missing)
        # All but the first sequence have the prompt's full blocks from that one.
        own = len(token_ids) - len(reusable) * self._block_size
        request = _Request(
            chosen,
            missing[chosen] + (num_sequences - 1) * own,
            num_sequences * min(max_tokens, GENERATED_TOKENS),
        )
        self._requests[request_id] = request
        replica = self._replicas[chosen]
        replica.load += request.prompt_tokens + request.generated_tokens
        replica.remember(hashes)
        replica.last_route = self._num_routes
        self._num_routes += 1
        return chosen

    def begin(self, request_ids: Iterable[str]) -> None:
        """The first token of each has come; ids that are not there are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._replicas[request.replica].load -= request.prompt_tokens
                request.prompt_tokens = 0

    def end(self, request_ids: Iterable[str]) -> None:
        """These are finished or dropped; ids that are not there are ignored."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._replicas[request.replica].load -= request.prompt_tokens + request.generated_tokens

    def forget_prefixes(self) -> None:
        """The replicas' caches have been emptied."""
        for replica in self._replicas:
            replica.forget()

    def _choose(self, missing: Sequence[int]) -> int:
        """The replica for a prompt of which each lacks so many tokens; settles who has credit for that."""
        fewest = min(missing)

        def cost(index: int) -> tuple[int, int, int]:
            replica = self._replicas[index]
            due = replica.load + max(missing[index] - replica.credit, fewest)
            # Of equal ones, that which was left alone longest: all caches are to fill.
            return due, missing[index], replica.last_route

        index = min(range(len(missing)), key=cost)
        chosen = self._replicas[index]
        chosen.credit = max(chosen.credit - (missing[index] - fewest), 0)
        for other, lacks in zip(self._replicas, missing, strict=True):
            if lacks > missing[index] and other.load == 0:
                other.credit += chosen.load
        return index
