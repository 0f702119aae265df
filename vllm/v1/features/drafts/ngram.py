"""Drafts that are copied from the request's own tokens: what followed its last few when they stood there before."""

from __future__ import annotations

import numpy as np

from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.states import RequestStates

NO_DRAFT = np.zeros(0, dtype=np.int32)


class NgramDrafter:
    """Looks up the last prompt_lookup_max tokens, else fewer of them, down to prompt_lookup_min; of several places it
    takes the last. A copy that was right so far goes on where it is, which is a place of the longest match, too."""

    def __init__(self, config: SpeculativeConfig, max_num_reqs: int) -> None:
        assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
        self._least, self._most = config.prompt_lookup_min, config.prompt_lookup_max
        # By slot: where the last draft was copied from, and the place that it was for. 0: none.
        self._sources = [0] * max_num_reqs
        self._places = [0] * max_num_reqs

    def add_request(self, slot: int, states: RequestStates) -> None:
        """See Drafter."""
        self._sources[slot] = 0

    def remove_request(self, slot: int) -> None:
        """See Drafter."""

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter. The tokens say whether a copy was right."""

    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        """See Drafter."""
        lengths = states.total_len[slots].tolist()
        asked = zip(slots.tolist(), lengths, room.tolist(), strict=True)
        return [self._draft(slot, states.token_ids[slot], length, most) for slot, length, most in asked]

    def _draft(self, slot: int, tokens: np.ndarray, length: int, most: int) -> np.ndarray:
        source = self._continued(slot, tokens, length) or find_last(tokens, length, self._least, self._most)[0]
        self._sources[slot], self._places[slot] = source, length
        return copied(tokens, source, length, most) if source else NO_DRAFT

    def _continued(self, slot: int, tokens: np.ndarray, length: int) -> int:
        """Where the copy goes on, 0 where the tokens are others by now."""
        source, place = self._sources[slot], self._places[slot]
        if not source or length <= place:
            return 0
        end = source + length - place
        return end if tokens[source:end].tobytes() == tokens[place:length].tobytes() else 0


def find_last(tokens: np.ndarray, length: int, least: int, most: int) -> tuple[int, int]:
    """(place, matched): the last place below `length` before which the last `matched` of `tokens[:length]` stand, the
    most of `least` to `most` that stand anywhere; (0, 0): none does. The time taken does not depend on the tokens."""
    found = (0, 0)
    is_match = np.ones(length, dtype=bool)
    for size in range(1, min(most, length - 1) + 1):
        # For each place from `size` on, whether the last `size` tokens stand before it.
        is_match = is_match[1:]
        is_match &= tokens[: length - size] == tokens[length - size]
        if size >= least:
            place = is_match.tobytes().rfind(1)
            if place < 0:
                break
            found = place + size, size
    return found


def copied(tokens: np.ndarray, source: int, length: int, most: int) -> np.ndarray:
    """At most `most` tokens from `source` on, to where an embedding stands; after the last one, the copy goes on with
    itself."""
    draft = tokens[source : min(source + most, length)]
    if len(draft) and draft.min() < 0:
        return draft[: int((draft < 0).argmax())]
    return np.resize(draft, most) if len(draft) < most else draft
