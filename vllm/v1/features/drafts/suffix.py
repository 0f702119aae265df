"""Drafts by what followed the longest end of a request's tokens, in its own tokens and in earlier outputs, where
that is said often enough: suffix decoding (Oliaro et al., 2024), with a chain of places in the place of a tree."""

from __future__ import annotations

from collections import deque
from operator import mul

import numpy as np

from vllm.config import SpeculativeConfig
from vllm.v1.features.drafts.ngram import NO_DRAFT
from vllm.v1.worker.gpu.states import RequestStates

# Places that are looked at, the last ones: where the last token stands, and where at least the last few do.
_MOST_OCCURRENCES = 512
_SHORT, _MOST_PLACES = 8, 8


class SuffixDrafter:
    """Finds the longest end of a request's tokens, of at most suffix_decoding_max_tree_depth tokens, that stands
    anywhere else. The draft is what followed in most of these places, token by token, as long as the share of the
    places that have all of it is at least suffix_decoding_min_token_prob; it has at most
    suffix_decoding_max_spec_factor tokens for each of the match."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least_share = config.suffix_decoding_min_token_prob
        most_outputs = config.suffix_decoding_max_cached_requests
        self._pool = OutputPool(most_outputs) if most_outputs else None
        # By slot: where the tokens begin that are not in the pool, and the states that have them.
        self._starts: dict[int, int] = {}
        self._states: RequestStates | None = None

    def add_request(self, slot: int, states: RequestStates) -> None:
        """See Drafter."""
        self._states = states
        self._starts[slot] = int(states.total_len[slot])

    def remove_request(self, slot: int) -> None:
        """See Drafter. Its output is looked up from now on."""
        start = self._starts.pop(slot, None)
        if self._pool is not None and self._states is not None and start is not None:
            self._pool.add(self._states.token_ids[slot, start : self._states.total_len[slot]])

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter."""

    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        """See Drafter."""
        asked = zip(slots.tolist(), states.total_len[slots].tolist(), room.tolist(), strict=True)
        return [self._draft(states.token_ids[slot, :length], most) for slot, length, most in asked]

    def _draft(self, tokens: np.ndarray, most: int) -> np.ndarray:
        end = tokens[-self._depth :]
        places, matched = _own_places(tokens, self._depth)
        followers = _own_followers(tokens, places, min(most, int(matched * self._factor)))
        if self._pool is not None:
            others, longer = self._pool.find(end, self._depth, _MOST_PLACES)
            if longer and longer >= matched:
                num_tokens = min(most, int(longer * self._factor))
                more = self._pool.followers(others, num_tokens)
                followers = more if longer > matched else np.concatenate([followers, more])
        return _most_common(followers, self._least_share)


def _own_places(tokens: np.ndarray, depth: int) -> tuple[np.ndarray, int]:
    """(places, matched): places, int64 [P], before which the last `matched` tokens stand, of `depth` at most."""
    # The last ones at each length, which bounds the time.
    places = np.flatnonzero(tokens[:-1] == tokens[-1])[-_MOST_OCCURRENCES:] + 1
    for size in range(2, min(_SHORT, len(tokens)) + 1):
        if len(places) <= _MOST_PLACES:
            break
        longer = places[(tokens[places - size] == tokens[-size]) & (places >= size)]
        places = longer if len(longer) else places[-_MOST_PLACES:]
    places = places[-_MOST_PLACES:]
    if not len(places):
        return places, 0
    before = places[:, None] - np.arange(1, min(depth, len(tokens)) + 1)
    matched = num_matched((tokens[before] == tokens[: -before.shape[1] - 1 : -1]) & (before >= 0))
    longest = int(matched.max())
    return places[matched == longest], longest


def _own_followers(tokens: np.ndarray, places: np.ndarray, num_tokens: int) -> np.ndarray:
    """int32 [P, num_tokens]: what followed at each place; after the last token, from the place on again."""
    offsets = np.arange(num_tokens)
    periods = len(tokens) - places[:, None]
    return tokens[places[:, None] + offsets % periods]


