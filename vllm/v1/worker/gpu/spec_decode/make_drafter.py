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
    assert speculative.num_speculative_tokens is not None
    drafter = _make_drafter(speculative, states.max_num_reqs)
    return Speculator(drafter, speculative.num_speculative_tokens, config.model_config.vocab_size, states)


def _make_drafter(speculative: SpeculativeConfig, max_num_reqs: int) -> Drafter:
    raise ValueError(f"speculative_config: method={speculative.method!r} has no drafter")
