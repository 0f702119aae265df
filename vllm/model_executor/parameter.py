"""Parameters that users' quantisation methods register, by upstream's names: their attributes `output_dim` and
`input_dim` say which of their dimensions follow the layer's outputs and inputs. The loader does its work by these
attributes, and refuses a layer's parameter with a `weight_loader`, which it would not call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


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
