"""Sampling parameters, a user's wishes for one request: sampling, stopping, and which logprobs to return."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum, IntEnum
from functools import cached_property
from types import NoneType
from typing import Annotated, Any, Literal

import numpy as np

from vllm.exceptions import VLLMValidationError, shown
from vllm.logprobs.id_rows import padded
from vllm.params import sampling_fields as row
from vllm.params.beam_search import BeamSearchParams as BeamSearchParams
from vllm.params.sampling_fields import (
    BEAM_SEARCH_NEEDS,
    LOGPROBS_MODES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_SEQUENCES,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    TRACE_NEEDS,
    At,
    LogprobsMode,
    SamplingField,
    check_needs,
    rows_of,
)
from vllm.params.structured import GuidedDecodingParams as GuidedDecodingParams
from vllm.params.structured import RepetitionDetectionParams as RepetitionDetectionParams
from vllm.params.structured import StructuredOutputsParams as StructuredOutputsParams
from vllm.params.structured import check_repetition_detection, check_structured
from vllm.utils.checks import MAX_INTEGER, check_vocabulary, raised_temperature, wrong_type
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


def _output_kind(**more: Any) -> SamplingField:
    def check(name: str, value: Any) -> RequestOutputKind:
        if not isinstance(value, RequestOutputKind):
            raise wrong_type(name, value, "a RequestOutputKind")
        return value

    return SamplingField(check=check, unpacked=RequestOutputKind, **more)


def _repetition() -> SamplingField:
    return SamplingField(
        check=lambda name, value: check_repetition_detection(value),
        unpacked=lambda fields: RepetitionDetectionParams(**fields),
    )


def _form(**more: Any) -> SamplingField:
    return SamplingField(
        check=check_structured,
        # The text alone: what compiles it has compiled it.
        packed=lambda form: None if form is None else asdict(form) | {"grammar": form.grammar and str(form.grammar)},
        unpacked=lambda fields: StructuredOutputsParams(**fields),
        **more,
    )


def _not_zero(value: int) -> int:
    if value == 0:
        raise VLLMValidationError("truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens", 0)
    return value


_NO_EFFORT = "the model has no reasoning effort to set"
_BEAMS = "beam searches run by /v1/completions, /v1/chat/completions and LLM.beam_search"


class SamplingParams(Struct, dict=True):
    """Parameters of one request. Field names, defaults and meanings are vLLM's. None means the default;
    `max_tokens=None` as many as fit.

    Readings: `logprobs=k` returns, at every generated position, the sampled token and the k most likely ones
    (-1: the whole vocabulary). `logprob_token_ids` returns the sampled token and exactly these ids. Both together
    return the sampled token, the top k and the ids. `logprobs_mode` (None: the engine's) says what is read:
    "raw_logprobs" / "raw_logits" before any processing, "processed_logprobs" / "processed_logits" after penalties,
    bias, temperature and truncation. `logprob_entropy` adds each position's entropy. `logprob_ranks=False` leaves the
    ranks out, which of many ids a position saves time: `Logprob.rank` is None and `ranks` hold 0.

    `prompt_logprobs=k` and `prompt_logprob_token_ids` (one list for all positions, or one a position) read the
    prompt's tokens in the same way, from the logits of position `prompt_logprob_start` on: the first token that
    is read is the one after it, and lists a position are (prompt length - 1 - prompt_logprob_start) many; an integer
    array [rows, K] is the same, with -1 as padding. Prompt readings are always of the model's logits.

    `structured_outputs` binds the answer to a form, whose readings stay the model's; with `grammar_readings` each
    position's `allowed_mass` says how much probability the model gave to all that the form allowed. `choice_readings`
    adds the logprob of every text of its `choice`, `field_readings` those of the values of each field of its `json`
    whose values the schema counts (enum, const, boolean, null), whatever was drawn.

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

    # fmt: off
    n: Annotated[int, row.count_of_sequences()] = 1
    presence_penalty: Annotated[float, row.number(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, row.number(-2, 2)] = 0.0
    # Beyond these limits, float32 logits would overflow.
    repetition_penalty: Annotated[float, row.number(1e-6, 1e6, in_model=True)] = 1.0
    temperature: Annotated[float, row.number(
        0, MAX_TEMPERATURE, then=raised_temperature, in_model=True,
        flag="0 = greedy; left out: the model's own, or 1")] = 1.0
    watermarking: Annotated[bool | None, row.refused(
        row.is_zero, "texts are not watermarked; leave it out", ((False,), "texts are not watermarked"))] = None
    top_p: Annotated[float, row.number(
        0, 1, open_low=True, in_model=True,
        flag="draw from the most likely tokens that hold this much probability")] = 1.0
    top_k: Annotated[int, row.integer(-1, 2**31 - 1, then=lambda k: max(k, 0), in_model=True)] = 0
    min_p: Annotated[float, row.number(0, 1, in_model=True)] = 0.0
    # -1 is upstream's spelling of "no seed".
    seed: Annotated[int | None, row.integer(-(2**63), then=lambda seed: None if seed == -1 else seed)] = None
    stop: Annotated[str | list[str] | None, row.texts(MAX_STOP_STRINGS)] = None
    stop_token_ids: Annotated[list[int] | None, row.token_ids(none_is_empty=True, in_vocabulary=True)] = None
    ignore_eos: bool = False
    max_tokens: Annotated[int | None, row.count_of_tokens(in_model=True, flag="longest answer, in tokens")] = 16
    min_tokens: Annotated[int, row.integer(0)] = 0
    # Completions and chat count the most likely tokens in ways of their own.
    logprobs: Annotated[int | None, row.top_logprobs(at=At.IDS)] = None
    prompt_logprobs: Annotated[int | None, row.top_logprobs()] = None
    prompt_logprob_token_ids: Annotated[Sequence[int | list[int]] | None, row.id_rows(
        about="Ids to read at all prompt positions, or a row of ids a position, with -1 as padding.")] = None
    prompt_logprob_start: Annotated[int | None, row.integer(0)] = None
    logprob_token_ids: Annotated[list[int] | None, row.token_ids(
        about="Token ids to read at every generated position, with or without `logprobs`.")] = None
    flat_logprobs: Annotated[bool, row.boolean(at=At.NONE, ignored_at=At.IDS)] = False
    detokenize: Annotated[bool, row.boolean(
        at=At.IDS, about="Left out, as far as output_mode and stop need it.")] = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: Annotated[RequestOutputKind, _output_kind(
        at=At.NONE, ignored_at=At.IDS)] = RequestOutputKind.CUMULATIVE
    stream_interval: Annotated[int | None, row.integer(
        0, about="Tokens a chunk, after the first one; 1 when left out.")] = None
    skip_clone: Annotated[bool, row.boolean(at=At.NONE, ignored_at=At.IDS)] = False
    structured_outputs: Annotated[StructuredOutputsParams | None, _form(
        about="The answer's form: one of json, regex, choice, grammar, json_object, structural_tag.")] = None
    logit_bias: Annotated[dict[int, float] | None, row.biases()] = None
    allowed_token_ids: Annotated[list[int] | None, row.token_ids(least=1, in_vocabulary=True)] = None
    # Completions and chat call it vllm_xargs.
    extra_args: Annotated[dict[str, Any] | None, row.mapping(
        at=At.IDS, about="Arguments of custom logits processors.")] = None
    bad_words: Annotated[list[str] | None, row.texts()] = None
    skip_reading_prefix_cache: Annotated[bool | None, row.boolean(at=At.IDS)] = None
    thinking_token_budget: Annotated[int | None, row.refused(
        lambda value: False, "bound the whole output by max_tokens", ((-1,), _NO_EFFORT))] = None
    repetition_detection: Annotated[RepetitionDetectionParams | None, _repetition()] = None
    routed_experts_prompt_start: Annotated[int, row.refused(
        row.is_zero, "routed experts are not returned", ((0,), "nothing reads which experts a token had"))] = 0
    trace_decode_token_ids: Annotated[list[int] | None, row.id_sequence(
        at=At.IDS, in_vocabulary=True,
        about="Tokens to generate whatever the model says, with their readings; max_tokens is their number.")] = None
    best_of: Annotated[int | None, row.count_of_sequences()] = None
    use_beam_search: Annotated[bool, row.boolean(
        at=At.TEXTS, refusal=((False,), _BEAMS),
        about="Find the `n` best answers by a beam search of that width.")] = False
    length_penalty: Annotated[float, row.number(-100, 100, at=At.TEXTS, refusal=((1,), _BEAMS))] = 1.0
    early_stopping: Annotated[bool | Literal["never"], row.early_stopping(
        at=At.TEXTS, refusal=((False,), _BEAMS))] = False
    logprob_entropy: Annotated[bool, row.boolean(about="Read each position's entropy, in nats, too.")] = False
    logprob_ranks: Annotated[bool, row.boolean(
        alias="prompt_ranks", about="false: leave the ranks of readings out, which are null then.")] = True
    logprobs_mode: Annotated[LogprobsMode | None, row.mode()] = None
    truncate_prompt_tokens: Annotated[int | None, row.integer(-1, then=_not_zero)] = None
    logits_processors: Annotated[list[Callable[..., Any]] | None, row.processors(
        at=At.NONE, refusal=(([],), "they are Python; load one with --logits-processors"))] = None
    guided_decoding: Annotated[GuidedDecodingParams | None, _form(at=At.NONE)] = None
    grammar_readings: Annotated[bool, row.boolean(
        about="The model's probability of all tokens that structured_outputs allows, at each position.")] = False
    choice_readings: Annotated[bool, row.boolean(
        about="The model's logprob of each text of structured_outputs.choice.")] = False
    field_readings: Annotated[bool, row.boolean(
        about="The model's logprob of each value of a field of structured_outputs.json that has few.")] = False
    # fmt: on
    # Set when the request is queued.
    _bad_words_token_ids: list[list[int]] | None = None
    _model_stop_token_ids: list[int] | None = None
    _grammar: str | None = None
    # A beam search's request reads a beam's next tokens: how many of its last tokens were generated.
    _beam_length: int | None = None
    # The prompt's readings come in outputs of their own, as they are made (with DELTA).
    _prompt_in_parts: bool = False

    def __post_init__(self) -> None:
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default:
                setattr(self, name, check(name, value))
        self._check_combinations()

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Like the constructor, with None for any field that shall have its default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def _check_combinations(self) -> None:
        if self.guided_decoding is not None:
            if self.structured_outputs not in (None, self.guided_decoding):
                message = "guided_decoding is an older name of structured_outputs: give one of them"
                raise VLLMValidationError(message, "guided_decoding", self.guided_decoding)
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None  # type: ignore[assignment]
        for_connector = (self.extra_args or {}).get("kv_transfer_params")
        if not isinstance(for_connector, dict | None):
            message = f"extra_args: kv_transfer_params must be a dict, got {shown(for_connector)}"
            raise VLLMValidationError(message, "extra_args", for_connector)
        if self.grammar_readings and self.structured_outputs is None:
            raise VLLMValidationError("grammar_readings need structured_outputs", "grammar_readings", True)
        for name, kind in (("choice_readings", "choice"), ("field_readings", "json")):
            if getattr(self, name) and getattr(self.structured_outputs, kind, None) is None:
                raise VLLMValidationError(f"{name} need structured_outputs.{kind}", name, True)
        if self.prompt_logprob_start is not None and not self.reads_prompt:
            raise VLLMValidationError(
                "prompt_logprob_start needs prompt_logprobs or prompt_logprob_token_ids",
                "prompt_logprob_start",
                self.prompt_logprob_start,
            )
        if self.logprob_entropy and self.num_logprobs is None and not self.reads_prompt:
            self.logprobs = 0
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
        if self.use_beam_search:
            check_needs(self, "use_beam_search", BEAM_SEARCH_NEEDS)
        if self.trace_decode_token_ids:
            check_needs(self, "trace_decode_token_ids", TRACE_NEEDS)

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

    def prompt_id_table(self, prompt_len: int) -> np.ndarray:
        """`prompt_ids_np` with a row for each position that is read of a prompt of so many tokens."""
        ids = self.prompt_ids_np
        num_rows = prompt_len - 1 - (self.prompt_logprob_start or 0)
        return ids if self.has_prompt_ids_a_position else np.broadcast_to(ids, (num_rows, ids.shape[1]))

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

    @property
    def reads_form(self) -> bool:
        """Whether the values that the form allows are read when the answers are there."""
        return self.choice_readings or self.field_readings

    @property
    def reads_generated(self) -> bool:
        """Whether generated positions are read."""
        return self.num_logprobs is not None or self.grammar_readings

    @property
    def grammar(self) -> str | None:
        """`structured_outputs` as a grammar; None without, and until the request is queued."""
        return self._grammar

    @grammar.setter
    def grammar(self, value: str | None) -> None:
        self._grammar = value

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
        for name in _IN_VOCABULARY:
            check_vocabulary(name, getattr(self, name) or (), vocab_size)

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
        for name in _COPIED:
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


FIELDS = rows_of(SamplingParams)
"""The rows of all public fields, by name."""
MODEL_DEFAULTS = {"max_new_tokens" if name == "max_tokens" else name: name for name in FIELDS if FIELDS[name].in_model}
"""Names in generation_config.json -> fields."""
# Signatures show types alone.
SamplingParams.__annotations__.update(typing.get_type_hints(SamplingParams))


def _or_default(name: str, default: Any, check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """The check of a field; None is the default where it means nothing else."""
    if NoneType in typing.get_args(SamplingParams.__annotations__[name]):
        return check
    return lambda name, value: default if value is None else check(name, value)


_CHECKS = [
    # No value is this object, so None is checked, too.
    (name, object() if field.none_is_empty else default, _or_default(name, default, field.check))
    for (name, field), default in zip(FIELDS.items(), SamplingParams.__struct_defaults__, strict=False)
]
_COPIED = [name for name in FIELDS if FIELDS[name].is_copied] + ["_bad_words_token_ids", "_model_stop_token_ids"]
_IN_VOCABULARY = [name for name in FIELDS if FIELDS[name].in_vocabulary]
