"""Base classes of callers' layers, models and quantisation methods: the engine itself builds on none of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm import envs
from vllm.upstream.refusals import Unserved


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """silu of the first half of each row of x [..., 2 D], times the second, into out [..., D]."""
    gate, up = x.chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Rows of input [..., D] divided by their root mean square, times weight [D], into out; in float32."""
    whole = input.float()
    out.copy_(whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + epsilon) * weight.float())


_C = TypeVar("_C", bound="type[CustomOp]")


class CustomOp(nn.Module):
    """A module with a forward for each device; `forward_native` serves those that it has none for."""

    op_registry: ClassVar[dict[str, type[CustomOp]]] = {}
    name: ClassVar[str]

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = False) -> None:
        """The arguments are for upstream's compiler: nothing is compiled here, and every operation is enabled."""
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from vllm.upstream.platforms import current_platform  # looks for a GPU

        forward = self.forward_cuda if current_platform.is_cuda() else self.forward_cpu
        return forward(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    @classmethod
    def enabled(cls) -> bool:
        """True: nothing turns operations off."""
        return True

    @classmethod
    def register(cls, name: str, dynamic_arg_dims: dict[str, Any] | None = None) -> Callable[[_C], _C]:
        """Name a class.

        Raises:
            ValueError: another one has this name.
        """

        def add(op: _C) -> _C:
            if name in cls.op_registry:
                raise ValueError(f"there is an operation {name!r} already")
            op.name = name
            cls.op_registry[name] = op
            return op

        return add


def set_weight_attrs(weight: Tensor, weight_attrs: dict[str, Any] | None) -> None:
    """Give a parameter the attributes `weight_attrs`. ValueError: it has one of them already."""
    for name, value in (weight_attrs or {}).items():
        if hasattr(weight, name):
            raise ValueError(f"the parameter has the attribute {name!r} already")
        setattr(weight, name, value)


class BasevLLMParameter(nn.Parameter):
    """No dimension follows the layer."""

    def __new__(cls, data: Tensor, **_: Any) -> BasevLLMParameter:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, weight_loader: Any = None) -> None:
        self.weight_loader = weight_loader


class PerTensorScaleParameter(BasevLLMParameter):
    """[parts of the layer]: one value for each of them."""


class ChannelQuantScaleParameter(BasevLLMParameter):
    """Follows the layer's outputs."""

    def __init__(self, data: Tensor, output_dim: int, weight_loader: Any = None) -> None:
        super().__init__(data, weight_loader)
        self.output_dim = output_dim


class RowvLLMParameter(BasevLLMParameter):
    """Follows the layer's inputs."""

    def __init__(self, data: Tensor, input_dim: int, weight_loader: Any = None) -> None:
        super().__init__(data, weight_loader)
        self.input_dim = input_dim


class ModelWeightParameter(BasevLLMParameter):
    """Follows both."""

    def __init__(self, data: Tensor, input_dim: int, output_dim: int, weight_loader: Any = None) -> None:
        super().__init__(data, weight_loader)
        self.input_dim, self.output_dim = input_dim, output_dim


class GroupQuantScaleParameter(ModelWeightParameter):
    """Follows both, with a value for several inputs."""


class PackedvLLMParameter(ModelWeightParameter):
    """Follows both; along `packed_dim` an element holds `packed_factor` of the layer's."""

    def __init__(
        self,
        data: Tensor,
        packed_dim: int,
        packed_factor: Any,
        input_dim: int,
        output_dim: int,
        weight_loader: Any = None,
        marlin_tile_size: int | None = None,
        bitblas_tile_size: int | None = None,
    ) -> None:
        super().__init__(data, input_dim, output_dim, weight_loader)
        for name, value in (("marlin_tile_size", marlin_tile_size), ("bitblas_tile_size", bitblas_tile_size)):
            if value is not None:
                raise ValueError(f"{name}={value} is not supported: parameters are not stored in tiles; leave it out")
        self.packed_dim, self.packed_factor = packed_dim, packed_factor


def initialize_layerwise_reload(model: nn.Module) -> None:
    """Nothing: model.load_weights keeps what is incomplete until the rest comes."""


def finalize_layerwise_processing(model: nn.Module, model_config: Any) -> None:
    """Check that what was loaded is whole.

    Raises:
        ValueError: parts of a layer have come and others not.
    """
    updater: Any = model.weight_updater
    updater.complete()


def process_weights_after_loading(model: nn.Module, model_config: Any, target_device: torch.device) -> None:
    """Check that what was loaded is whole; layouts are made anew by load_weights.

    Raises:
        ValueError: parts of a layer have come and others not.
    """
    finalize_layerwise_processing(model, model_config)


def vllm_is_batch_invariant() -> bool:
    """Whether VLLM_BATCH_INVARIANT=1."""
    return envs.batch_invariant()


def init_batch_invariance() -> None:
    """With VLLM_BATCH_INVARIANT=1: one order of sums in this process's products and collectives. The engine needs no
    call of it."""
    if not vllm_is_batch_invariant():
        return
    for name, value in (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple"), ("CUBLAS_WORKSPACE_CONFIG", ":16:8")):
        os.environ.setdefault(name, value)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class ShardedStateLoader(Unserved):
    """Reads what save_sharded_state has written."""

    instead: ClassVar[str] = "workers read only their share of a checkpoint; load it with load_format='auto'"

    DEFAULT_PATTERN: ClassVar[str] = "model-rank-{rank}-part-{part}.safetensors"
    TP_ONLY_PATTERN: ClassVar[str] = DEFAULT_PATTERN
    PP_AND_TP_PATTERN: ClassVar[str] = "model-pp-{pp_rank}-tp-{rank}-part-{part}.safetensors"
