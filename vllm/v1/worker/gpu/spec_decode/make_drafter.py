"""The drafter that a config asks for."""

from __future__ import annotations

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.worker.gpu.spec_decode.drafter import Drafter
from vllm.v1.worker.gpu.spec_decode.speculator import Speculator
from vllm.v1.worker.gpu.states import RequestStates


def make_speculator(config: VllmConfig, states: RequestStates) -> Speculator | None:
    """None: nothing is drafted."""
    speculative = config.speculative_config
    if speculative is None:
        return None
    # What no engine asks for is not imported.
    from vllm.v1.worker.gpu.spec_decode.adaptive import AdaptiveDrafter

    drafter = _make_drafter(speculative, states.max_num_reqs)
    drafter = AdaptiveDrafter(drafter, speculative, states.max_num_reqs, states.device.type)
    assert speculative.num_speculative_tokens is not None
    return Speculator(drafter, speculative.num_speculative_tokens, config.model_config.vocab_size, states)


def _make_drafter(config: SpeculativeConfig, max_num_reqs: int) -> Drafter:
    if config.method == "ngram":
        from vllm.v1.worker.gpu.spec_decode.ngram import NgramDrafter

        return NgramDrafter(config, max_num_reqs)
    if config.method == "suffix":
        from vllm.v1.worker.gpu.spec_decode.suffix import SuffixDrafter

        return SuffixDrafter(config)
    raise ValueError(f"speculative_config: method={config.method!r} has no drafter")
