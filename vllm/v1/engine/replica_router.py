"""Chooses the replica of the model that a request goes to: the one where its first token is due soonest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import hash_full_blocks

GENERATED_TOKENS = 128  # expected length of a generation, where max_tokens allows it
MAX_KNOWN_BLOCKS = 100_000  # of each replica: some 15 MB; prefixes in larger caches are forgotten too early


@dataclass(slots=True)
class _Request:
    """An unfinished request."""

    replica: int
    prompt_tokens: int  # to compute before the first token
    generated_tokens: int  # expected of all its sequences


class _Replica:
    """The state of a replica as derived from its requests."""

    def __init__(self, max_blocks: int) -> None:
        self.load = 0  # tokens
        self.credit = 0  # tokens
        self.last_route = -1
        self._max_blocks = max_blocks
        self.known: OrderedDict[bytes, None] = OrderedDict()  # blocks its cache should hold, least recently sent first

    def count_known(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks the cache should hold."""
        return next((index for index, each in enumerate(hashes) if each not in self.known), len(hashes))

    def remember(self, hashes: Sequence[bytes]) -> None:
        """The replica will have these blocks. As in its cache, a prompt's end is forgotten first."""
        known = self.known
        for each in reversed(hashes[: self._max_blocks]):
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._max_blocks:
            known.popitem(last=False)


class ReplicaRouter:
    """Chooses replicas and keeps their loads. Belongs to one thread.

    Costs are counted in tokens to compute. A replica's load is the work left for its requests; a prompt adds what the
    replica's prefix cache lacks of it. So a request follows its prefix until that replica's load exceeds the others' by
    the cost of computing the prefix again.

    That alone could keep a replica idle for good: with few requests of one long prefix the loads never differ by as
    much as the prefix is long. So what requests wait for a prefix while a replica is idle is credited to that replica;
    once the credit pays for the prefill, it is done there (the ski-rental rule: recomputation never exceeds the waiting
    time). A replica with other work earns no credit, as a prefill there would delay that work.
    """

    def __init__(self, num_blocks: Sequence[int], block_size: int, caches_prefixes: bool = True) -> None:
        self._replicas = [_Replica(min(each, MAX_KNOWN_BLOCKS)) for each in num_blocks]
        self._block_size = block_size
        self._caches_prefixes = caches_prefixes
        self._requests: dict[str, _Request] = {}
        self._num_routes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def loads(self) -> list[int]:
        """Each replica's load in tokens: prompts without their known prefixes until the first token, and the expected
        generations until the request's end."""
        return [replica.load for replica in self._replicas]

    def route(
        self,
        request_id: str,
        token_ids: list[int],
        cache_salt: str | None,
        num_sequences: int,
        max_tokens: int,
        adapter_id: int = 0,
    ) -> int:
        """Choose a request's replica and count the request there until its end. `max_tokens`: of each sequence.
        `adapter_id`: of its LoRA adapter, 0 = none."""
        hashes: list[bytes] = []
        if self._caches_prefixes:
            hash_full_blocks(token_ids, self._block_size, cache_salt, hashes, adapter_id)
        # The last token is always computed: its logits are needed.
        reusable = hashes[: (len(token_ids) - 1) // self._block_size]
        missing = [len(token_ids) - each.count_known(reusable) * self._block_size for each in self._replicas]
        chosen = self._choose(missing)
        # The further sequences find the prompt's full blocks in the cache.
        own = len(token_ids) - len(reusable) * self._block_size
        request = _Request(
            chosen, missing[chosen] + (num_sequences - 1) * own, num_sequences * min(max_tokens, GENERATED_TOKENS)
        )
        self._requests[request_id] = request
        replica = self._replicas[chosen]
        replica.load += request.prompt_tokens + request.generated_tokens
        replica.remember(hashes)
        replica.last_route = self._num_routes
        self._num_routes += 1
        return chosen

    def begin(self, request_ids: Iterable[str]) -> None:
        """The first token of each has come; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._replicas[request.replica].load -= request.prompt_tokens
                request.prompt_tokens = 0

    def end(self, request_ids: Iterable[str]) -> None:
        """The requests are finished or dropped; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._replicas[request.replica].load -= request.prompt_tokens + request.generated_tokens

    def forget_prefixes(self) -> None:
        """The replicas' caches have been emptied."""
        for replica in self._replicas:
            replica.known.clear()

    def _choose(self, missing: Sequence[int]) -> int:
        """The replica for a prompt of which each lacks `missing` tokens; updates the credits."""
        fewest = min(missing)

        def cost(index: int) -> tuple[int, int, int]:
            replica = self._replicas[index]
            due = replica.load + max(missing[index] - replica.credit, fewest)
            # The least recently chosen of equal ones: all caches are to fill.
            return due, missing[index], replica.last_route

        index = min(range(len(missing)), key=cost)
        chosen = self._replicas[index]
        chosen.credit = max(chosen.credit - (missing[index] - fewest), 0)
        for other, lacks in zip(self._replicas, missing, strict=True):
            if lacks > missing[index] and other.load == 0:
                other.credit += chosen.load
        return index
