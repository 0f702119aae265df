"""Requests, blocks and steps as connectors see them: with upstream's names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.content_names import ContentNames
from vllm.v1.core.kv_cache_groups import Blocks
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.features.drafts.scheduler import StepDrafts
from vllm.v1.request import Request


class PlaceOfPicture(NamedTuple):
    """The tokens of a prompt that a picture covers."""

    offset: int
    length: int


@dataclass
class ConnectorPicture:
    """A picture of a prompt; `identifier` follows from its values, and is the same in every process."""

    identifier: str
    mm_position: PlaceOfPicture
    modality: str = "image"

    @property
    def mm_hash(self) -> str:
        """The identifier."""
        return self.identifier


def _pictures(request: Request) -> list[ConnectorPicture]:
    pictures = () if request.images is None else request.images.pictures
    return [
        ConnectorPicture(
            hashlib.blake2b(each.row_names.tobytes(), digest_size=16).hexdigest(),
            PlaceOfPicture(each.start, each.length),
        )
        for each in pictures
    ]


@dataclass
class ConnectorRequest:
    """A request as it is when a connector is called."""

    request_id: str
    prompt_token_ids: list[int]
    all_token_ids: list[int]
    num_computed_tokens: int
    block_hashes: list[bytes]  # of its leading full blocks, as far as they are known: the same in every process
    sampling_params: SamplingParams
    cache_salt: str | None
    arrival_time: float
    priority: int
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: LoRARequest | None = None
    mm_features: list[ConnectorPicture] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """They themselves."""
        return self.all_token_ids[self.num_prompt_tokens :]


def request_view(request: Request, content: ContentNames) -> ConnectorRequest:
    """A copy for a connector."""
    token_ids = content.token_ids(request)
    return ConnectorRequest(
        request.request_id,
        token_ids[: request.num_prompt_tokens],
        list(token_ids),
        request.num_computed_tokens,
        content.hashes(request),
        request.sampling_params,
        request.cache_salt,
        request.arrival_time,
        request.priority,
        request.kv_transfer_params,
        request.lora_request,
        _pictures(request),
    )


@dataclass
class ConnectorBlocks:
    """A request's blocks, in order."""

    block_ids: Blocks

    def get_block_ids(self, allow_none: bool = False) -> Blocks | None:
        """The blocks in each KV group, of which there is one; with `allow_none`, None where there are no blocks."""
        return None if allow_none and not any(self.block_ids) else self.block_ids


@dataclass
class NewRequest:
    """A request that is admitted in this step, or that comes back after a preemption."""

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]  # these, and those that were generated before
    sampling_params: SamplingParams
    block_ids: Blocks
    num_computed_tokens: int  # loaded ones included
    lora_request: LoRARequest | None = None
    mm_features: list[ConnectorPicture] = field(default_factory=list)
    pooling_params: Any = None


@dataclass
class CachedRequests:
    """Requests that were admitted before; one entry of each list is a request's."""

    req_ids: list[str]
    new_block_ids: list[Blocks | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    resumed_req_ids: set[str] = field(default_factory=set)  # always empty: they are new ones
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_reqs(self) -> int:
        """How many there are."""
        return len(self.req_ids)


@dataclass
class ConnectorStep:
    """The work of a step."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)


def ended_names(step: SchedulerOutput, requests: dict[str, Request]) -> set[str]:
    """The requests of whose end the step tells. Those that begin anew have left their slots, too, and have not ended; a
    new one may have an earlier one's name."""
    return {name for name in step.finished_req_ids if name not in requests or not requests[name].num_preemptions}


def step_view(step: SchedulerOutput, requests: dict[str, Request], content: ContentNames) -> ConnectorStep:
    """A copy for a connector."""

    def ids(new: NewRequestData) -> list[int]:
        return content.token_ids(requests[new.req_id])[: len(new.prefill_token_ids)]

    new = [
        NewRequest(
            each.req_id,
            ids(each)[: each.num_prompt_tokens],
            ids(each),
            each.sampling_params,
            tuple(list(blocks) for blocks in each.block_ids),
            each.num_computed_tokens,
            requests[each.req_id].lora_request,
            _pictures(requests[each.req_id]),
            each.pooling_params,
        )
        for each in step.scheduled_new_reqs
    ]
    cached = step.scheduled_cached_reqs
    return ConnectorStep(
        new,
        CachedRequests(
            list(cached.req_ids),
            [tuple(list(blocks) for blocks in added) if added else None for added in cached.new_block_ids],
            list(cached.num_computed_tokens),
            [requests[name].num_output_tokens for name in cached.req_ids],
        ),
        dict(step.num_scheduled_tokens),
        step.total_num_scheduled_tokens,
        ended_names(step, requests),
        set(step.preempted_req_ids),
        dict(step.parts.of(StepDrafts) or {}),
    )


@dataclass
class StepAttention:
    """A step's tokens, as a layer's attention knows them.

    Attributes:
        num_actual_tokens: T, the step's tokens.
        slot_mapping: int64 [T], block * block_size + offset of each.
        seq_lens: int32 [R], of each request the tokens in the cache after the step.
        query_start_loc: int32 [R + 1], where each request's tokens begin.
    """

    num_actual_tokens: int
    slot_mapping: Any
    seq_lens: Any
    query_start_loc: Any


@dataclass
class LayerCache:
    """A layer, of which a connector sees its cache."""

    kv_cache: Any


@dataclass
class ConnectorContext:
    """The surroundings of a step's forward pass.

    Attributes:
        attn_metadata: a StepAttention by the layers' names; None: nothing is computed.
        no_compile_layers: a LayerCache by the same names.
    """

    attn_metadata: dict[str, StepAttention] | None
    no_compile_layers: dict[str, LayerCache]
