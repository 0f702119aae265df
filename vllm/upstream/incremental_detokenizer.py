"""The text of a sequence as it grows, over transformers' tokenizers: for callers who hold one. The engine's own is
vllm.v1.engine.detokenizer.Detokenizer, over its own tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.tokenizers.text_streams import REPLACEMENT, continue_text, unfinished_ids
from vllm.upstream.tokenizers.detokenizer_utils import convert_prompt_ids_to_tokens, detokenize_incrementally
from vllm.v1.engine.detokenizer import check_stop_strings
from vllm.v1.messages import EngineCoreRequest

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

_PROMPT_TAIL = 5  # of the prompt's tokens, which decide how the first new ones are spelled


class IncrementalDetokenizer:
    """A sequence's token ids, without a text."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def output_token_ids(self) -> list[int]:
        """The generated ids; those behind a stop string are left out."""
        return self.token_ids

    def num_output_tokens(self) -> int:
        """Number of generated ids."""
        return len(self.token_ids)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Add generated ids.

        Args:
            stop_terminated: the last of them is a stop token.

        Returns:
            the stop string that ends the text, None if there is none.
        """
        self.token_ids += new_token_ids
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text so far, or what came since the last call (`delta`). Unless `finished`, what may begin a stop string
        is held back."""
        return ""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: EngineCoreRequest) -> IncrementalDetokenizer:
        """The one for a tokenizer of transformers, by whether it is a fast one; None gives no text."""
        if tokenizer is None:
            return IncrementalDetokenizer()
        kind = FastIncrementalDetokenizer if hasattr(tokenizer, "backend_tokenizer") else SlowIncrementalDetokenizer
        return kind(tokenizer, request)


class BaseIncrementalDetokenizer(IncrementalDetokenizer, ABC):
    """Adds the text, token by token, and looks for the request's stop strings.

    Attributes:
        output_text: the text so far, cut at a stop string that was found.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        super().__init__()
        params = request.sampling_params
        self.stop: list[str] = list(params.stop or [])
        self.min_tokens = params.min_tokens
        self.include_stop_str_in_output = params.include_stop_str_in_output
        held = 0 if params.include_stop_str_in_output else max(map(len, self.stop), default=1) - 1
        self.stop_buffer_length = held
        self.output_text = ""
        self._num_sent = 0

    @abstractmethod
    def decode_next(self, next_token_id: int) -> str:
        """The text that the id adds; empty while a character is unfinished."""

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """See IncrementalDetokenizer. A stop string counts if it ends behind the first `min_tokens` tokens; the ids
        after that end are left out. A stop token has no text unless stop strings are included."""
        is_unspelled = stop_terminated and not self.include_stop_str_in_output
        for place, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if is_unspelled and place == len(new_token_ids) - 1:
                break
            added = self.decode_next(token_id)
            self.output_text += added
            if len(self.token_ids) <= self.min_tokens:
                continue
            found = check_stop_strings(self.output_text, len(added), self.stop, self.include_stop_str_in_output)
            if found is not None:
                stop, length = found
                if length >= 0:
                    self.output_text = self.output_text[:length]
                return stop
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """See IncrementalDetokenizer."""
        end = len(self.output_text)
        if not finished:
            end = max(end - self.stop_buffer_length, self._num_sent if delta else 0)
        start = self._num_sent if delta else 0
        if delta:
            self._num_sent = max(end, self._num_sent)
        return self.output_text[start:end]


class _TokenizerDetokenizer(BaseIncrementalDetokenizer):
    """By a tokenizer. A character that the prompt leaves unfinished begins the text."""

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:
        super().__init__(request)
        params = request.sampling_params
        self._hf_tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if params.skip_special_tokens else frozenset[int]()
        self._opening = unfinished_ids(self._decode, request.prompt_token_ids)
        self._begun = self._decode(self._opening)
        if not self._begun:
            self._start(self._whole_tail(request.prompt_token_ids))

    def decode_next(self, next_token_id: int) -> str:
        if not self._begun:
            return self._decode_next(next_token_id)
        if next_token_id in self._skipped:
            return ""
        self._opening.append(next_token_id)
        text = self._decode(self._opening)
        if text.endswith(REPLACEMENT):
            return ""
        _, added = continue_text(self._begun, text)
        self._begun = ""
        self._start(self._whole_tail(self._opening))
        return added

    @abstractmethod
    def _start(self, ids: list[int]) -> None:
        """Go on behind these ids, whose characters are whole."""

    @abstractmethod
    def _decode_next(self, next_token_id: int) -> str:
        """`decode_next`, once started."""

    def _whole_tail(self, ids: list[int]) -> list[int]:
        """The last few ids, from where a character begins: a cut one may spoil the text of those behind it."""
        tails = [ids[-count:] for count in range(_PROMPT_TAIL, 1, -1)]
        return next((tail for tail in tails if not self._decode(tail).startswith(REPLACEMENT)), tails[0])

    def _decode(self, ids: list[int]) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < len(self._hf_tokenizer)]
        return self._hf_tokenizer.decode(known, clean_up_tokenization_spaces=False) if known else ""


class FastIncrementalDetokenizer(_TokenizerDetokenizer):
    """By the streaming decoder of the tokenizers library."""

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:
        """`tokenizer`: a fast one of transformers."""
        self.tokenizer = tokenizer.backend_tokenizer
        self._skip_special_tokens = request.sampling_params.skip_special_tokens
        super().__init__(tokenizer, request)

    def _start(self, ids: list[int]) -> None:
        self._stream = self._new_stream(ids)

    def _decode_next(self, next_token_id: int) -> str:
        try:
            return self._stream.step(self.tokenizer, next_token_id) or ""
        except Exception:
            # The library gives up where a text that it has seen grows shorter; what follows begins anew.
            self._stream = self._new_stream([])
            return self._stream.step(self.tokenizer, next_token_id) or ""

    def _new_stream(self, ids: list[int]) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=ids, skip_special_tokens=self._skip_special_tokens)


class SlowIncrementalDetokenizer(_TokenizerDetokenizer):
    """By any tokenizer of transformers, from its vocabulary's spellings."""

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        self.tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._spaces_between_special_tokens = params.spaces_between_special_tokens
        super().__init__(tokenizer, request)

    def _start(self, ids: list[int]) -> None:
        self._tokens, self._prefix_offset, self._read_offset = convert_prompt_ids_to_tokens(
            self.tokenizer, ids, skip_special_tokens=self._skip_special_tokens
        )

    def _decode_next(self, next_token_id: int) -> str:
        new_tokens, text, self._prefix_offset, self._read_offset = detokenize_incrementally(
            self.tokenizer,
            [next_token_id],
            self._tokens,
            self._prefix_offset,
            self._read_offset,
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces_between_special_tokens,
        )
        self._tokens += new_tokens
        return text
