"""Which backends of an operation can run here, running one of them, and how near to the truth it must come."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from layouts import CPP_LEVELS
from torch import Tensor

from vllm.ops._dispatch import ISA_LEVELS, Implementation, cpu_ops, force

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OPERATIONS = (
    "rms_norm",
    "fused_add_rms_norm_",
    "layer_norm",
    "fused_add_layer_norm_",
    "activation_",
    "rotary_embedding_",
    "gate_and_mul",
    "reshape_and_cache_",
    "rotary_and_cache_",
    "paged_attention",
    "latent_attention",
    "write_latent_",
    "head_linear",
    "short_conv_",
    "gated_delta_rule_",
    "state_space_scan_",
    "selective_scan_",
    "gated_recurrence_",
    "wkv_",
    "mlstm_",
    "gated_rms_norm",
    "packed_attention",
    "token_readings",
    "linear_readings",
    "count_above",
    "topk",
    "choose_experts",
    "gumbel_sample",
    "keep_top_p_",
    "keep_bits_",
    "fill_logprob_token_ids",
    "add_lora_",
    "add_lora_embedding_",
)

# Beyond the levels before them only products differ, which tests of products run at every level.
_OF_PRODUCTS = {"cpp-avx512_vnni", "cpp-avx512_bf16"}

# On the CPU these run their references.
WITHOUT_CPP = {"linear_readings"}

_MOST_REMEMBERED = 8
Truth = TypeVar("Truth", bound=Callable[..., Any])

# float32 sums in another order, relative to the greatest value.
_SLACK = 2e-6


def with_dtypes(names: list[str]) -> list[tuple[str, torch.dtype]]:
    """Each backend with each of DTYPES. The interpreter, which takes its time, reads float16 by the steps that it reads
    bfloat16 by, so it is asked for one of them."""
    interprets = not torch.cuda.is_available()
    return [
        (name, dtype)
        for name in names
        for dtype in DTYPES
        if name != "triton" or dtype != torch.float16 or not interprets
    ]


def backends(operation: str) -> list[str]:
    """The reference, the C++ operator if it is built, and the Triton kernels: in the interpreter, which
    tests/conftest.py switched on, or compiled where there is a CUDA device.

    "cpp" is the widest instruction set that this machine runs, "cpp-avx2" and so on are the narrower ones."""
    assert operation in OPERATIONS
    found = ["reference"]
    operators = cpu_ops()
    if operators is not None and hasattr(operators, operation):
        found += [level for level in CPP_LEVELS if level not in _OF_PRODUCTS]
    return [*found, "triton"]


@contextmanager
def chosen(backend: str) -> Iterator[None]:
    """Operations run this backend while the context lasts."""
    kind, _, level = backend.partition("-")
    with force(cast(Implementation, kind)):
        if not level:
            yield
            return
        operators = cpu_ops()
        assert operators is not None
        widest = operators.set_isa(-1)
        assert operators.set_isa(ISA_LEVELS.index(level)) == ISA_LEVELS.index(level)
        try:
            yield
        finally:
            operators.set_isa(widest)


def run(backend: str, operation: Callable[..., Any], *args: Any) -> Any:
    """Call the operation's backend where it lives. Tensors that it changes in place are changed here too."""
    there = [_to_device(backend, arg) if isinstance(arg, Tensor) else arg for arg in args]
    with chosen(backend), warnings.catch_warnings():
        # The interpreter's NumPy remarks on infinities and NaN, which are on purpose.
        warnings.simplefilter("ignore", RuntimeWarning)
        result = operation(*there)
    for arg, moved in zip(args, there, strict=True):
        # An expanded tensor, whose rows are one memory, is input only.
        if isinstance(arg, Tensor) and moved is not arg and 0 not in arg.stride():
            arg.copy_(moved)
    return _to_host(result)


def _to_device(backend: str, tensor: Tensor) -> Tensor:
    if backend != "triton" or not torch.cuda.is_available():
        return tensor
    # Strides, and what lies between the rows, are part of the test.
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = tensor.as_strided((length,), (1,), 0).cuda()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _to_host(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, tuple):
        parts = [_to_host(part) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


def remembered(function: Truth) -> Truth:
    """`function`, which is not called again for the arguments of one of the last calls: a test's backends follow each
    other, and the truth is the same for all. Results are not to be changed."""
    known: dict[Any, Any] = {}

    @wraps(function)
    def remember(*args: Any, **kwargs: Any) -> Any:
        asked = _content((args, kwargs))
        if asked not in known:
            if len(known) >= _MOST_REMEMBERED:
                del known[next(iter(known))]
            known[asked] = function(*args, **kwargs)
        return known[asked]

    return cast(Truth, remember)


def _content(value: Any) -> Any:
    """Equal for equal arguments."""
    if isinstance(value, Tensor):
        content = hash(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) if value.numel() else 0
        return value.dtype, value.shape, content
    if isinstance(value, dict):
        return tuple((key, _content(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_content, value))
    if dataclasses.is_dataclass(value):
        return tuple(_content(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value


def strided(tensor: Tensor, gap: int = 3) -> Tensor:
    """Equal rows with NaN (or huge integers) between them."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + gap)
    filler = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    wide = torch.full(shape, filler, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def assert_accurate(
    backend: str, got: Tensor, truth: Tensor, plain: Tensor | None = None, slack: float = _SLACK
) -> None:
    """Hold a result to the float64 truth: off by little more than one rounding to its dtype, and no further
    than a plain computation in that dtype is.

    `slack` is what sums in another order may add, relative to the greatest value.
    """
    assert got.shape == truth.shape
    assert not got.isnan().any()
    if not truth.numel():
        return
    rounding, scale = _rounding(backend, got.dtype), truth.abs().max().item()
    error = (got.double() - truth).abs()
    # Below the smallest normal number roundings are absolute, and float32 exponentials overflow.
    smallest = max(1e-37, torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps)
    allowed = rounding * truth.abs() + slack * scale + smallest
    assert (error <= allowed).all(), f"off by {(error - allowed).max()} more than allowed at scale {scale}"
    if plain is not None:
        plain_error = (plain.double() - truth).abs().max().item()
        assert error.max().item() <= plain_error + (rounding + _SLACK) * scale


def weights_rounding(backend: str, dtype: torch.dtype) -> float:
    """The error of attention's results, relative to the greatest value, where weights are rounded to `dtype` before
    they meet the values: in the Triton kernels, and in bfloat16 in C++ where it multiplies pairs."""
    operators = cpu_ops() if backend == "cpp" and dtype == torch.bfloat16 else None
    pairs = operators is not None and (
        operators.has_fast_bf16_dot() or ISA_LEVELS[operators.set_isa(-1)] == ISA_LEVELS[-1]
    )
    return torch.finfo(dtype).eps if dtype != torch.float32 and (pairs or backend == "triton") else 0.0


def _rounding(backend: str, dtype: torch.dtype) -> float:
    """The relative error of rounding once."""
    eps = torch.finfo(dtype).eps
    # The interpreter cuts bfloat16 off where the compiled kernel rounds.
    cuts = backend == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available()
    return 1.01 * eps if cuts else 0.505 * eps
