"""The drafter that a config asks for."""

from __future__ import annotations

from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.stages import WHOLE, building_stage
from vllm.v1.features.drafts.draft_lengths import DraftLengths
from vllm.v1.features.drafts.drafter import CachedDrafter, Drafter
from vllm.v1.features.drafts.runner import Speculator

# A draft that is as large as its target is asked for all the same.
_LARGEST_COST = 0.4


def make_speculator(runner: Any) -> Speculator:
    """
    Raises:
        ValueError: a draft model or prediction layers cannot be used, or cannot be used with the runner's model.
    """
    config, states = runner.vllm_config, runner.states
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens is not None
    speculator = Speculator(runner, speculative.num_speculative_tokens)
    if speculative.method in ("draft_model", "mtp", "eagle", "eagle3"):
        # All of the draft is where the target's last stage is.
        with building_stage(WHOLE):
            speculator.drafter = speculator.draft_model = _make_cached_drafter(runner, speculator)
    else:
        speculator.drafter = _make_drafter(speculative, states.max_num_reqs)
    token_cost = _relative_size(config) if speculator.draft_model else 0.0
    speculator.lengths = DraftLengths(speculative, states.max_num_reqs, states.device.type, token_cost)
    return speculator


def _make_cached_drafter(runner: Any, speculator: Speculator) -> CachedDrafter:
    config: VllmConfig = runner.vllm_config
    assert config.speculative_config is not None
    method = config.speculative_config.method
    # Drafting layers share the blocks of the first KV group.
    tables = runner.block_tables[0]
    if runner.kv_layout.windows[0] is not None:
        raise ValueError(
            f"speculative_config: {'a draft model' if method == 'draft_model' else method} needs a target with layers "
            "that see all tokens, whose blocks it shares; take method='ngram' or 'suffix'"
        )
    if method != "draft_model":
        from vllm.v1.features.drafts.eagle import EagleProposer
        from vllm.v1.features.drafts.layers import load_layers

        layers = load_layers(config, runner.model, runner.device)
        speculator.proposer = EagleProposer(config, *layers, runner.model, runner.states, tables, runner.before_rows)
        return speculator.proposer
    from vllm.v1.features.drafts.draft_model import DraftModelDrafter

    return DraftModelDrafter(config, runner.states, tables)


def _relative_size(config: VllmConfig) -> float:
    """The size of the weights that draft, relative to the target's, near enough."""
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
        from vllm.v1.features.drafts.ngram import NgramDrafter

        return NgramDrafter(config, max_num_reqs)
    from vllm.v1.features.drafts.suffix import SuffixDrafter

    return SuffixDrafter(config)
