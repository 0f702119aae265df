"""The lists of guests. A new feature of the engine is a folder beside this file and a row here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.stages import get_stage
from vllm.layers.state import state_layers
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.features.broken_prompts.scheduler import BrokenBlocks
from vllm.v1.features.drafts.scheduler import Drafts
from vllm.v1.features.forced_runs.scheduler import ForcedTokens
from vllm.v1.features.grammars.scheduler import GrammarCompiler
from vllm.v1.features.prompt_embeds.scheduler import EmbeddedPrompts
from vllm.v1.worker.gpu.guests import RunnerGuest

Call = Callable[[Any, tuple], Any]

SCHEDULER_ORDER = (
    "adapters",
    "images",
    "prompt_embeds",
    "grammars",
    "drafts",
    "forced_runs",
    "stages",
    "broken_prompts",
    "kv_events",
    "kv_connector",
    "swap",
    "states",
    "kv_store",
)
"""The order in which guests of the scheduler are called, by their folders' names.

1. adapters: a request that names another adapter under an id is refused before anything else is done for it.
2. images and prompt_embeds: their part of a block's hash is known before anyone waits.
3. grammars: those that wait for theirs are known by their adapter's lane when they are queued.
4. drafts before forced_runs: a step's drafts are settled at the last token that was drawn, before tokens are appended
   that were not.
5. forced_runs before states: a state is kept for tokens that are left when some are dropped at a preemption.
6. stages after drafts and forced_runs, as it sends the tokens that these have settled or appended.
7. broken_prompts before all that keep blocks: what is forgotten is not kept.
8. kv_events before swap: it is told of evicted content that the host takes.
9. kv_connector before swap: what it has promised to a request, it loads, whoever else has some of it.
10. swap before states: without evicted content that the host does not take, the state after it is of no use.
11. kv_store: what a request begins with is known when it looks there, memory comes before the disk, and what `states`
    saves of a step is known.
"""
ORDER = (
    "hidden_cache",
    "stages",
    "grammars",
    "forced_runs",
    "states",
    "drafts",
    "broken_prompts",
    "adapters",
    "prompt_embeds",
    "images",
    "kv_connector",
    "swap",
    "kv_store",
)
"""The order in which guests are called, by their folders' names.

1. hidden_cache: whoever reads hidden states of cached prefixes after it finds them.
2. stages: all others read the tokens that it writes.
3. grammars before forced_runs, which asks their masks.
4. forced_runs before drafts: a draft follows the tokens that are appended undrawn.
5. states before drafts: a state that has taken wrong tokens is taken back before further ones are drafted.
6. drafts and broken_prompts before adapters: a step's rows are known once all have said which hidden states they need.
7. adapters: they see the rows that layers have.
8. prompt_embeds after adapters: a step that has embeddings is computed, whatever they say of recordings.
9. images after prompt_embeds, which takes back the rows that it gave, and after all that read a batch's positions, as
   pictures shift them.
