"""Drafts by what followed the longest end of a request's tokens, in its own tokens and in earlier outputs, where
that is said often enough: suffix decoding (Oliaro et al., 2024), with a chain of places in the place of a tree."""

from __future__ import annotations

import numpy as np

from vllm.config import SpeculativeConfig
from vllm.v1.features.drafts.ngram import NO_DRAFT
from vllm.v1.features.drafts.output_pool import OutputPool, num_matched
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
