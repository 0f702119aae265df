"""Lower bounds of a row's time: its matrix products alone, and the reading of its weights and cache alone.

    python benchmarks/bounds.py [--model MODEL] [--rows ROWS]     # the rates as JSON
    python benchmarks/bounds.py SHAPE PRODUCTS                    # of these, as compare.py calls it

`count_work` is exact for the row's prompts: every distinct prompt token passes every layer once, except that only read
rows need more than keys and values in the last layer; the head computes the read rows; each further token is one row of
a step of all sequences. Attention is counted as two products of every prompt token with the keys and values up to it,
at the best rate of the row's products; models with a window do less. `Rates` are those of the fastest of our packed
kernels and oneDNN's for each matrix, with as many rows as the engine's step, over distinct weights for all layers, so
that caches hold no more than in a real step. Where oneDNN cannot pack bfloat16, its float32 products are measured.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from unittest import mock

from common import make_parser, seconds_of, some_of
from workloads import LONG_ROWS, WORK_ROWS, Workload, make_workload

# Tokens of a prefill step, and rows of a tile of logits, as the engine has them by default.
STEP_TOKENS = 2048
HEAD_ROWS = 256

_WEIGHT_BYTES = 2
_LAYERED = ("qkv", "o", "gate_up", "down")
# Not used by the engine: their sums depend on the number of rows; the second's weights take twice the memory, too.
_LIBRARY, _FLOAT32 = "onednn", "onednn_float32"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's matrix products, named as in config.json."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """That of a model's configuration."""
        return cls(**{size.name: int(getattr(config, size.name)) for size in fields(cls)})

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each kind of weight."""
        attended = self.num_attention_heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.num_key_value_heads * self.head_dim, self.hidden_size),
            "o": (self.hidden_size, attended),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "head": (self.vocab_size, self.hidden_size),
        }

    def cache_bytes_per_token(self) -> int:
        """Keys and values in all layers, bfloat16."""
        return 2 * _WEIGHT_BYTES * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


class Product(NamedTuple):
    """A product with `rows` rows, a power of two near those of the engine's steps."""

    matrix: str
    rows: int


class Work(NamedTuple):
    """The work of a row of the tables.

    Attributes:
        rows: rows computed with each product, summed over the layers.
        cache_bytes: keys and values that decoding reads.
        attention_flops: of the prompts' causal attention in all layers; a multiplication and an addition are two.
    """

    rows: dict[Product, int]
    cache_bytes: int
    attention_flops: int = 0