10. kv_connector before swap, as in the scheduler.
11. swap and kv_store: their blocks hold what all others keep in a block, which they have allocated before.
"""


def runner_guests(runner: Any) -> Sequence[RunnerGuest]:
    """The guests of a GPUModelRunner, in their order; those of a StageRunner concern layers and what these keep."""
    config: VllmConfig = runner.vllm_config
    cache, stage = config.cache_config, get_stage()
    guests: list[RunnerGuest] = []
    if stage.is_last:
        guests += _head_guests(runner)
    else:
        from vllm.v1.features.drafts.layers import keep_streams
        from vllm.v1.features.stages.runner import TokensOfSteps

        keep_streams(config, runner.model)
        guests.append(TokensOfSteps(runner))
    if state_layers(runner.model):
        from vllm.v1.features.states.runner import States

        guests.append(States(runner))
    if config.speculative_config is not None and stage.is_last:
        from vllm.v1.features.drafts.runner import make_speculator

        guests.append(make_speculator(runner))
    if cache.finds_prefixes and stage.is_last:
        from vllm.v1.features.broken_prompts.runner import PromptChecks

        guests.append(PromptChecks(runner))
    if config.lora_config is not None:
        from vllm.v1.features.adapters.runner import Adapters

        sizes, reads_images = (runner.states.max_num_reqs, runner.max_decode_rows), config.model_config.reads_images
        guests.append(Adapters(runner.model, config.lora_config, *sizes, runner.records_kernels, reads_images))
    # The last stage samples, and has to know which tokens have no ids.
    if config.model_config.enable_prompt_embeds and (stage.is_first or stage.is_last):
        from vllm.v1.features.prompt_embeds.runner import EmbeddedRows

        guests.append(EmbeddedRows(runner))
    if config.model_config.reads_images:
        guests.append(_picture_guest(runner))
    if config.kv_transfer_config is not None:
        from vllm.v1.features.kv_connector.runner import ConnectedLayers

        guests.append(ConnectedLayers(runner))
    if cache.swap_space:
        from vllm.v1.features.swap.runner import SwapSpace

        guests.append(SwapSpace(runner))
    if uses_store(config):
        from vllm.v1.features.kv_store.runner import StoredBlocks

        guests.append(StoredBlocks(runner))
    return guests


def _head_guests(runner: Any) -> Sequence[RunnerGuest]:
    """The first guests where rows are sampled and read."""
    config: VllmConfig = runner.vllm_config
    guests: list[RunnerGuest] = []
    if config.cache_config.enable_prefix_caching and config.cache_config.caches_hidden_states:
        from vllm.v1.features.hidden_cache.runner import HiddenCache

        guests.append(HiddenCache(runner))
    if config.model_config.runner_type != "pooling":
        from vllm.v1.features.forced_runs.runner import ForcedRuns
        from vllm.v1.features.grammars.runner import Grammars

        grammars = Grammars(runner)
        guests += [grammars, ForcedRuns(runner, grammars.masks)]
    return guests


def uses_store(config: VllmConfig) -> bool:
    """Whether there may be a store on disk."""
    return bool(config.cache_config.kv_store) and config.model_config.attn_type != "encoder_only"


def _picture_guest(runner: Any) -> RunnerGuest:
    from vllm.v1.features.images.runner import PicturePlaces, PictureRows

    return PictureRows(runner) if get_stage().is_first else PicturePlaces(runner)


def scheduler_guests(config: VllmConfig, call: Call, scheduler: Any) -> Sequence[SchedulerGuest]:
    """The guests of a scheduler, in their order. `call`: see AdapterPool."""
    guests: list[SchedulerGuest] = []
    if config.lora_config is not None:
        from vllm.v1.features.adapters.pool import AdapterPool
        from vllm.v1.features.adapters.scheduler import AdapterTurns

        pool = AdapterPool(config.lora_config, call, config.scheduler_config.max_num_seqs)
        guests.append(AdapterTurns(pool, scheduler.requests))
    if config.model_config.reads_images and config.model_config.hf_config.pools_itself:
        from vllm.v1.features.images.scheduler import LonePictures

        guests.append(LonePictures(scheduler.requests))
    if config.model_config.attn_type == "encoder_only":
        return guests
    if config.model_config.reads_images:
        guests.append(_picture_turns(config, scheduler))
    if config.model_config.runner_type != "pooling":
        if config.model_config.enable_prompt_embeds:
            guests.append(EmbeddedPrompts(scheduler.requests))
        guests.append(GrammarCompiler(config.model_config, scheduler))
        if config.speculative_config is not None:
            guests.append(Drafts(scheduler))
        guests.append(ForcedTokens(scheduler))
    if config.parallel_config.pipeline_parallel_size > 1:
        from vllm.v1.features.stages.scheduler import SampledTokens

        guests.append(SampledTokens(scheduler.requests))
    if scheduler.kv.enable_caching:
        guests.append(BrokenBlocks(scheduler))
    if config.kv_events_config is not None and scheduler.kv.enable_caching:
        guests.append(_event_guest(config, scheduler))
    if config.kv_transfer_config is not None:
        from vllm.v1.features.kv_connector.make import make_connections

        guests.append(make_connections(config, call, scheduler))
    guests += cache_guests(scheduler)
    if uses_store(config):
        from vllm.v1.features.kv_store.make import make_store_guest

        guests += make_store_guest(config, call, scheduler)
    return guests


def _picture_turns(config: VllmConfig, scheduler: Any) -> SchedulerGuest:
    import torch

    from vllm.models.vision.families import picture_family
    from vllm.v1.features.images.scheduler import PictureTurns, WholePictureTurns

    model, sizes = config.model_config, config.scheduler_config
    family = picture_family(model.hf_config, Path(model.path))
    whole = family.whole_blocks
    room = max(sizes.max_num_batched_tokens - sizes.max_num_seqs, 1)
    row_bytes = family.parts_of_a_row * model.input_embedding_size * getattr(torch, model.dtype).itemsize
    kind, kept = None if whole is None else whole.kind, model.encoder_cache_bytes // row_bytes
    turns = WholePictureTurns if whole is not None and whole.beyond_windows else PictureTurns
    return turns(scheduler.requests, kind, room, kept, scheduler.kv.block_size)


def _event_guest(config: VllmConfig, scheduler: Any) -> SchedulerGuest:
    from vllm.v1.features.kv_events.publisher import EventPublisher
    from vllm.v1.features.kv_events.scheduler import CacheEvents

    assert config.kv_events_config is not None
    rank = config.parallel_config.data_parallel_rank
    medium = "GPU" if config.device_config.device == "cuda" else "CPU"
    return CacheEvents(scheduler, EventPublisher(config.kv_events_config, rank), medium, rank)


def cache_guests(scheduler: Any) -> Sequence[SchedulerGuest]:
    """The guests that concern what a scheduler's cache keeps, the last in the order."""
    guests: list[SchedulerGuest] = []
    if scheduler.kv.enable_caching and scheduler.cache_config.num_host_blocks:
        from vllm.v1.features.swap.scheduler import Swaps

        guests.append(Swaps(scheduler))
    if scheduler.kv.enable_caching and scheduler.cache_config.num_states is not None:
        from vllm.v1.features.states.scheduler import Snapshots

        guests.append(Snapshots(scheduler))
    return guests


def encoder_guests(config: VllmConfig, model: Any) -> Sequence[RunnerGuest]:
    """The guests of an EncoderRunner, which has no cache."""
    if config.model_config.reads_images and config.model_config.hf_config.pools_itself:
        from vllm.v1.features.images.runner import PictureVectors

        return (PictureVectors(model),)
    if config.lora_config is None:
        return ()
    from vllm.v1.features.adapters.runner import Adapters

    reads_images = config.model_config.reads_images
    return (Adapters(model, config.lora_config, config.scheduler_config.max_num_seqs, 1, False, reads_images),)
