"""Incremental detokenisation: whole characters only, stop strings found as they appear."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence. What may be the start of a stop string is held back from streams."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = tokenizer.decode_stream(params.skip_special_tokens, params.spaces_between_special_tokens)
        self._params = params
        self._stop: list[str] = list(params.stop or [])
        self._num_tokens = 0
        self._pending_ids: list[int] = []
        self._num_sent = 0
        self.text = ""
        self._hold_back = max(map(len, self._stop), default=1) - 1 if not params.include_stop_str_in_output else 0

    def update(self, new_token_ids: list[int], stopped_by_token: bool) -> str | None:
        """Take new ids; returns the stop string that ended the text, if one did. `stopped_by_token`: the last id is a
        stop id, whose text is excluded unless include_stop_str_in_output."""
        ids = new_token_ids
        if stopped_by_token and ids and not self._params.include_stop_str_in_output:
            ids = ids[:-1]
        self._pending_ids.extend(ids)
        self._num_tokens += len(new_token_ids)
        if not self._stop:
            # The text is not needed before take_text, which may come once, at the end.
            return None
        searched = len(self.text)
        self._decode_pending()
        if self._num_tokens < self._params.min_tokens or stopped_by_token:
            return None
        return self._find_stop(searched)

    def take_text(self, finished: bool, delta: bool) -> str:
        """The text so far, or what was added since the last call (`delta`)."""
        self._decode_pending()
        available = len(self.text) if finished else max(len(self.text) - self._hold_back, self._num_sent)
        start = self._num_sent if delta else 0
        self._num_sent = available
        return self.text[start:available]

    def _decode_pending(self) -> None:
        if self._pending_ids:
            self.text += self._stream.step(self._pending_ids)
            self._pending_ids = []

    def _find_stop(self, searched: int) -> str | None:
        """Cut the text at the stop string that begins first; it may begin before `searched`."""
        places = [(self.text.find(stop, max(searched - len(stop) + 1, 0)), stop) for stop in self._stop]
        found = [place for place in places if place[0] >= 0]
        if not found:
            return None
        where, stop = min(found, key=lambda place: place[0])
        self.text = self.text[: where + len(stop) if self._params.include_stop_str_in_output else where]
        return stop
