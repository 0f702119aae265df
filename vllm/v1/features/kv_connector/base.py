"""The base class of connectors, with upstream's names and in upstream's order of calls."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.config import VllmConfig


class KVConnectorRole(enum.Enum):
    """Where a connector runs: an engine makes one for each."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """A step's message from the scheduler's connector to the worker's. Derive a class; it must be picklable."""


@dataclass
class KVConnectorOutput:
    """A step's message from the worker's connector to the scheduler's.

    Attributes:
        finished_sending, finished_recving: ids that `get_finished` returned.
        invalid_block_ids: that `get_block_ids_with_load_errors` returned.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    invalid_block_ids: set[int] = field(default_factory=set)


@dataclass
class KVCacheGroup:
    """Layers that share a block table."""

    layer_names: list[str]
    block_size: int


@dataclass
class KVCacheDescription:
    """The cache that a connector is made for: its blocks, and its one group of layers."""

    num_blocks: int
    kv_cache_groups: list[KVCacheGroup]


class SupportsHMA(ABC):
    """Derive a connector from this, too, to be told of a finished request's blocks in each KV group."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Called in place of `request_finished`, and returns the same."""


def supports_hma(connector: Any) -> bool:
    """Whether a connector, or a class of them, takes the blocks of each KV group."""
    return issubclass(connector if isinstance(connector, type) else type(connector), SupportsHMA)


class KVConnectorBase_V1(ABC):
    """A connector. docs/kv_store.md says when each method is called, and the layout of what it sees."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """
        Args:
            kv_cache_config: a KVCacheDescription.
        """
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        """Where it runs."""
        return self._role

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that it needs: None or "HND" are served."""
        return None

    # -- the worker's side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """The cache was allocated: each layer's tensor, by its name."""
        return

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; no block has been overwritten yet."""
        return

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's message, until it is cleared."""
        self._connector_metadata = connector_metadata

    def has_connector_metadata(self) -> bool:
        """Whether a message is bound."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """The step's message, for the class's own methods."""
        assert self._connector_metadata is not None, "no step is being computed"
        return self._connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step has ended."""
        self._connector_metadata = None

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load the step's blocks."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return once the layer's blocks are loaded."""

    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Begin to save the layer's blocks that the step has written."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return once they may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests that were sent and received since the last call."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded since the last call."""
        return set()

    def shutdown(self) -> None:
        """The engine ends. Both sides are told."""
        return

    # -- the scheduler's side -----------------------------------------------------------------------------------------

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the computed ones can be loaded, None: it is not known yet; and whether they are loaded
        beside steps: then the request is admitted once `get_finished` has named it."""

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks, and so many tokens after the cached ones are to be loaded into them."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's message to the worker's side."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The worker's side has answered."""
        return

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Mapping[str, Any] | None]:
        """The request ends. Returns whether its blocks are kept until `get_finished` names it, and parameters for who
        computes on, which its output has."""
        return False, None

    def reset_cache(self) -> bool | None:
        """Forget what was kept: weights have changed."""
        return None