def _most_common(followers: np.ndarray, least_share: float) -> np.ndarray:
    """Token by token what most rows of int32 [P, K] have after the draft so far; -1 ends a row."""
    num_places = len(followers)
    parts: list[np.ndarray] = []
    while len(followers) >= max(least_share * num_places, 1) and followers.shape[1]:
        differ = np.flatnonzero((followers != followers[0]).any(axis=0) | (followers[0] < 0))
        size = int(differ[0]) if len(differ) else followers.shape[1]
        parts.append(followers[0, :size])
        if size == followers.shape[1] or len(followers) == 1:
            break
        found = followers[:, size].tolist()
        # The last one of those that are as common.
        token_id = max(reversed(found), key=found.count)
        followers = followers[followers[:, size] == token_id, size:] if token_id >= 0 else followers[:0]
    return np.concatenate(parts) if parts else NO_DRAFT


_CAPACITY = 1 << 20
# Matches are at least as long.
_GRAM = 3
_NUM_HEADS = 1 << 18
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class OutputPool:
    """The last outputs, at most `most_outputs` and about a million tokens, one after another in a ring, with -1 after
    each. Places are counted from the first output ever; those of equal grams are chained, the last one first."""

    def __init__(self, most_outputs: int, capacity: int = _CAPACITY) -> None:
        self._most_outputs = most_outputs
        self._capacity = capacity
        # NumPy's zeros take no memory for what is not written.
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._tokens[0] = -1
        self._earlier = np.zeros(capacity, dtype=np.int64)  # the place before with the same hash; 0: none
        self._heads = np.zeros(_NUM_HEADS, dtype=np.int64)  # the last place of a hash; 0: none
        self._end = 1
        self._starts: deque[int] = deque()

    def add(self, output: np.ndarray) -> None:
        """Take an output's tokens, int32 [T]; of a very long one, the last ones."""
        output = output[-(self._capacity // 2) :]
        if len(output) <= _GRAM:
            return
        start, self._end = self._end, self._end + len(output) + 1
        self._tokens[np.arange(start, self._end) % self._capacity] = np.append(output, np.int32(-1))
        self._starts.append(start)
        while len(self._starts) > self._most_outputs or self._starts[0] < self._end - self._capacity:
            self._starts.popleft()
        self._chain(_hashes(output), start + _GRAM)

    def _chain(self, hashes: np.ndarray, first_place: int) -> None:
        """Link places from the first one on, one a hash."""
        order = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], order + first_place
        is_first = np.append(True, hashes[1:] != hashes[:-1])
        before = np.append(np.int64(0), places[:-1])
        self._earlier[places % self._capacity] = np.where(is_first, self._heads[hashes], before)
        is_last = np.append(is_first[1:], True)
        self._heads[hashes[is_last]] = places[is_last]

    def find(self, end: np.ndarray, depth: int, most: int) -> tuple[np.ndarray, int]:
        """(places, matched): of the last `most` places after the gram that int32 `end` ends with, those that the most
        tokens of `end` stand before, int64 [P], and how many these are, at most `depth`; none: ([], 0)."""
        candidates = self._candidates(end, most) if len(end) >= _GRAM else []
        places = np.array(candidates, dtype=np.int64)
        if not candidates:
            return places, 0
        end = end[-depth:]
        # Before the first output stands a -1, too.
        before = self._tokens.take(places[:, None] - np.arange(1, len(end) + 1), mode="wrap")
        matched = num_matched(before == end[::-1])
        longest = int(matched.max())
        return places[matched == longest], longest

    def _candidates(self, end: np.ndarray, most: int) -> list[int]:
        oldest = self._starts[0] if self._starts else self._end
        earlier, place = self._earlier.data, int(self._heads[_hash(end[-_GRAM:].tolist())])
        found: list[int] = []
        while place > oldest and len(found) < most:
            found.append(place)
            place = earlier[place % self._capacity]
        return found[::-1]

    def followers(self, places: np.ndarray, num_tokens: int) -> np.ndarray:
        """int32 [P, num_tokens]: what stands from each place on; nothing after a -1 is of the same output."""
        return self._tokens.take(places[:, None] + np.arange(num_tokens), mode="wrap")


def num_matched(is_equal: np.ndarray) -> np.ndarray:
    """int64 [P]: how many of bool [P, N] are true before the first that is not."""
    return np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)


def _hash(gram: list[int]) -> int:
    """Below _NUM_HEADS."""
    return (sum(map(mul, gram, _MULTIPLIERS)) & 0xFFFFFFFF) >> 14


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """int64 [T - _GRAM + 1]: `_hash` of each gram."""
    ids, count = tokens.astype(np.uint32), len(tokens) - _GRAM + 1
    sums = sum(ids[offset : offset + count] * np.uint32(factor) for offset, factor in enumerate(_MULTIPLIERS))
    return (sums >> np.uint32(14)).astype(np.int64)