def count_work(work: Workload, shape: ModelShape) -> Work:
    """The products and cache reads of a row, counted from its prompts."""
    num_prompts = len(work.prompts)
    # The last token of a computed prompt is computed again for its logits.
    cached = [len(prompt) - 1 if work.is_computed else work.shared * (i > 0) for i, prompt in enumerate(work.prompts)]
    tokens = sum(map(len, work.prompts)) - sum(cached)
    read = tokens if work.reads_prompt else num_prompts
    step = _power_of_two(min(STEP_TOKENS, tokens))
    read_in_step = _power_of_two(min(HEAD_ROWS, max(1, read * step / tokens)))
    counted: Counter[Product] = Counter()
    counted[Product("qkv", step)] += shape.num_hidden_layers * tokens
    for matrix in ("o", "gate_up", "down"):
        counted[Product(matrix, step)] += (shape.num_hidden_layers - 1) * tokens
        counted[Product(matrix, read_in_step)] += read
    counted[Product("head", read_in_step)] += read
    steps = work.max_tokens - 1
    if steps:
        together = _power_of_two(num_prompts)
        for matrix in _LAYERED:
            counted[Product(matrix, together)] += shape.num_hidden_layers * num_prompts * steps
        counted[Product("head", together)] += num_prompts * steps
    # Step i (from 1) attends to the prompt and the i tokens generated before it.
    attended = sum(len(prompt) * steps + steps * (steps + 1) // 2 for prompt in work.prompts)
    pairs = sum(
        len(prompt) * (len(prompt) + 1) // 2 - known * (known + 1) // 2
        for prompt, known in zip(work.prompts, cached, strict=True)
    )
    # The last layer has queries of the tokens alone that are read.
    last = pairs if work.reads_prompt else sum(map(len, work.prompts))
    attention = (shape.num_hidden_layers - 1) * pairs + last
    flops = 4 * attention * shape.num_attention_heads * shape.head_dim
    return Work(dict(counted), attended * shape.cache_bytes_per_token(), flops)


def _power_of_two(rows: float) -> int:
    """The nearest one, as rates change slowly with the rows."""
    return 2 ** round(math.log2(rows))


class Rates(NamedTuple):
    """Rates of the machine.

    Attributes:
        seconds: of one call of each product with one layer's weight, by the fastest kernel.
        kernels: that kernel.
        read_bytes_per_second: of memory as large as the model's weights, on all cores.
    """

    seconds: dict[Product, float]
    kernels: dict[Product, str]
    read_bytes_per_second: float

    def best_of(self, other: Rates) -> Rates:
        """The faster figure of each, of two measurements of the same products."""
        faster = {p: self if self.seconds[p] <= other.seconds[p] else other for p in self.seconds}
        return Rates(
            {p: rates.seconds[p] for p, rates in faster.items()},
            {p: rates.kernels[p] for p, rates in faster.items()},
            max(self.read_bytes_per_second, other.read_bytes_per_second),
        )


class Bound(NamedTuple):
    """Seconds of a row's products alone, of its prompts' attention alone, and of reading weights and cache alone."""

    gemm: float
    attention: float
    memory: float

    @property
    def seconds(self) -> float:
        """The lower bound with these kernels."""
        return max(self.gemm + self.attention, self.memory)


def make_bound(work: Work, shape: ModelShape, rates: Rates) -> Bound:
    """Counts times rates."""
    calls = {product: rows / product.rows for product, rows in work.rows.items()}
    matrices = shape.matrices()
    weight_bytes = sum(
        count * _WEIGHT_BYTES * matrices[product.matrix][0] * matrices[product.matrix][1]
        for product, count in calls.items()
    )
    gemm = sum(count * rates.seconds[product] for product, count in calls.items())
    flops_per_second = max(2 * math.prod(matrices[p.matrix]) * p.rows / rates.seconds[p] for p in calls)
    return Bound(
        gemm, work.attention_flops / flops_per_second, (weight_bytes + work.cache_bytes) / rates.read_bytes_per_second
    )


def rates_to_json(rates: Rates) -> dict[str, Any]:
    """For the results' file, and between processes."""
    products = [
        {**product._asdict(), "seconds": seconds, "kernel": rates.kernels[product]}
        for product, seconds in rates.seconds.items()
    ]
    return {"products": products, "read_bytes_per_second": rates.read_bytes_per_second}


def rates_from_json(found: dict[str, Any]) -> Rates:
    """The inverse of rates_to_json."""
    products = {Product(one["matrix"], one["rows"]): one for one in found["products"]}
    return Rates(
        {product: one["seconds"] for product, one in products.items()},
        {product: one["kernel"] for product, one in products.items()},
        found["read_bytes_per_second"],
    )


def measure_rates(shape: ModelShape, products: list[Product], sweeps: int = 3) -> Rates:
    """The rates on this process's cores, the best of several sweeps over all layers in the order of a step."""
    import torch

    seconds: dict[Product, float] = {}
    chosen: dict[Product, str] = {}
    with torch.inference_mode():
        for kernel in _bounding_kernels():
            for product, best in _time_products(shape, products, kernel, sweeps).items():
                if best < seconds.get(product, float("inf")):
                    seconds[product], chosen[product] = best, kernel
        num_bytes = _WEIGHT_BYTES * (
            sum(n * k for n, k in shape.matrices().values()) * shape.num_hidden_layers
            - (shape.num_hidden_layers - 1) * shape.vocab_size * shape.hidden_size
        )
        return Rates(seconds, chosen, measure_read_rate(num_bytes))


def measure_read_rate(num_bytes: int, repeats: int = 10) -> float:
    """Bytes a second that torch's threads read from memory of that size; the best of several operations and repeats."""
    import torch

    numbers = torch.ones(num_bytes // 4)
    ways: list[Callable[[], object]] = [numbers.sum, numbers.max, lambda: torch.dot(numbers, numbers)]
    return 4 * len(numbers) / min(seconds_of(way) for way in ways for _ in range(repeats))


def available_kernels() -> list[str]:
    """The values of VLLM_CPU_GEMM whose kernels run here; "plain" if there is none."""
    from vllm.ops.cpu_kernels import cpu_kernel_isa

    level = cpu_kernel_isa()
    found = [] if level is None else ["packed_f32"]
    if level in ("avx512_bf16", "avx512_fp16", "amx"):
        found.append("packed_bf16_dot")
    if level in ("avx512_fp16", "amx"):
        found.append("packed_fp16")
    return found or ["plain"]


def _bounding_kernels() -> list[str]:
    import torch

    kernels = available_kernels()
    if not torch.backends.mkldnn.is_available():
        return kernels
    return [*kernels, _LIBRARY if torch.ops.mkldnn._is_mkldnn_bf16_supported() else _FLOAT32]


@dataclass(frozen=True)
class _LibraryWeight:
    """A weight in oneDNN's own layout, which multiplies as packed_linear does."""

    weight: Any

    def multiply(self, x: Any) -> Any:
        import torch

        return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")


def pack_as(weight: Any, kernel: str, float_out: bool = False, gated: bool = False) -> Any:
    """The weight [N, K] packed as with VLLM_CPU_GEMM=kernel, or unpacked for "plain". The layout differs if the kernel
    cannot give the required float32 result."""
    from vllm.ops import packed_linear

    if kernel == "plain":
        return packed_linear.PackedLinear(weight, None, "plain", tuple(weight.shape))
    with mock.patch.dict(os.environ, VLLM_CPU_GEMM=kernel):
        return packed_linear.pack_linear(weight, None, float_out, gated)


def _time_products(shape: ModelShape, products: list[Product], kernel: str, sweeps: int) -> dict[Product, float]:
    """Seconds of the products that this kernel supports; some cannot compute the head's in float32."""
    import torch

    from vllm.ops.packed_linear import packed_linear

    matrices = shape.matrices()
    plain = {name: torch.randn(size, dtype=torch.bfloat16) for name, size in matrices.items()}
    is_library = kernel in (_LIBRARY, _FLOAT32)
    dtype = torch.float32 if kernel == _FLOAT32 else torch.bfloat16

    def pack(name: str) -> Any:
        if is_library:
            return _LibraryWeight(torch.ops.mkldnn._reorder_linear_weight(plain[name].to(dtype, copy=True)))
        return pack_as(plain[name], kernel, float_out=name == "head")

    layers = [{name: pack(name) for name in _LAYERED} for _ in range(shape.num_hidden_layers)]
    head = {"head": pack("head")}
    if kernel == _LIBRARY or (not is_library and head["head"].layout != layers[0]["o"].layout):
        head = {}
    best: dict[Product, float] = {}
    for rows in sorted({product.rows for product in products}):
        wanted = {product.matrix for product in products if product.rows == rows} & {*_LAYERED, *head}
        inputs = {name: torch.randn(rows, matrices[name][1], dtype=dtype) for name in wanted}
        for _ in range(sweeps + 1):  # the first creates oneDNN's kernels and is never the fastest
            spent = dict.fromkeys(wanted, 0.0)
            for weights in (*layers, head):
                for name in wanted & weights.keys():
                    began = time.perf_counter()
                    if is_library:
                        weights[name].multiply(inputs[name])
                    else:
                        packed_linear(inputs[name], weights[name], float_out=name == "head")
                    spent[name] += time.perf_counter() - began
            for name, total in spent.items():
                product = Product(name, rows)
                mean = total / (1 if name == "head" else len(layers))
                best[product] = min(best.get(product, mean), mean)
    return best


def main() -> None:
    """Measure and print the rates as JSON."""
    parser = make_parser("Rates of the products of compare.py's rows, and of reading memory, on this machine.")
    parser.add_argument(
        "--rows", type=some_of((*WORK_ROWS, *LONG_ROWS), "row"), default=["decode1", "decode64"], help="of compare.py"
    )
    parser.add_argument("shape", type=json.loads, nargs="?", help="in place of --model: ModelShape's fields, as JSON")
    parser.add_argument("products", type=json.loads, nargs="?", help="in place of --rows: [[matrix, rows], ...]")
    args = parser.parse_args()
    if (args.shape is None) != (args.products is None):
        parser.error("SHAPE and PRODUCTS go together")
    if args.shape is not None:
        shape, products = ModelShape(**args.shape), [Product(*one) for one in args.products]
    else:
        from vllm.engine.arg_utils import EngineArgs

        shape = ModelShape.of(EngineArgs(model=args.model).create_engine_config().model_config.hf_config)
        products = sorted({each for row in args.rows for each in count_work(make_workload(row, 0), shape).rows})
    print(json.dumps(rates_to_json(measure_rates(shape, products))))


if __name__ == "__main__":
    main()
