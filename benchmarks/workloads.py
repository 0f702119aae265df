"""Options and work of every engine: prompts of token ids from a seed, the same for all."""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

WORK_ROWS = (
    "score",
    "score_prefix",
    "questions",
    "fullvocab",
    "decode64",
    "decode64_ids",
    "decode1",
    "prompt_logprobs",
)
# Prompts of so many tokens, and answers behind one that the engine has computed before; not measured unless asked for.
LONG_ROWS = {"prompt_1k": 1000, "prompt_4k": 4000, "prompt_8k": 8000, "prompt_32k": 32000, "decode_8k": 8000}
# teacher.py reads these of prompts, beside plain prefill: ids a position, top-k, ranks.
TEACHER_ROWS = {
    "prefill": (0, None, True),
    "tokens": (0, 0, True),
    "ids64": (64, None, True),
    "ids256": (256, None, True),
    "ids256_no_ranks": (256, None, False),
    "likely256": (-256, None, True),
    "top256": (0, 256, True),
}
# structured.py measures these: whether answers are bound to a form, temperature, requests, tokens of each.
STRUCTURED_ROWS = {
    "free64": (False, 0.0, 64, 64),
    "json64": (True, 0.0, 64, 64),
    "free64_drawn": (False, 1.0, 64, 64),
    "json64_drawn": (True, 1.0, 64, 64),
    "free_first": (False, 0.0, 32, 1),
    "json_first": (True, 0.0, 32, 1),
}
# speculation.py measures these: whether answers copy, temperature, requests, whether one after another, ids read.
SPECULATION_ROWS = {
    "copies1": (True, 0.0, 3, True, False),
    "copies1_ids": (True, 0.0, 3, True, True),
    "answers1": (False, 0.0, 3, True, False),
    "drawn1": (False, 1.0, 3, True, False),
    "drawn1_ids": (False, 1.0, 3, True, True),
    "copies16": (True, 0.0, 16, False, False),
    "copies16_ids": (True, 0.0, 16, False, True),
    "answers16": (False, 0.0, 16, False, False),
    "drawn16": (False, 1.0, 16, False, False),
}
PROMPTS_VARIABLE = "BENCHMARK_PROMPTS"
"""Names a file of token ids, for rows whose prompts are texts: of each row, by repeat from -1 on, its prompts."""
# In the order of the tables; `startup` and `peak_memory` are measured from outside the process.
ROWS = ("startup", *WORK_ROWS, "peak_memory")
ALL_ROWS = (*ROWS[:-1], *LONG_ROWS, ROWS[-1])

LABEL_IDS = (4321, 1234)
READ_IDS = tuple(range(1000, 3000, 100))
STARTUP_PROMPT = "Review: The food was cold and the waiter rude.\nIs this review positive or negative? It is"

# Ids that are ordinary tokens in any model with a vocabulary of 8,192 or more.
_FIRST_ID, _LAST_ID = 300, 8000


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine's process.

    Attributes:
        kind: ours, upstream, transformers or llama.cpp.
        model: folder, or .gguf file for llama.cpp and ours; None = our embedded model.
        dtype: of weights and activations; llama.cpp uses its file's.
        cores: processors to pin to, one thread each.
        quantization, enforce_eager, model_impl: our settings of these names.
        speculative: of ours and upstream, speculative_config; of llama.cpp, those fields of it that it has.
        environment: variables to set.
        checkout: of ours, another folder to import it from.
    """

    kind: str
    model: str | None
    dtype: str
    cores: list[int]
    quantization: str | None = None
    enforce_eager: bool = False
    model_impl: str | None = None
    speculative: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    checkout: str | None = None


@dataclass(frozen=True)
class Workload:
    """One row's work.

    Attributes:
        prompts: token ids, one list a request.
        max_tokens: tokens to generate for each, ignoring the end token.
        unit: "req/s" or "tok/s".
        shared: number of leading ids that all prompts have in common.
        read_ids: ids whose logprobs are read at every generated position.
        full_vocabulary: read them from the whole vocabulary's logprobs.
        reads_prompt: read the logprob of every prompt token; the reading is their mean.
        temperature: of the draws; 0 = the most likely token.
        has_form: answers are bound to structured_forms.
        one_by_one: each request is sent when the one before it has ended.
        is_computed: the prompts' keys and values are in the engine's prefix cache before the clock starts.
        teacher: of TEACHER_ROWS; other ids at each position, or as many of each position's most likely ones if < 0.
    """

    prompts: list[list[int]]
    max_tokens: int
    unit: str
    shared: int = 0
    read_ids: tuple[int, ...] = ()
    full_vocabulary: bool = False
    reads_prompt: bool = False
    temperature: float = 0.0
    has_form: bool = False
    one_by_one: bool = False
    is_computed: bool = False
    teacher: tuple[int, int | None, bool] | None = None

    @property
    def amount(self) -> int:
        """Requests or generated tokens, by `unit`."""
        if self.teacher is not None:
            return sum(map(len, self.prompts))
        return len(self.prompts) * (self.max_tokens if self.unit == "tok/s" else 1)

    def ids_a_position(self, prompt: list[int], num_ids: int) -> np.ndarray:
        """int32 [len(prompt) - 1, num_ids], other ordinary tokens at each position."""
        rng = np.random.default_rng(prompt[:8])
        return rng.integers(_FIRST_ID, _LAST_ID, (len(prompt) - 1, num_ids), dtype=np.int32)

    @property
    def digest(self) -> str:
        """Hash of the prompts, to verify that engines were given the same work."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]


