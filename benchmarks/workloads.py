"""What every engine is given: its options, and token ids made from a seed, so that all of them do the same work."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

# The rows that an engine's process is asked for, by name and number of the repeat.
WORK_ROWS = ("score", "score_prefix", "fullvocab", "decode64", "decode64_ids", "decode1", "prompt_logprobs")
# All rows, in the order of the tables. `startup` and `peak_memory` are taken from outside the process.
ROWS = ("startup", *WORK_ROWS, "peak_memory")

LABEL_IDS = (4321, 1234)
READ_IDS = tuple(range(1000, 3000, 100))
STARTUP_PROMPT = "Review: The food was cold and the waiter rude.\nIs this review positive or negative? It is"

# Ids that are ordinary tokens in any model with a vocabulary of 8,192 or more.
_FIRST_ID, _LAST_ID = 300, 8000


KINDS = ("ours", "upstream", "transformers", "llama.cpp")


@dataclass(frozen=True)
class EngineOptions:
    """What an engine's process is started with.

    Attributes:
        kind: one of KINDS.
        model: folder, or .gguf file for llama.cpp and ours; None = ours' embedded model.
        dtype: of the weights and activations; llama.cpp takes its file's.
        cores: processors that its threads are pinned to, one thread each.
        quantization: ours' setting of that name.
        enforce_eager: ours' setting of that name: no step is recorded and replayed.
    """

    kind: str
    model: str | None
    dtype: str
    cores: list[int]
    quantization: str | None = None
    enforce_eager: bool = False


@dataclass(frozen=True)
class Workload:
    """One row's work.

    Attributes:
        prompts: token ids, one list a request.
        shared: how many leading ids all prompts have in common; 0 = each is its own.
        max_tokens: tokens to generate a prompt, greedily, whatever the end token says.
        read_ids: ids whose logprobs are wanted at every generated position; empty = none.
        reads_prompt: the logprob of every prompt token is wanted; the reading is their mean.
        full_vocabulary: obtain them through the whole vocabulary's logprobs, as when ids cannot be asked for.
        unit: "req/s" or "tok/s".
    """

    prompts: list[list[int]]
    max_tokens: int
    unit: str
    shared: int = 0
    read_ids: tuple[int, ...] = ()
    full_vocabulary: bool = False
    reads_prompt: bool = False

    @property
    def amount(self) -> int:
        """What `unit` counts: requests or generated tokens."""
        return len(self.prompts) * (self.max_tokens if self.unit == "tok/s" else 1)

    @property
    def digest(self) -> str:
        """Equal for equal prompts: engines that report the same one were given the same work."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]


def make_workload(row: str, repeat: int, scale: float = 1.0) -> Workload:
    """The work of a row. Each repeat has other prompts, so no cache of an earlier one can help.

    `decode64` and `decode64_ids` have prompts of the same lengths in the same repeat, but not the same ids: their
    times can be compared pair by pair.

    Args:
        row: one of WORK_ROWS.
        repeat: number of the repeat; -1 is the warm-up.
        scale: factor on the numbers of prompts and tokens, for trying things out.
    """
    rng = random.Random(f"{row}/{repeat}")
    if row in ("score", "fullvocab"):
        prompts = [_ids(rng, rng.randint(30, 50)) for _ in range(_scaled(64 if row == "fullvocab" else 256, scale))]
        return Workload(prompts, 1, "req/s", read_ids=LABEL_IDS, full_vocabulary=row == "fullvocab")
    if row == "score_prefix":
        prefix = _ids(rng, _scaled(450, scale))
        prompts = [prefix + _ids(rng, rng.randint(15, 25)) for _ in range(_scaled(256, scale))]
        return Workload(prompts, 1, "req/s", shared=len(prefix), read_ids=LABEL_IDS)
    if row in ("decode64", "decode64_ids"):
        lengths = random.Random(f"decode64 lengths/{repeat}")
        prompts = [_ids(rng, lengths.randint(12, 20)) for _ in range(_scaled(64, scale))]
        ids = READ_IDS if row == "decode64_ids" else ()
        return Workload(prompts, _scaled(64, scale), "tok/s", read_ids=ids)
    if row == "decode1":
        return Workload([_ids(rng, 16)], _scaled(64, scale), "tok/s")
    if row == "prompt_logprobs":
        prompts = [_ids(rng, _scaled(rng.randint(900, 1100), scale)) for _ in range(_scaled(8, scale))]
        return Workload(prompts, 1, "req/s", reads_prompt=True)
    raise ValueError(f"unknown row {row!r}; known: {', '.join(WORK_ROWS)}")


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]


def _scaled(count: int, scale: float) -> int:
    return max(2, round(count * scale))
