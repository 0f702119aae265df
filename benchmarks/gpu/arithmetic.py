"""Lower bounds of the rows: their bytes and operations over a GPU's rates."""

from __future__ import annotations

from dataclasses import dataclass

from bounds import ModelShape
from report import markdown_table, number

from gpu.sizes import Sizes


@dataclass(frozen=True)
class Rates:
    """A GPU's bytes read and written, and bfloat16 operations, a second."""

    name: str
    bytes_per_second: float
    flops_per_second: float


# 4.8 TB/s and 989 TFLOP/s by its data sheet; copies and large products reach these.
H200 = Rates("H200", 4.3e12, 790e12)


@dataclass(frozen=True)
class Bound:
    """Lower bound of a row's work.

    Attributes:
        formula: how bytes and operations were counted, in words.
    """

    row: str
    formula: str
    num_bytes: float
    flops: float

    def seconds(self, rates: Rates) -> float:
        """The longer of moving the bytes and computing, which may overlap."""
        return max(self.num_bytes / rates.bytes_per_second, self.flops / rates.flops_per_second)


def make_bounds(sizes: Sizes) -> list[Bound]:
    """The bounds of the rows that have one."""
    shape, vocab_size = sizes.shape, sizes.shape.vocab_size
    logits = sizes.reading_rows * vocab_size
    num_seqs, length = sizes.prefill
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    pairs = num_seqs * length * (length + 1) // 2
    tokens = num_seqs * length
    decode_seqs, context = sizes.decode
    return [
        Bound("readings_fp32", "rows x V x 4 B, read once", 4 * logits, 0),
        Bound("readings_bf16", "rows x V x 2 B, read once", 2 * logits, 0),
        Bound(
            "prompt_readings",
            "2 x positions x H x V operations; the head's weight read once, no logits written",
            2 * shape.hidden_size * (vocab_size + sizes.prompt_tokens),
            2 * sizes.prompt_tokens * shape.hidden_size * vocab_size,
        ),
        Bound(
            "prefill_*",
            "4 x D operations for each query head and each pair of a query and a key it sees; q, k, v, out moved once",
            2 * tokens * 2 * (heads + kv_heads) * shape.head_dim,
            4 * pairs * heads * shape.head_dim,
        ),
        Bound(
            "decode_*",
            "keys and values of the context, 2 x 2 B x KV heads x D a token, read once",
            4 * decode_seqs * context * kv_heads * shape.head_dim,
            4 * decode_seqs * context * heads * shape.head_dim,
        ),
        *(_decode_step(sizes, batch) for batch in sizes.batches),
    ]


def _decode_step(sizes: Sizes, batch: int) -> Bound:
    shape = sizes.shape
    parameters = count_parameters(shape)
    context = sizes.prompt_len + sizes.max_tokens / 2
    return Bound(
        f"generate_{batch}, a step",
        f"all weights x 2 B, keys and values of {batch} x {context:.0f} tokens, float32 logits written and read; "
        "2 x parameters operations a sequence",
        2 * parameters + batch * context * shape.cache_bytes_per_token() + 2 * 4 * batch * shape.vocab_size,
        2 * parameters * batch,
    )


def count_parameters(shape: ModelShape) -> int:
    """Parameters of the matrices; embedding and head are one."""
    sizes = {name: rows * columns for name, (rows, columns) in shape.matrices().items()}
    return sizes.pop("head") + shape.num_hidden_layers * sum(sizes.values())


def make_table(sizes: Sizes, rates: Rates) -> str:
    """One line a bound."""
    lines = [
        [
            bound.row,
            bound.formula,
            number(bound.num_bytes / 1e9),
            number(bound.flops / 1e9),
            number(1e6 * bound.seconds(rates)),
        ]
        for bound in make_bounds(sizes)
    ]
    head = ["row", "what must move and be computed", "GB", "GFLOP", f"µs on {rates.name}, at least"]
    return markdown_table(head, lines, num_text=2)
