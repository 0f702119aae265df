"""Drafts for the next step, from a drafter that may fail, and the verification of the last step's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.stages import WHOLE, building_stage
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.features.drafts.draft_lengths import DraftLengths
from vllm.v1.features.drafts.drafter import CachedDrafter, Drafter
from vllm.v1.features.drafts.scheduler import NextDrafts, StepDrafts
from vllm.v1.features.drafts.verify import VerifiedSamples, expand, verified, verify
from vllm.v1.worker.gpu.guests import CacheSizes, Completion, RunnerGuest, Samples, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import KVCaches

if TYPE_CHECKING:
    from vllm.v1.features.drafts.eagle import EagleProposer

logger = init_logger(__name__)


class Speculator(RunnerGuest):
    """Asks a drafter on behalf of the slots' requests, for as many tokens as there is room for and as pay. Requests for
    which it raises go on without drafts."""

    drafter: Drafter
    draft_model: CachedDrafter | None = None
    """The part of the drafter that has a model, and so a cache."""
    proposer: EagleProposer | None = None
    """The drafter, where it takes the target's hidden states."""
    lengths: DraftLengths | None = None
    """How much to draft; None: as much as there is room for."""

    def __init__(self, runner: Any, num_tokens: int) -> None:
        """`num_tokens`: the most that are drafted for a request at once. The drafter is set afterwards."""
        self.num_tokens = num_tokens
        self.logits_rows = 1 + num_tokens
        self._runner, self._states = runner, runner.states
        self._vocab_size = runner.model_config.vocab_size
        max_num_reqs, width = self._states.token_ids.shape
        self._longest = width - 1
        self._limits = np.zeros(max_num_reqs, dtype=np.int64)  # [S], the request's tokens at its end
        self._failed = np.zeros(max_num_reqs, dtype=bool)  # [S]
        self._has_warned = False

    # -- memory and weights -------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        return 0 if self.draft_model is None else self.draft_model.block_bytes

    @property
    def own_bytes(self) -> int:
        draft = self.draft_model
        return 0 if draft is None else draft.num_own_blocks * draft.block_bytes

    @property
    def host_block_bytes(self) -> int:
        return 0 if self.proposer is None else self.proposer.hidden_block_bytes

    def in_blocks(self) -> KVCaches:
        return [] if self.proposer is None else self.proposer.kept_in_blocks()

    def reset(self, sizes: CacheSizes) -> None:
        if self.draft_model is not None:
            self.draft_model.allocate(0 if sizes.is_scratch else sizes.num_blocks)

    def models(self) -> Sequence[Any]:
        return () if self.draft_model is None else (self.draft_model.model,)

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        if self.proposer is not None and self.proposer.model.is_of_target:
            self.proposer.model.load_weights(weights)

    # -- slots and steps ----------------------------------------------------------------------------------------------

    def remove(self, slot: int) -> None:
        self._try(np.array([slot]), self.drafter.remove_request, slot)

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        longest, params = self._longest, new.sampling_params
        if params.max_tokens is not None:
            longest = min(int(self._states.prompt_len[slot]) + params.max_tokens, longest)
        self._limits[slot], self._failed[slot] = longest, False
        if self.lengths is not None:
            self.lengths.add_request(slot)
        self._try(np.array([slot]), self.drafter.add_request, slot, self._states)

    def begin(self, step: SchedulerOutput) -> None:
        if self.proposer is not None:
            self.proposer.forget(step)

    def before_batch(self, step: SchedulerOutput) -> None:
        for req_id, drafts in (step.parts.of(StepDrafts) or {}).items():
            self._states.place_tentative(self._states.req_id_to_slot[req_id], drafts)

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        if self.proposer is not None:
            batch.need_hidden(np.arange(len(batch.input_ids_np)))

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        if self.proposer is not None:
            self.proposer.keep(batch, hidden)

    def sample(self, batch: InputBatch, hidden: Tensor) -> Samples | None:
        """Where requests have drafts, each logits row draws what it would draw without."""
        if batch.expanded_np is None or not len(batch.expanded_np[0]):
            return None
        runner, (rows, num_drafts) = self._runner, batch.expanded_np
        expanded = expand(batch.idx_mapping_np[rows], num_drafts, self._states)
        output = runner.replay.sample(batch, expanded.expanded_idx_mapping)
        if output is not None:
            return verified(expanded, output, self._states)
        start = None if runner.host_copies is None else runner.host_copies.start
        return verify(runner.sampler, runner.logits(batch, hidden), expanded, self._states, start)

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        return self._draft

    def _draft(self, outcome: StepOutcome) -> None:
        sampled = outcome.sampled
        if sampled is None:
            return
        if isinstance(sampled, VerifiedSamples):
            self.observe(*sampled.judged())
        rows = np.flatnonzero(sampled.draws)
        drafts = {int(rows[index]): draft for index, draft in self.propose(sampled.slots[rows]).items()}
        outcome.output.parts.add(NextDrafts(outcome.by_request(drafts)))

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter.observe."""
        if (chosen := ~self._failed[slots]).any():
            outcomes = slots[chosen], drafted[chosen], accepted[chosen]
            if self.lengths is not None:
                self.lengths.observe(*outcomes)
            self._try(slots[chosen], self.drafter.observe, *outcomes)

    def propose(self, slots: np.ndarray) -> dict[int, list[int]]:
        """By index into `slots`, int64 [R], the drafts of those that have any."""
        # One token is drawn after the last draft.
        room = np.minimum(self._limits[slots] - self._states.total_len[slots] - 1, self.num_tokens)
        asked = np.flatnonzero((room > 0) & ~self._failed[slots])
        if not len(asked):
            return {}
        own, wanted, may_be_too_short = slots[asked], room[asked].astype(np.int32), False
        if self.lengths is not None:
            wanted, may_be_too_short = self.lengths.wanted(own, wanted)
        chosen = np.flatnonzero(wanted)
        if not len(chosen):
            return {}
        most = wanted[chosen].astype(np.int32)
        drafts = self._try(own[chosen], self.drafter.propose, own[chosen], self._states, most)
        if drafts is None:
            return {}
        if self.lengths is not None and may_be_too_short:
            found = np.zeros(len(own), dtype=np.int64)
            found[chosen] = [len(draft) for draft in drafts]
            if not self.lengths.are_worth_it(own, found):
                return {}
        rows = zip(asked[chosen].tolist(), drafts, most.tolist(), strict=True)
        return {index: usable for index, draft, room in rows if (usable := self._usable(draft, room))}

    def _usable(self, draft: np.ndarray, most: int) -> list[int]:
        """The draft up to its room, or to its first invalid id."""
        if not len(draft):
            return []
        draft = draft[:most]
        is_valid = (draft >= 0) & (draft < self._vocab_size)
        return draft.tolist() if is_valid.all() else draft[: int(is_valid.argmin())].tolist()

    def _try(self, slots: np.ndarray, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception:
            self._failed[slots] = True
            if not self._has_warned:
                self._has_warned = True
                logger.exception("The drafter failed; requests for which it does go on without drafts")
            return None


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