def make_workload(row: str, repeat: int, scale: float = 1.0) -> Workload:
    """The work of a row of WORK_ROWS or LONG_ROWS, or of decode16. Each repeat (-1: the warm-up) has other prompts, so
    that no cache helps.

    `decode64` and `decode64_ids` have prompts of the same lengths in the same repeat, to be compared pair by pair.
    `scale` is a factor on the numbers of prompts and tokens.
    """
    rng = random.Random(f"{row}/{repeat}")
    if row in ("score", "fullvocab"):
        prompts = [_ids(rng, rng.randint(30, 50)) for _ in range(_scaled(64 if row == "fullvocab" else 256, scale))]
        return Workload(prompts, 1, "req/s", read_ids=LABEL_IDS, full_vocabulary=row == "fullvocab")
    if row == "score_prefix":
        prefix = _ids(rng, _scaled(450, scale))
        prompts = [prefix + _ids(rng, rng.randint(15, 25)) for _ in range(_scaled(256, scale))]
        return Workload(prompts, 1, "req/s", shared=len(prefix), read_ids=LABEL_IDS)
    if row == "questions":
        state = _ids(rng, _scaled(1000, scale))
        prompts = [state + _ids(rng, rng.randint(30, 40)) for _ in range(_scaled(64, scale))]
        return Workload(prompts, 1, "req/s", shared=len(state), read_ids=LABEL_IDS)
    if row in ("decode16", "decode64", "decode64_ids"):
        lengths = random.Random(f"decode64 lengths/{repeat}")
        count = 16 if row == "decode16" else 64
        prompts = [_ids(rng, lengths.randint(12, 20)) for _ in range(_scaled(count, scale))]
        ids = READ_IDS if row == "decode64_ids" else ()
        return Workload(prompts, _scaled(64, scale), "tok/s", read_ids=ids)
    if row == "decode1":
        return Workload([_ids(rng, 16)], _scaled(64, scale), "tok/s")
    if row == "prompt_logprobs":
        prompts = [_ids(rng, _scaled(rng.randint(900, 1100), scale)) for _ in range(_scaled(8, scale))]
        return Workload(prompts, 1, "req/s", reads_prompt=True)
    if row in LONG_ROWS:
        # As many tokens for each length, up to one prompt. A computed prompt has one token beyond its last full block.
        length, is_computed = _scaled(LONG_ROWS[row], scale), row.startswith("decode")
        prompts = [_ids(rng, length + is_computed) for _ in range(1 if is_computed else max(1, 8000 // LONG_ROWS[row]))]
        max_tokens, unit = (_scaled(64, scale), "tok/s") if is_computed else (1, "req/s")
        return Workload(prompts, max_tokens, unit, read_ids=LABEL_IDS, is_computed=is_computed)
    if row in STRUCTURED_ROWS:
        has_form, temperature, count, max_tokens = STRUCTURED_ROWS[row]
        lengths = random.Random(f"structured lengths/{repeat}")
        prompts = [_ids(rng, lengths.randint(60, 80)) for _ in range(_scaled(count, scale))]
        fields = {"temperature": temperature, "has_form": has_form, "one_by_one": max_tokens == 1}
        return Workload(prompts, max_tokens, "req/s" if max_tokens == 1 else "tok/s", **fields)
    if row in TEACHER_ROWS:
        prompts = [_ids(rng, _scaled(1024, scale)) for _ in range(_scaled(8, scale))]
        return Workload(prompts, 1, "tok/s", teacher=TEACHER_ROWS[row])
    if row in SPECULATION_ROWS:
        _, temperature, _, one_by_one, reads = SPECULATION_ROWS[row]
        prompts = json.loads(Path(os.environ[PROMPTS_VARIABLE]).read_text())[row][repeat + 1]
        fields = {"temperature": temperature, "one_by_one": one_by_one, "read_ids": READ_IDS if reads else ()}
        return Workload(prompts, _scaled(64, scale), "tok/s", **fields)
    known = (*WORK_ROWS, *LONG_ROWS, *TEACHER_ROWS, *STRUCTURED_ROWS)
    raise ValueError(f"unknown row {row!r}; known: {', '.join(known)}")


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]


def _scaled(count: int, scale: float) -> int:
    return max(2, round(count * scale))
