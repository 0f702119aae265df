"""What a user asks of one request: sampling, stopping, and which logprobs to return."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum, IntEnum
from functools import cached_property
from typing import Any, Literal

import numpy as np

from vllm.beam_search import BeamSearchParams as BeamSearchParams
from vllm.exceptions import VLLMValidationError, shown
from vllm.logprobs.id_rows import padded
from vllm.sampling_limits import (
    BEAM_SEARCH_NEEDS,
    INTEGERS,
    LIMITS,
    LOGPROBS_MODES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_SEQUENCES,
    MAX_STOP_STRINGS,
    NUMBERS,
    OPTIONAL_INTEGERS,
    REFUSED,
    TRACE_NEEDS,
    LogprobsMode,
    check_needs,
    integer_limits,
)
from vllm.structured_params import GuidedDecodingParams as GuidedDecodingParams
from vllm.structured_params import RepetitionDetectionParams as RepetitionDetectionParams
from vllm.structured_params import StructuredOutputsParams as StructuredOutputsParams
from vllm.structured_params import check_repetition_detection
from vllm.utils.checks import (
    MAX_INTEGER,
    check_boolean,
    check_id_sequence,
    check_integer,
    check_logit_bias,
    check_number,
    check_processors,
    check_texts,
    check_token_id_rows,
    check_token_ids,
    check_vocabulary,
    raised_temperature,
    wrong_type,
)
from vllm.utils.struct import Struct


class RequestOutputKind(Enum):
    """Which part of the output each RequestOutput carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class SamplingParams(Struct, dict=True):
    """Parameters of one request. Field names, defaults and meanings are vLLM's.

    Readings: `logprobs=k` returns, at every generated position, the sampled token and the k most likely ones
    (-1: the whole vocabulary). `logprob_token_ids` returns the sampled token and exactly these ids. Both together
    return the sampled token, the top k and the ids. `logprobs_mode` (None: the engine's) says what is read:
    "raw_logprobs" / "raw_logits" before any processing, "processed_logprobs" / "processed_logits" after penalties,
    bias, temperature and truncation. `logprob_entropy` adds each position's entropy.

    `prompt_logprobs=k` and `prompt_logprob_token_ids` (one list for all positions, or one a position) read the
    prompt's own tokens in the same way, from the logits of position `prompt_logprob_start` on: the first token that
    is read is the one after it, and lists a position are (prompt length - 1 - prompt_logprob_start) many; an integer
    array [rows, K] is the same, with -1 as padding. Prompt readings are always of the model's own logits.

    `max_tokens=0` samples nothing: it gives the prompt's readings and, where `logprobs` or `logprob_token_ids` ask
    for them, the readings of the next position.

    `temperature=0` takes the most likely token; above 0, at least 0.01 is used. `best_of` generates that many sequences
    and returns the `n` with the highest cumulative logprob; at temperature 0 one is computed, and all are equal. With
    `use_beam_search` it is the number of beams, ranked by the model's logprobs and what `logit_bias` and processors add
    to them. `bad_words` are never generated: what would complete one is ruled out. `truncate_prompt_tokens=k` keeps a
    prompt's last k tokens; -1 as many as leave room for `max_tokens`. Of a text the tokenizer's special tokens are
    among the k and stay at both ends. `logits_processors` are callables over one row of logits: (logits), (output_ids,
    logits) or (prompt_ids, output_ids, logits).

    `trace_decode_token_ids` are generated whatever the model says, as far as the context holds them, with the readings
    of these tokens; `max_tokens` becomes their number, and no other stop condition applies. `stream_interval=k`
    gives a sequence's first token at once, then k or more together. `repetition_detection` ends a sequence that repeats
    itself, with "repetition" as finish reason.

    Raises:
        VLLMValidationError: a field's type or range is wrong; names the field, the value and the limit. Limits that
            depend on the model (vocabulary, context, caps) are checked by `verify` when the request is queued.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[int] | list[list[int]] | np.ndarray | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    logprob_entropy: bool = False
    logprobs_mode: LogprobsMode | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    guided_decoding: GuidedDecodingParams | None = None
    # Set when the request is queued.
    _bad_words_token_ids: list[list[int]] | None = None
    _model_stop_token_ids: list[int] | None = None
    # Of a beam search's request, which reads a beam's next tokens: how many of its last tokens were generated.
    _beam_length: int | None = None

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        self._normalise_numbers()
        self._normalise_readings()
        self._normalise_flags()
        self._normalise_texts()
        self._normalise_bias()
        self._check_combinations()
        if self.use_beam_search:
            check_needs(self, "use_beam_search", BEAM_SEARCH_NEEDS)
        if self.trace_decode_token_ids:
            check_needs(self, "trace_decode_token_ids", TRACE_NEEDS)

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Like the constructor, with None for any field that shall have its default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    # The checks run in this order so that the first complaint is about a field by itself, then about two together.

    def _refuse_unsupported(self) -> None:
        for name, (neutral, advice) in REFUSED.items():
            value = getattr(self, name)
            if value is not None and not neutral(value):
                raise VLLMValidationError(f"{name} is not supported by this engine: {advice}", name, value)

    def _normalise_numbers(self) -> None:
        for name in NUMBERS:
            setattr(self, name, check_number(name, getattr(self, name), *LIMITS[name]))
        for name in INTEGERS:
            setattr(self, name, _limited_integer(name, getattr(self, name)))
        for name in OPTIONAL_INTEGERS:
            if getattr(self, name) is not None:
                setattr(self, name, _limited_integer(name, getattr(self, name)))
        self.temperature = raised_temperature(self.temperature)
        self.top_k = max(self.top_k, 0)
        # Upstream's spelling of "no seed".
        self.seed = None if self.seed == -1 else self.seed
        if self.truncate_prompt_tokens == 0:
            raise VLLMValidationError(
                "truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens", 0
            )

    def _normalise_readings(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            # An older spelling: True meant one more than the token itself.
            if isinstance(value, bool):
                value = 1 if value else None
            setattr(self, name, None if value is None else _limited_integer(name, value))
        check_boolean("logprob_entropy", self.logprob_entropy)
        mode = self.logprobs_mode
        if mode is not None and not (isinstance(mode, str) and mode in LOGPROBS_MODES):
            raise VLLMValidationError(
                f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {shown(mode)}", "logprobs_mode", mode
            )
        self.logprob_token_ids = check_token_ids("logprob_token_ids", self.logprob_token_ids) or None
        if self.prompt_logprob_token_ids is not None:
            name = "prompt_logprob_token_ids"
            self.prompt_logprob_token_ids = check_token_id_rows(name, self.prompt_logprob_token_ids)
        if self.prompt_logprob_start is not None:
            self.prompt_logprob_start = _limited_integer("prompt_logprob_start", self.prompt_logprob_start)
            if not self.reads_prompt:
                raise VLLMValidationError(
                    "prompt_logprob_start needs prompt_logprobs or prompt_logprob_token_ids",
                    "prompt_logprob_start",
                    self.prompt_logprob_start,
                )
        if self.logprob_entropy and self.num_logprobs is None and not self.reads_prompt:
            self.logprobs = 0

    def _normalise_flags(self) -> None:
        for name in (
            "use_beam_search",
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "flat_logprobs",
            "skip_clone",
        ):
            check_boolean(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            check_boolean("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        early = self.early_stopping
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            raise wrong_type("early_stopping", early, "True, False or 'never'")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise wrong_type("output_kind", self.output_kind, "a RequestOutputKind")

    def _normalise_texts(self) -> None:
        self.stop = check_texts("stop", self.stop)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise VLLMValidationError(
                f"stop has {len(self.stop)} strings, which is more than the limit of {MAX_STOP_STRINGS}",
                "stop",
                len(self.stop),
            )
        self.stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids)
        self.bad_words = check_texts("bad_words", self.bad_words)
        self.repetition_detection = check_repetition_detection(self.repetition_detection)
        if self.trace_decode_token_ids is not None:
            self.trace_decode_token_ids = (
                check_id_sequence("trace_decode_token_ids", self.trace_decode_token_ids) or None
            )

    def _normalise_bias(self) -> None:
        self.logit_bias = check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise VLLMValidationError("allowed_token_ids must not be empty", "allowed_token_ids", [])
        if self.logits_processors is not None:
            self.logits_processors = check_processors("logits_processors", self.logits_processors) or None
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise wrong_type("extra_args", self.extra_args, "a dict")

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise VLLMValidationError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}",
                "min_tokens",
                self.min_tokens,
            )
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings need detokenize=True, or nothing is there to search them in", "stop", self.stop
            )
        if self.num_sequences < self.n:
            raise VLLMValidationError(
                f"best_of must be at least n={self.n}, got {self.best_of}", "best_of", self.best_of
            )
        if self.num_sequences > self.n and self.output_kind is RequestOutputKind.DELTA and not self.use_beam_search:
            raise VLLMValidationError(
                "best_of above n cannot be streamed: which sequences are best is known at the end",
                "best_of",
                self.best_of,
            )
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if not self.use_beam_search and getattr(self, name) != default:
                raise VLLMValidationError(
                    f"{name} has no meaning without use_beam_search=True", name, getattr(self, name)
                )

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated: `best_of`, else `n`."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_distinct(self) -> int:
        """How many of these are computed: one where greedy sampling makes all of them the same."""
        return 1 if self.is_greedy and not self.use_beam_search else self.num_sequences

    @property
    def reads_prompt(self) -> bool:
        """Whether prompt positions are read."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    @property
    def first_prompt_row(self) -> int | None:
        """The first prompt position whose logits are read (they are of the token after it); None when none is."""
        return (self.prompt_logprob_start or 0) if self.reads_prompt else None

    @property
    def has_prompt_ids_a_position(self) -> bool:
        """Whether `prompt_logprob_token_ids` holds one row a position."""
        ids = self.prompt_logprob_token_ids
        return ids is not None and not isinstance(ids[0], int)

    def prompt_token_ids_of(self, row: int) -> list[int]:
        """The ids of `prompt_logprob_token_ids` that are read from the logits of prompt position `row`."""
        index = row - (self.prompt_logprob_start or 0) if self.has_prompt_ids_a_position else 0
        return [each for each in dict.fromkeys(self.prompt_ids_np[index].tolist()) if each >= 0]

    @cached_property
    def prompt_ids_np(self) -> np.ndarray:
        """`prompt_logprob_token_ids` as int32 [rows, K], -1 as padding: a row a position that is read, or, without
        `has_prompt_ids_a_position`, one row for all of them."""
        ids: Any = self.prompt_logprob_token_ids
        if isinstance(ids, np.ndarray):
            return ids
        return padded(ids if self.has_prompt_ids_a_position else [ids or []])

    @property
    def num_logprobs(self) -> int | None:
        """How many readings a position has beside the sampled token's: `logprobs`, else the number of
        `logprob_token_ids`, else None. Whether it is None is all that decides if readings exist."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with a seed of the request's own."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def all_stop_token_ids(self) -> set[int]:
        """`stop_token_ids`, and, once the request is queued, the model's end-of-sequence ids."""
        return {*(self.stop_token_ids or ()), *(self._model_stop_token_ids or ())}

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """`bad_words` as the tokenizer spells them; None until the request is queued."""
        return self._bad_words_token_ids

    @bad_words_token_ids.setter
    def bad_words_token_ids(self, value: list[list[int]] | None) -> None:
        self._bad_words_token_ids = value

    def update_from_generation_config(self, generation_config: dict[str, Any], eos_token_id: int | None = None) -> None:
        """Take the model's end-of-sequence ids: the tokenizer's and those of generation_config.json."""
        if self.ignore_eos:
            return
        ids = generation_config.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [ids]
        self._model_stop_token_ids = sorted({each for each in (*listed, eos_token_id) if each is not None})

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken, without randomness."""
        return self.temperature == 0

    @cached_property
    def logprob_token_ids_np(self) -> np.ndarray:
        """The ids as a read-only int32 array [num ids]; empty when none were asked for."""
        array = np.asarray(self.logprob_token_ids or [], dtype=np.int32)
        array.flags.writeable = False
        return array

    def verify(self, vocab_size: int, max_logprobs: int, max_logprob_token_ids: int) -> None:
        """Check what depends on the model and the engine.

        Args:
            vocab_size: number of token ids of the model.
            max_logprobs: cap on `logprobs` and `prompt_logprobs`; -1 means the vocabulary.
            max_logprob_token_ids: cap on the length of a list of ids to read; -1 means the vocabulary.

        Raises:
            VLLMValidationError: a cap is exceeded, or a token id is outside [0, vocab_size).
        """
        cap = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            asked = vocab_size if value == -1 else value
            if asked is not None and asked > cap:
                raise VLLMValidationError(
                    f"Requested {name} of {asked}, which is greater than max allowed: {cap}", name, value
                )
        cap = vocab_size if max_logprob_token_ids == -1 else max_logprob_token_ids
        for name, ids in self._id_lists_to_read():
            if len(ids) > cap:
                raise VLLMValidationError(
                    f"Requested {name} of length {len(ids)}, which is greater than max allowed: {cap}", name, len(ids)
                )
            check_vocabulary(name, ids, vocab_size)
        check_vocabulary("stop_token_ids", self.stop_token_ids or [], vocab_size)
        check_vocabulary("allowed_token_ids", self.allowed_token_ids or [], vocab_size)
        check_vocabulary("trace_decode_token_ids", self.trace_decode_token_ids or [], vocab_size)
        check_vocabulary("logit_bias", list(self.logit_bias or ()), vocab_size)

    def verify_prompt(self, prompt_len: int) -> None:
        """Check what depends on the prompt's length in tokens.

        Raises:
            VLLMValidationError: `prompt_logprob_start` lies behind the prompt, or `prompt_logprob_token_ids` holds
                another number of lists than positions are read.
        """
        start = self.first_prompt_row
        if start is None:
            return
        if start >= prompt_len:
            raise VLLMValidationError(
                f"prompt_logprob_start must be below the prompt's length of {prompt_len} tokens, got {start}",
                "prompt_logprob_start",
                start,
            )
        num_rows = prompt_len - 1 - start
        ids: Any = self.prompt_logprob_token_ids
        if self.has_prompt_ids_a_position and len(ids) != num_rows:
            raise VLLMValidationError(
                f"prompt_logprob_token_ids has {len(ids)} lists, but {num_rows} positions are read "
                f"(scored rows: prompt length {prompt_len} - 1 - prompt_logprob_start {start})",
                "prompt_logprob_token_ids",
                len(ids),
            )

    def _id_lists_to_read(self) -> list[tuple[str, list[int]]]:
        lists: Any = self.prompt_logprob_token_ids
        if isinstance(lists, np.ndarray):
            # The longest row and the one with the highest id stand for all.
            lists = lists[[(lists >= 0).sum(axis=1).argmax(), lists.max(axis=1).argmax()]].tolist()
        elif not self.has_prompt_ids_a_position:
            lists = [lists or []]
        own = ([token_id for token_id in each if token_id >= 0] for each in lists)
        named = (("prompt_logprob_token_ids", each) for each in own)
        return [("logprob_token_ids", self.logprob_token_ids or []), *named]

    def clone(self) -> SamplingParams:
        """A copy that shares no mutable field with this one; already validated, so nothing is checked again."""
        own = copy.copy(self)
        for name in _CONTAINERS:
            value = getattr(own, name)
            if value is not None:
                setattr(own, name, value.copy())
        return own

    def child(self, index: int) -> SamplingParams:
        """The parameters of sample `index` of a request for several: n = 1, a seed of its own, and prompt readings
        for the first alone, as they are the same for all."""
        own = self.clone()
        own.n, own.best_of = 1, None
        if self.num_distinct > self.n and self.num_logprobs is None:
            # The sequences are compared by their tokens' logprobs.
            own.logprobs = 0
        if index > 0:
            own.prompt_logprobs = own.prompt_logprob_token_ids = own.prompt_logprob_start = None
        if self.seed is not None:
            own.seed = (self.seed + index + 2**63) % 2**64 - 2**63
        return own


_CONTAINERS = (
    "stop", "stop_token_ids", "prompt_logprob_token_ids", "logprob_token_ids", "logit_bias", "allowed_token_ids",
    "extra_args", "bad_words", "trace_decode_token_ids", "logits_processors",
    "_bad_words_token_ids", "_model_stop_token_ids",
)  # fmt: skip


def _limited_integer(name: str, value: Any) -> int:
    return check_integer(name, value, *integer_limits(name))
