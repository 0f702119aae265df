"""The drafter that a config asks for."""

from __future__ import annotations

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.worker.gpu.spec_decode.drafter import Drafter
from vllm.v1.worker.gpu.spec_decode.speculator import Speculator
from vllm.v1.worker.gpu.states import BlockTables, RequestStates


def make_speculator(config: VllmConfig, states: RequestStates, tables: BlockTables) -> Speculator | None:
    """None: nothing is drafted. `tables`: of the first KV group. ValueError: the draft model cannot be used."""
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

        speculator.draft_model = DraftModelDrafter(config, states, tables)
    drafter = speculator.draft_model or _make_drafter(speculative, max_num_reqs)
    speculator.drafter = AdaptiveDrafter(drafter, speculative, max_num_reqs, kind)
    return speculator


def _make_drafter(config: SpeculativeConfig, max_num_reqs: int) -> Drafter:
    if config.method == "ngram":
        from vllm.v1.worker.gpu.spec_decode.ngram import NgramDrafter

        return NgramDrafter(config, max_num_reqs)
    from vllm.v1.worker.gpu.spec_decode.suffix import SuffixDrafter

    return SuffixDrafter(config)
