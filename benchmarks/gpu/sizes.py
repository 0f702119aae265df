"""Sizes of the check: real shapes, or tiny ones for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from bounds import ModelShape


@dataclass(frozen=True)
class Sizes:
    """The sizes of every case.

    Attributes:
        models: by name, the smallest first; the rows are measured with that one.
        reading_rows, num_ids: rows of logits of a reading, and ids read in each.
        teacher_ids: ids read at each position of a teacher's table.
        prompt_tokens: positions of the prompt readings.
        prefill: (sequences, tokens of each) of the attention row.
        decode: (sequences, context of each), likewise.
        batches: sequences of the engine's rows.
        prompt_len, max_tokens: of each of those sequences.
        ragged: (queries, context) of the sequences that attention is checked with.
        ragged_dtypes: and of which dtypes.
        copy_bytes: of the tensor that is copied to measure the bandwidth.
        matrix: rows, columns and inner size of the product that measures the matrix rate.
        repeats: timed runs of a kernel row.
        engine_repeats: timed runs of an engine row.
        copies: sets of inputs of a kernel row, so that none is in a cache.
    """

    models: dict[str, ModelShape]
    reading_rows: int
    num_ids: int
    teacher_ids: int
    prompt_tokens: int
    prefill: tuple[int, int]
    decode: tuple[int, int]
    batches: tuple[int, ...]
    prompt_len: int
    max_tokens: int
    ragged: tuple[tuple[int, int], ...]
    ragged_dtypes: tuple[str, ...]
    copy_bytes: int
    matrix: int
    repeats: int
    engine_repeats: int
    copies: int

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model that rows are measured with."""
        return next(iter(self.models.values()))


_VOCAB_SIZE = 151_936

FULL = Sizes(
    models={
        "0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, _VOCAB_SIZE),
        "1.7B": ModelShape(28, 2048, 6144, 16, 8, 128, _VOCAB_SIZE),
    },
    reading_rows=256,
    num_ids=20,
    teacher_ids=256,
    prompt_tokens=8192,
    prefill=(8, 2048),
    decode=(256, 2048),
    batches=(64, 256),
    prompt_len=128,
    max_tokens=128,
    ragged=((1, 1000), (300, 300), (64, 700), (1, 17), (1, 1), (5, 4000), *((1, 50 + 13 * row) for row in range(20))),
    ragged_dtypes=("bfloat16", "float16", "float32"),
    copy_bytes=2**31,
    matrix=8192,
    repeats=30,
    engine_repeats=5,
    copies=6,
)

TINY = Sizes(
    models={"0.6B": ModelShape(1, 32, 48, 2, 1, 16, 301), "1.7B": ModelShape(1, 64, 96, 2, 1, 16, 301)},
    reading_rows=3,
    num_ids=5,
    teacher_ids=7,
    prompt_tokens=9,
    prefill=(1, 18),
    decode=(2, 18),
    batches=(2, 3),
    prompt_len=7,
    max_tokens=4,
    ragged=((2, 17),),
    ragged_dtypes=("float16",),
    copy_bytes=2**16,
    matrix=64,
    repeats=2,
    engine_repeats=1,
    copies=2,
)

SCALES = {"full": FULL, "tiny": TINY}
