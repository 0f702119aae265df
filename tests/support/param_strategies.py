"""Values for every field of SamplingParams: sound ones, doubtful ones, and what no field can use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from byte_tokenizer import VOCAB_SIZE
from hypothesis import strategies as st

from vllm import SamplingParams
from vllm.sampling_params import LOGPROBS_MODES, MAX_SEQUENCES, RepetitionDetectionParams, RequestOutputKind

FIELDS = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]


def ring() -> list[Any]:
    """A list that holds itself."""
    values: list[Any] = [1]
    values.append(values)
    return values


def fail(*_: Any) -> Any:
    raise RuntimeError("a processor that fails")


def one_too_many(_a: Any, _b: Any, _c: Any, _d: Any) -> None: ...


# Each is made anew: iterators are used up, lists may be changed.
JUNK: dict[str, Callable[[], Any]] = {
    **{
        repr(value): lambda value=value: value
        for value in (
            *(None, True, False, -1, 0, 1, 2, 5, 10**400, -(10**400), 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63),
            *(-(2**63), -(2**63) - 1, VOCAB_SIZE - 1, VOCAB_SIZE, 127, 128, 129),
            *(0.0, -0.0, 0.5, 1.0, 1.5, 5e-324, 1e-6, 1e30, 1e308, -1e308, math.nan, math.inf, -math.inf),
            *("", " ", "a", "auto", "never", "\ud800", "\x00", "1", "raw_logits", "🙂", b"", b"a", 1j, Decimal("NaN")),
            *(Decimal(1), Fraction(1, 2), (), (1,), ((),), Ellipsis, int, SamplingParams, RequestOutputKind.DELTA),
            *(range(0), range(3), range(-3, 0), range(VOCAB_SIZE), range(VOCAB_SIZE + 1), frozenset({1})),
        )
    },
    "[]": list,
    "{}": dict,
    "set()": set,
    "object": object,
    "ring": ring,
    "generator": lambda: (value for value in (1, 2)),
    "count": itertools.count,
    "repeat": lambda: itertools.repeat("a"),
    "range(2**40)": lambda: range(2**40),
    "lambda": lambda: lambda: None,
    "[[]]": lambda: [[]],
    "[[], [1]]": lambda: [[], [1]],
    "[1, [2]]": lambda: [1, [2]],
    "[None]": lambda: [None],
    "[True]": lambda: [True],
    "[1.0]": lambda: [1.0],
    "[nan]": lambda: [math.nan],
    "['']": lambda: [""],
    "['\\ud800']": lambda: ["\ud800"],
    "[b'a']": lambda: [b"a"],
    "[-1]": lambda: [-1],
    "[2**31]": lambda: [2**31],
    "[2**64]": lambda: [2**64],
    "[10**400]": lambda: [10**400],
    "10**5000": lambda: 10**5000,
    "-(10**5000)": lambda: -(10**5000),
    "[10**5000]": lambda: [10**5000],
    "{10**5000: 1}": lambda: {10**5000: 1},
    "[[-(10**5000)]]": lambda: [[-(10**5000)]],
    "[vocabulary]": lambda: [VOCAB_SIZE],
    "{1: nan}": lambda: {1: math.nan},
    "{1: 10**400}": lambda: {1: 10**400},
    "{'a': 1}": lambda: {"a": 1},
    "{'\\u0663': 1}": lambda: {"\u0663": 1},
    "{'9' * 5000: 1}": lambda: {"9" * 5000: 1},
    "{1: None}": lambda: {1: None},
    "{1: [1]}": lambda: {1: [1]},
    "{-1: 1}": lambda: {-1: 1},
    "{True: 1}": lambda: {True: 1},
    "{2**64: 1}": lambda: {2**64: 1},
    "{None: 1}": lambda: {None: 1},
    "np.int64(3)": lambda: np.int64(3),
    "np.uint64(2**64 - 1)": lambda: np.uint64(2**64 - 1),
    "np.float32(1)": lambda: np.float32(1),
    "np.float16(nan)": lambda: np.float16("nan"),
    "np.bool_(True)": lambda: np.bool_(True),
    "np.str_('a')": lambda: np.str_("a"),
    "np.datetime64": lambda: np.datetime64("2020"),
    "np.array(1)": lambda: np.array(1),
    "np.array([])": lambda: np.array([]),
    "np.array([1])": lambda: np.array([1]),
    "np.array([1, 2])": lambda: np.array([1, 2]),
    "np.array([nan])": lambda: np.array([math.nan]),
    "np.array(['a', 'b'])": lambda: np.array(["a", "b"]),
    "np.array(object)": lambda: np.array([1, None], dtype=object),
    "np.zeros((2, 2))": lambda: np.zeros((2, 2)),
    "np.ones((3, 2), int)": lambda: np.ones((3, 2), dtype=np.int64),
    "np.ones((2, 2, 2), int)": lambda: np.ones((2, 2, 2), dtype=np.int64),
    "np.ones((0, 2), int)": lambda: np.ones((0, 2), dtype=np.int64),
    "torch.tensor(1)": lambda: torch.tensor(1),
    "torch.tensor([1, 2])": lambda: torch.tensor([1, 2]),
    "torch.tensor([0.5])": lambda: torch.tensor([0.5]),
    "torch.tensor([True])": lambda: torch.tensor([True]),
    "torch.ones(2, 2)": lambda: torch.ones(2, 2, dtype=torch.int64),
    "processor of four": lambda: [one_too_many],
    "processor is a class": lambda: [dict],
    "processor fails": lambda: [fail],
    "processor returns None": lambda: [lambda logits: None],
    "processor returns a text": lambda: [lambda ids, logits: "a"],
    "processor returns nan": lambda: [lambda logits: logits * math.nan],
    "processor returns -inf": lambda: [lambda logits: torch.full_like(logits, -math.inf)],
    "processor returns inf": lambda: [lambda ids, logits: torch.full_like(logits, math.inf)],
    "processor cuts": lambda: [lambda prompt, ids, logits: logits[..., :5]],
    "processor returns numpy": lambda: [lambda logits: logits.numpy()],
    "processor returns integers": lambda: [lambda logits: logits.long()],
    "extra_args": lambda: {"a": [1, {"b": math.nan}], "c": object()},
}

token_ids = st.integers(0, VOCAB_SIZE - 1)
id_lists = st.one_of(
    st.lists(token_ids, max_size=6),
    st.lists(token_ids, min_size=1, max_size=200),
    st.tuples(token_ids, token_ids),
    st.builds(range, token_ids, token_ids),
    st.lists(token_ids, max_size=5).map(lambda ids: np.array(ids, dtype=np.int32)),
    st.lists(token_ids, max_size=5).map(torch.tensor),
    st.lists(token_ids.map(np.int16), max_size=5),
)
texts = st.one_of(st.text(max_size=3), st.sampled_from(["th", " the", "a", "stop", "\ufffd"]))
numbers = st.one_of(st.floats(), st.integers(-3, 3), st.floats(width=32).map(np.float32))
processors = st.sampled_from([[lambda logits: logits, lambda ids, logits: logits.mul_(2)], [torch.Tensor.neg]])

# Sound for some request. Those of n, best_of and max_tokens stay where a run is short.
SOUND: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "best_of": st.one_of(st.none(), st.integers(1, 4)),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.one_of(st.floats(0, 2, exclude_min=True), st.floats(2, 1e6)),
    "temperature": st.one_of(st.just(0), st.floats(0, 2), st.floats(0, 0.02), st.floats(0, allow_infinity=False)),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, VOCAB_SIZE + 2),
    "min_p": st.floats(0, 1),
    "seed": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "use_beam_search": st.booleans(),
    "length_penalty": st.floats(-100, 100),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "stop": st.one_of(texts, st.lists(texts, max_size=3)),
    "stop_token_ids": id_lists,
    "bad_words": st.lists(texts, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "max_tokens": st.one_of(st.integers(0, 6), st.none()),
    "min_tokens": st.integers(0, 6),
    "logprobs": st.integers(-1, VOCAB_SIZE),
    "prompt_logprobs": st.integers(-1, VOCAB_SIZE),
    "logprob_token_ids": id_lists,
    "prompt_logprob_token_ids": st.one_of(id_lists, st.lists(st.lists(token_ids, max_size=3), max_size=5)),
    "prompt_logprob_start": st.integers(0, 6),
    "logprob_entropy": st.booleans(),
    "logprob_ranks": st.booleans(),
    "logprobs_mode": st.sampled_from([None, *LOGPROBS_MODES]),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(-1, 130),
    "output_kind": st.sampled_from(RequestOutputKind),
    "logits_processors": processors,
    "logit_bias": st.dictionaries(st.one_of(token_ids, token_ids.map(str)), st.floats(-100, 100), max_size=5),
    "allowed_token_ids": id_lists,
    "extra_args": st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    "flat_logprobs": st.booleans(),
    "skip_clone": st.booleans(),
    "skip_reading_prefix_cache": st.sampled_from([None, True, False]),
    "stream_interval": st.sampled_from([None, 0, 1, 3]),
    "repetition_detection": st.sampled_from([None, RepetitionDetectionParams(), RepetitionDetectionParams(4, 1, 2)]),
    "trace_decode_token_ids": st.one_of(st.none(), id_lists),
    # Taken at their neutral values alone.
    "watermarking": st.sampled_from([None, False]),
    "structured_outputs": st.none(),
    "guided_decoding": st.none(),
    "grammar_readings": st.just(False),
    "choice_readings": st.just(False),
    "field_readings": st.just(False),
    "thinking_token_budget": st.none(),
    "routed_experts_prompt_start": st.just(0),
}

junk = st.sampled_from(sorted(JUNK)).map(lambda name: JUNK[name]())


# The other fields are drawn around these, so that not every request fails at the first check.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0, "use_beam_search": True, "best_of": 3},
    {"prompt_logprobs": 2},
    {"prompt_logprob_token_ids": [1, 2], "max_tokens": 0},
]


@st.composite
def sampling_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of SamplingParams: a few fields of a request of some kind, one in five with a value of any type."""
    chosen = draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=4))
    fields = {"max_tokens": 3, **draw(st.sampled_from(KINDS)), **{field: draw(SOUND[field]) for field in chosen}}
    if draw(st.integers(0, 4)) == 0:
        field = draw(st.sampled_from(FIELDS))
        fields[field] = draw(st.one_of(junk, numbers, st.lists(junk, max_size=2)))
    return {name: 3 if makes_a_crowd(name, value) else value for name, value in fields.items()}


def makes_a_crowd(name: str, value: Any) -> bool:
    """Whether the value is a sound number of sequences that would take long to run."""
    return name in ("n", "best_of") and isinstance(value, (int, np.integer)) and 5 < value <= MAX_SEQUENCES
