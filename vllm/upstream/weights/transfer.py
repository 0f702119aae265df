"""Trainers and engines exchange weights by these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from typing_extensions import Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

InitInfo = TypeVar("InitInfo", bound="TrainerInitInfo")
EngineInitInfo = TypeVar("EngineInitInfo", bound="WeightTransferInitInfo")
EngineUpdateInfo = TypeVar("EngineUpdateInfo", bound="WeightTransferUpdateInfo")


@dataclass(frozen=True)
class ParamMeta:
    """A parameter of the whole model, the same on every rank of the trainer.

    Attributes:
        shape: of the whole parameter.
        owners: ranks of the trainer that have it, or a part of it; None: all.
        mesh_shape: how the owners are laid out; None: in a row.
        placements: torch.distributed.tensor's, one an axis of the mesh; None: each owner has all of it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class WeightSource(ABC):
    """A trainer's weights, by the names of the checkpoint. A subclass has one of the two iterations, or both."""

    @property
    @abstractmethod
    def metadata(self) -> Sequence[ParamMeta]:
        """Every parameter of the model."""

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of what this rank owns, in the order of `metadata`."""
        raise NotImplementedError(f"{type(self).__name__} has no iter_full")

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's part) of what this rank owns, in the order of `metadata`."""
        raise NotImplementedError(f"{type(self).__name__} has no iter_local")

    @classmethod
    def implements_iter_full(cls) -> bool:
        return cls.iter_full is not WeightSource.iter_full

    @classmethod
    def implements_iter_local(cls) -> bool:
        return cls.iter_local is not WeightSource.iter_local

    def owned_names(self, rank: int) -> list[str]:
        """The names that this rank iterates over."""
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]


class ModuleSource(WeightSource):
    """The parameters of a module that every rank has; those that are DTensors are gathered."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._module.named_parameters()]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._module.named_parameters():
            yield name, materialize_full_tensor(tensor)

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """As iter_full: `metadata` says that every rank has all of each."""
        return self.iter_full()


def materialize_full_tensor(tensor: Tensor) -> Tensor:
    """The tensor without its gradient, of a DTensor the whole of it, which all ranks must call together."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole.detach()


def host_copy(tensor: Tensor) -> Tensor:
    """Contiguous, and of memory of its own: safetensors stores no tensors that share some."""
    return tensor.detach().to("cpu", copy=True).contiguous()


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    """How a trainer tells the engines what to do; each call returns when all of them have done it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass
class TrainerInitInfo:
    """How a trainer begins: a subclass has `backend`, which names its transport."""

    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends: rank 0 does."""
        return self.rank == 0


class TrainerWeightTransferEngine(ABC, Generic[InitInfo]):
    """The trainer's side of a transport."""

    init_info_cls: ClassVar[type[Any]] = TrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource | None, is_sender: bool = True) -> None:
        self.client = client
        self.source = source
        self.is_sender = is_sender

    @classmethod
    @abstractmethod
    def trainer_init(
        cls, init_info: InitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Meet the engines; on every rank of the trainer."""

    @abstractmethod
    def send_weights(self, *args: Any, **kwargs: Any) -> None:
        """Send the weights; on every rank of the trainer."""

    def shutdown(self) -> None:
        """Free what the transport holds."""


@dataclass
class WeightTransferInitInfo:
    """An engine is told this before the first weights come."""


@dataclass
class WeightTransferUpdateInfo:
    """An engine is told this with each update."""


@dataclass
class WeightTransferInitRequest:
    """The argument of `init_weight_transfer_engine`; a dict with this key is the same."""

    init_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """The argument of `update_weights`; a dict with this key is the same."""

    update_info: Mapping[str, Any] = field(default_factory=dict)


class WeightTransferEngine(ABC, Generic[EngineInitInfo, EngineUpdateInfo]):
    """The engine's side of a transport. Engines here make none: callers may define some."""

    init_info_cls: ClassVar[type[Any]] = WeightTransferInitInfo
    update_info_cls: ClassVar[type[Any]] = WeightTransferUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.device = device
        self.model = model

    @abstractmethod
    def init_transfer_engine(self, init_info: EngineInitInfo) -> None:
        """Meet the trainer."""

    @abstractmethod
    def receive_weights(self, update_info: EngineUpdateInfo) -> None:
        """Receive weights and load them."""

    @abstractmethod
    def start_weight_update(self) -> None:
        """Before an update."""

    @abstractmethod
    def finish_weight_update(self) -> None:
        """After an update."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free what the transport holds."""
