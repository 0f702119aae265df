"""Products in matrix tiles: the same bits for any number of rows, neighbours and threads, and those of the level below
where sums are of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, chosen, strided
from layouts import needs_tiles
from test_quantized_linear import assert_near, float8_weight, random_weight
from torch import Tensor

from vllm.ops.int8_linear import int8_linear, pack_int8_linear
from vllm.ops.packed_linear import pack_linear, packed_linear
from vllm.ops.quantized_linear import pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor

pytestmark = needs_tiles

# Whose products of bytes and scales are fused as in tiles.
BELOW = "cpp-avx512_bf16"
# Tiles of one, two and three times 16 rows, whole and ragged, and what is left of them; blocks of rows.
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100, 299)
# Columns and inputs: below, at and beyond a panel's 32, a tile's k, and what is scaled together.
SHAPES = [(1, 1), (31, 7), (33, 65), (40, 128), (130, 600)]
# Columns, inputs, group size: groups of part of a tile's 32 k, of one tile, of several and a part, and of all.
GROUPED = [(31, 7, 3), (33, 96, 16), (70, 256, 32), (40, 200, 200), (35, 240, 40), (96, 512, 128)]

Product = Callable[[Tensor], Tensor]


def rows_of(count: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Rows of different sizes, between values that are not theirs."""
    return strided((torch.randn(count, inner) * torch.logspace(-3, 3, count)[:, None]).clamp(-6e4, 6e4)).to(dtype)


def bfloat16_product() -> Product:
    weight = pack_linear(torch.randn(130, 300).bfloat16(), None)
    return lambda x: packed_linear(x, weight, float_out=True)


def int8_product() -> Product:
    weight = pack_int8_linear(torch.randn(130, 300), None)
    return lambda x: int8_linear(x, weight, float_out=True)


def codes_product(kind: str, bits: int, group: int) -> Callable[[], Product]:
    def make() -> Product:
        weight = pack_quantized(random_weight(130, 300, group, kind, bits), None)
        return lambda x: quantized_linear(x, weight, float_out=True)

    return make


PRODUCTS = {
    "bfloat16": bfloat16_product,
    "int8": int8_product,
    "4 bits": codes_product("zeros", 4, 32),
    "6 bits, groups of 16": codes_product("super", 6, 16),
    "8 bits, long groups": codes_product("zero", 8, 300),
}


@pytest.fixture(params=[False, True], ids=["", "int8 activations"])
def int8_activations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setenv("VLLM_CPU_INT8_ACTIVATIONS", "1" if request.param else "0")
    yield request.param


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_depends_on_no_other_and_on_no_thread(name: str, int8_activations: bool) -> None:
    torch.manual_seed(0)
    product, x = PRODUCTS[name](), rows_of(300, 300, torch.bfloat16)
    together = product(x)
    assert together.isfinite().all()
    # 300 rows are shared out in blocks by one thread, by panels among more.
    threads = torch.get_num_threads()
    for count in {1, 2, threads}:
        torch.set_num_threads(count)
        try:
            for rows in ROWS:
                assert torch.equal(product(x[:rows]), together[:rows])
                assert torch.equal(product(x[300 - rows :]), together[300 - rows :])
        finally:
            torch.set_num_threads(threads)


def test_products_of_threads_do_not_mix() -> None:
    """A thread writes a tile's results while it multiplies the next one."""
    torch.manual_seed(0)
    x = rows_of(100, 300, torch.bfloat16)
    products = [make() for make in PRODUCTS.values()]
    alone = [product(x) for product in products]

    def agrees(turn: int) -> bool:
        number = turn % len(products)
        return torch.equal(products[number](x), alone[number])

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(agrees, range(60)))


@pytest.mark.parametrize("name", ["4 bits", "8 bits, long groups"])
def test_rows_that_do_not_fit_beside_prepared_panels(name: str, int8_activations: bool) -> None:
    """Whose panels are prepared for one part of the rows after the other."""
    torch.manual_seed(0)
    kind, bits, group = {"4 bits": ("zeros", 4, 32), "8 bits, long groups": ("zero", 8, 4096)}[name]
    weight = pack_quantized(random_weight(33, 4096, group, kind, bits), None)
    x = rows_of(4200, 4096, torch.bfloat16)
    together = quantized_linear(x, weight, float_out=True)
    for rows in (slice(0, 3), slice(1300, 1440), slice(2090, 2110), slice(4190, 4200)):
        assert torch.equal(quantized_linear(x[rows], weight, float_out=True), together[rows])


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_that_are_not_finite_spoil_no_other(name: str, int8_activations: bool) -> None:
    torch.manual_seed(1)
    product, x = PRODUCTS[name](), rows_of(40, 300, torch.bfloat16)
    clean = product(x)
    x[3, 5], x[17, 299], x[33, 0], x[38] = torch.nan, -torch.inf, torch.inf, -torch.inf
    spoilt = torch.tensor([3, 17, 33, 38])
    others = torch.ones(40, dtype=torch.bool).index_fill_(0, spoilt, False)
    got = product(x)
    assert torch.equal(got[others], clean[others])
    # Groups of -inf throughout may meet weights of one sign, or zero.
    assert not got[spoilt].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_8_bit_weights_have_the_bits_of_the_level_below(columns: int, inner: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    ready, x = pack_int8_linear(torch.randn(columns, inner), None), rows_of(100, inner, dtype)
    with chosen(BELOW):
        below = int8_linear(x, ready, float_out=True)
    for rows in (1, 17, 40, 100):
        assert torch.equal(int8_linear(x[:rows], ready, float_out=True), below[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "bits"), [("zero", 4), ("zeros", 5), ("super offsets", 2), ("zero", 8), ("order", 4)])
@pytest.mark.parametrize(("columns", "inner", "group"), GROUPED)
def test_8_bit_rows_have_the_bits_of_the_level_below(
    kind: str, bits: int, columns: int, inner: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_INT8_ACTIVATIONS", "1")
    torch.manual_seed(columns)
    packed, x = pack_quantized(random_weight(columns, inner, group, kind, bits), None), rows_of(40, inner, dtype)
    with chosen(BELOW):
        below = quantized_linear(x, packed, float_out=True)
    for rows in (1, 17, 32, 40):
        assert torch.equal(quantized_linear(x[:rows], packed, float_out=True), below[:rows])


def kinds_of_values(columns: int, inner: int, group: int) -> list[QuantizedTensor]:
    kinds = [("bfloat16 table", 4), ("zeros", 2), ("zeros", 3), ("zero", 5), ("zero", 6), ("zeros", 8), ("order", 4)]
    weights = [random_weight(columns, inner, group, kind, bits) for kind, bits in kinds]
    return weights + [float8_weight(columns, inner, group, each) for each in (torch.float8_e4m3fn, torch.float8_e5m2)]


@pytest.mark.parametrize(("columns", "inner", "group"), GROUPED)
def test_codes_of_every_kind(columns: int, inner: int, group: int) -> None:
    torch.manual_seed(columns)
    x = rows_of(100, inner, torch.bfloat16)
    for weight in kinds_of_values(columns, inner, group):
        packed = pack_quantized(weight, None)
        together = quantized_linear(x, packed, float_out=True)
        assert_near(together, F.linear(x.double(), weight.dequantize().double()), x, weight)
        for rows in (1, 17, 32, 33):
            assert torch.equal(quantized_linear(x[:rows], packed, float_out=True), together[:rows])
