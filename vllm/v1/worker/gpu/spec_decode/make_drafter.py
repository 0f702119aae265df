"""The drafter that a config asks for."""

from __future__ import annotations

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.worker.gpu.spec_decode.drafter import Drafter
from vllm.v1.worker.gpu.spec_decode.speculator import Speculator
from vllm.v1.worker.gpu.states import BlockTables, RequestStates

# A draft that is as large as its target is asked for all the same.
_LARGEST_COST = 0.4


def make_speculator(
    config: VllmConfig, states: RequestStates, tables: BlockTables, window: int | None = None
) -> Speculator | None:
    """None: nothing is drafted. `tables` and `window` are the first KV group's. ValueError: a draft model cannot be
    used, or cannot be used with this target."""
    speculative = config.speculative_config
    if speculative is None:
        return None
    # What no engine asks for is not imported.
    from vllm.v1.worker.gpu.spec_decode.adaptive import AdaptiveDrafter

    assert speculative.num_speculative_tokens is not None
    max_num_reqs, kind = states.max_num_reqs, states.device.type
    speculator = Speculator(speculative.num_speculative_tokens, config.model_config.vocab_size, states)
    if speculative.method == "draft_model":
        from vllm.v1.worker.gpu.spec_decode.draft_model import DraftModelDrafter

        if window is not None:
            raise ValueError(
                "speculative_config: a draft model needs a target with layers that see all tokens, whose blocks it "
                "shares; take method='ngram' or 'suffix'"
            )
        speculator.draft_model = DraftModelDrafter(config, states, tables)
    drafter = speculator.draft_model or _make_drafter(speculative, max_num_reqs)
    token_cost = _relative_size(config) if speculator.draft_model else 0.0
    speculator.drafter = AdaptiveDrafter(drafter, speculative, max_num_reqs, kind, token_cost)
    return speculator


def _relative_size(config: VllmConfig) -> float:
    """Of the draft model's weights to the target's, near enough."""
    assert config.speculative_config is not None
    draft, target = config.speculative_config.draft_model_config.hf_config, config.model_config.hf_config
    sizes = [
        each.num_hidden_layers * each.hidden_size * (4 * each.hidden_size + 3 * each.intermediate_size)
        + each.vocab_size * each.hidden_size
        for each in (draft, target)
    ]
    return min(sizes[0] / sizes[1], _LARGEST_COST)


def _make_drafter(config: SpeculativeConfig, max_num_reqs: int) -> Drafter:
    if config.method == "ngram":
        from vllm.v1.worker.gpu.spec_decode.ngram import NgramDrafter

        return NgramDrafter(config, max_num_reqs)
    from vllm.v1.worker.gpu.spec_decode.suffix import SuffixDrafter

    return SuffixDrafter(config)
