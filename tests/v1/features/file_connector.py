"""A connector after upstream's documentation: the leading whole blocks of prompts, a file a layer and prompt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.attention.backend import AttentionMetadata


@dataclass
class Transfer:
    key: str
    block_ids: list[int]


@dataclass
class Transfers(KVConnectorMetadata):
    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


class FileConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.folder, self.answers = Path(extra["folder"]), dict(extra.get("answers", {}))
        self.block_size = vllm_config.cache_config.block_size
        self.calls: list[Any] = []
        self.hashes: list[list[bytes]] = []
        self.loads: dict[str, int] = {}
        self.prompts: dict[str, tuple[list[int], list[int], str]] = {}
        self.rank = get_tensor_model_parallel_rank()
        if self.rank != extra.get("failing_rank", self.rank):
            self.answers = {}
        self.caches: dict[str, torch.Tensor] = {}

    def about(self, request: Any) -> str:
        """All that a prompt's content depends on beside its tokens."""
        adapter = request.lora_request and request.lora_request.lora_path
        return repr((adapter, [(each.identifier, *each.mm_position) for each in request.mm_features]))

    def key(self, token_ids: list[int], about: str) -> str:
        return hashlib.sha256(repr((token_ids, about)).encode()).hexdigest()

    def place(self, key: str) -> Path:
        """Where the worker has its share."""
        is_first = "model.layers.0.self_attn.attn" in self.caches
        return self.folder / (f"{key}-{self.rank}-{is_first}" if self.rank or not is_first else key)

    def lengths(self, token_ids: list[int]) -> int:
        """Leading tokens in whole blocks, but for the last token."""
        return (len(token_ids) - 1) // self.block_size * self.block_size

    def note(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details))

    # -- the scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.note("match", request.request_id, num_computed_tokens)
        if request.block_hashes:
            self.hashes.append(list(request.block_hashes))
        if self.answers.pop("raises", False):
            raise KeyError("remote_host")
        if self.answers.get("undecided", 0):
            self.answers["undecided"] -= 1
            return None, False
        length = self.lengths(request.prompt_token_ids)
        is_there = (self.folder / self.key(request.prompt_token_ids[:length], self.about(request))).is_dir()
        return (max(length - num_computed_tokens, 0) if is_there else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.note("alloc", request.request_id, num_external_tokens, blocks.get_block_ids())
        self.loads[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        self.note("meta", dict(scheduler_output.num_scheduled_tokens))
        found = Transfers()
        for new in scheduler_output.scheduled_new_reqs:
            self.prompts[new.req_id] = new.prompt_token_ids, list(new.block_ids[0]), self.about(new)
            if num_loaded := self.loads.pop(new.req_id, 0):
                end = new.num_computed_tokens // self.block_size
                begin = end - num_loaded // self.block_size
                prefix = new.prompt_token_ids[: self.lengths(new.prompt_token_ids)]
                found.loads.append(Transfer(self.key(prefix, self.about(new)), [begin, *new.block_ids[0][begin:end]]))
            self._save(new.req_id, new.num_computed_tokens, scheduler_output, found)
        cached = scheduler_output.scheduled_cached_reqs
        for name, added, begin in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self.prompts[name][1].extend(added[0] if added else ())
            self._save(name, begin, scheduler_output, found)
        return found

    def _save(self, name: str, begin: int, scheduler_output: Any, found: Transfers) -> None:
        """Save a prompt in the step that completes it."""
        token_ids, block_ids, about = self.prompts[name]
        if begin < len(token_ids) <= begin + scheduler_output.num_scheduled_tokens[name]:
            prefix = token_ids[: self.lengths(token_ids)]
            found.saves.append(Transfer(self.key(prefix, about), block_ids[: len(prefix) // self.block_size]))

    def update_connector_output(self, connector_output: Any) -> None:
        self.note("output", connector_output.finished_sending)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        self.note("finished", request.request_id, list(block_ids), request.num_output_tokens)
        said = {"num_blocks": len(block_ids)}
        return False, said if request.kv_transfer_params is None else said | {"asked": request.kv_transfer_params}

    # -- the worker's side

    def blocks(self, cache: torch.Tensor) -> torch.Tensor:
        """A view whose first dimension is the blocks'."""
        return cache.transpose(0, 1) if cache.dim() == 5 else cache

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.note("register", {name: tuple(cache.shape) for name, cache in kv_caches.items()})
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.note("load", self.has_connector_metadata())
        assert {name: layer.kv_cache for name, layer in forward_context.no_compile_layers.items()} == self.caches
        for each in self._get_connector_metadata().loads:
            begin, *block_ids = each.block_ids
            for name, cache in self.caches.items():
                kept = torch.load(self.place(each.key) / name)
                self.blocks(cache)[block_ids] = kept[begin : begin + len(block_ids)]
                if self.answers.keys() & {"load_error", "late_error"}:
                    self.blocks(cache)[3] = torch.nan

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {3} if self.answers.pop("load_error", False) else set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.note("wait", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        assert isinstance(attn_metadata, AttentionMetadata)
        self.note("save", layer_name, attn_metadata.num_actual_tokens)
        for each in self._get_connector_metadata().saves:
            path = self.place(each.key) / layer_name
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.blocks(kv_layer)[each.block_ids], path)

    def wait_for_save(self) -> None:
        self.note("saved")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.note("get_finished", set(finished_req_ids))
        if self.answers.pop("late_error", False):
            self.answers["load_error"] = True
        return None, None

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.note("clear")

    def shutdown(self) -> None:
        self.note("shutdown")


class GroupsConnector(FileConnector, SupportsHMA):
    """Takes the blocks of each KV group."""

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        self.note("groups", len(block_ids))
        return super().request_finished(request, block_ids[0])


@dataclass
class LateTransfer(Transfer):
    """A request's transfer beside steps; a load has the number of its first block before the others."""

    request_id: str


@dataclass
class LateTransfers(Transfers):
    late_loads: list[LateTransfer] = field(default_factory=list)
    sends: list[LateTransfer] = field(default_factory=list)


class LateConnector(FileConnector):
    """Loads between steps, and saves after requests have ended; either takes some steps."""

    NUM_STEPS = 3

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.late = LateTransfers()
        self.running: list[tuple[int, LateTransfer]] = []  # with the steps that are left
        self.failed: set[int] = set()
        self.broken: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.note("alloc", request.request_id, num_external_tokens, blocks.get_block_ids())
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            begin = len(block_ids) - num_external_tokens // self.block_size
            prefix = request.prompt_token_ids[: self.lengths(request.prompt_token_ids)]
            key = self.key(prefix, self.about(request))
            self.late.late_loads.append(LateTransfer(key, [begin, *block_ids[begin:]], request.request_id))

    def _save(self, *arguments: Any) -> None:
        """After the end."""

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        super().build_connector_meta(scheduler_output)
        found, self.late = self.late, LateTransfers()
        return found

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        super().request_finished(request, block_ids)
        length = self.lengths(request.prompt_token_ids)
        is_whole = request.num_computed_tokens >= request.num_prompt_tokens
        key = self.key(request.prompt_token_ids[:length], self.about(request))
        if not is_whole or (self.folder / key).is_dir():
            return False, None
        self.late.sends.append(LateTransfer(key, block_ids[: length // self.block_size], request.request_id))
        return True, {"num_blocks": length // self.block_size}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        sent = self._get_connector_metadata()
        self.running += [(self.NUM_STEPS, each) for each in (*sent.late_loads, *sent.sends)]
        if sent.late_loads and self.answers.pop("early_error", False):
            self.failed = self.broken = {sent.late_loads[0].block_ids[3]}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done = [each for left, each in self.running if not left]
        self.running = [(left - 1, each) for left, each in self.running if left]
        loads = [each for each in done if self.place(each.key).is_dir()]
        sends = [each for each in done if each not in loads]
        for each in sends:
            self.place(each.key).mkdir(parents=True)
            for name, cache in self.caches.items():
                torch.save(self.blocks(cache)[each.block_ids], self.place(each.key) / name)
        for each in loads:
            begin, *block_ids = each.block_ids
            for name, cache in self.caches.items():
                self.blocks(cache)[block_ids] = torch.load(self.place(each.key) / name)[begin:]
            if self.answers.pop("load_error", False):
                self.failed = self.broken = {block_ids[2]}
            for cache in self.caches.values():
                self.blocks(cache)[list(self.broken)] = torch.nan
            self.broken = set()
        self.note("get_finished", set(finished_req_ids))
        return {each.request_id for each in sends}, {each.request_id for each in loads}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


class Unfinished(KVConnectorBase_V1):
    """Lacks methods."""


class NotOne:
    """Is no connector."""
