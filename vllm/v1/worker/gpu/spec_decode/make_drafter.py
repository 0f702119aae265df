"""The drafter that a config asks for."""

from __future__ import annotations

from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.cache import Window
from vllm.v1.worker.gpu.spec_decode.drafter import CachedDrafter, Drafter
from vllm.v1.worker.gpu.spec_decode.speculator import Speculator
from vllm.v1.worker.gpu.states import BlockTables, RequestStates

# A draft that is as large as its target is asked for all the same.
_LARGEST_COST = 0.4


def make_speculator(
    config: VllmConfig, target: Any, states: RequestStates, tables: BlockTables, window: Window = None
) -> Speculator | None:
    """None: nothing is drafted. `tables` and `window` are the first KV group's of the model `target`. ValueError: a
    draft model or prediction layers cannot be used, or cannot be used with this target."""
    speculative = config.speculative_config
    if speculative is None:
        return None
    # What no engine asks for is not imported.
    from vllm.v1.worker.gpu.spec_decode.adaptive import AdaptiveDrafter

    assert speculative.num_speculative_tokens is not None
    max_num_reqs, kind = states.max_num_reqs, states.device.type
    speculator = Speculator(speculative.num_speculative_tokens, config.model_config.vocab_size, states)
    drafter: Drafter
    if speculative.method in ("draft_model", "mtp", "eagle", "eagle3"):
        drafter = speculator.draft_model = _make_cached_drafter(config, target, states, tables, window, speculator)
    else:
        drafter = _make_drafter(speculative, max_num_reqs)
    token_cost = _relative_size(config) if speculator.draft_model else 0.0
    speculator.drafter = AdaptiveDrafter(drafter, speculative, max_num_reqs, kind, token_cost)
    return speculator


def _make_cached_drafter(
    config: VllmConfig,
    target: Any,
    states: RequestStates,
    tables: BlockTables,
    window: Window,
    speculator: Speculator,
) -> CachedDrafter:
    assert config.speculative_config is not None
    method = config.speculative_config.method
    if window is not None:
        raise ValueError(
            f"speculative_config: {'a draft model' if method == 'draft_model' else method} needs a target with layers "
            "that see all tokens, whose blocks it shares; take method='ngram' or 'suffix'"
        )
    if method != "draft_model":
        from vllm.v1.worker.gpu.spec_decode.follower import Follower
        from vllm.v1.worker.gpu.spec_decode.layers import load_layers

        layers = load_layers(config, target, states.device)
        speculator.follower = Follower(config, *layers, target, states, tables)
        return speculator.follower
    from vllm.v1.worker.gpu.spec_decode.draft_model import DraftModelDrafter

    return DraftModelDrafter(config, states, tables)


def _relative_size(config: VllmConfig) -> float:
    """Of the weights that draft to the target's, near enough."""
    assert config.speculative_config is not None
    target = config.model_config.hf_config
    is_mtp = config.speculative_config.method == "mtp"
    draft = target if is_mtp else config.speculative_config.draft_model_config.hf_config
    sizes = [
        num_layers * each.hidden_size * (4 * each.hidden_size + 3 * each.intermediate_size)
        + each.vocab_size * each.hidden_size
        for each, num_layers in (
            (draft, 1 if is_mtp else draft.num_hidden_layers),
            (target, target.num_hidden_layers),
        )
    ]
    return min(sizes[0] / sizes[1], _LARGEST_COST)


def _make_drafter(config: SpeculativeConfig, max_num_reqs: int) -> Drafter:
    if config.method == "ngram":
        from vllm.v1.worker.gpu.spec_decode.ngram import NgramDrafter

        return NgramDrafter(config, max_num_reqs)
    from vllm.v1.worker.gpu.spec_decode.suffix import SuffixDrafter

    return SuffixDrafter(config)
