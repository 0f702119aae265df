"""Pictures of prompts in the worker: encoded when the first of their tokens is computed, and given to the forward pass
of each step that computes some."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backend import WholeBlock
from vllm.distributed.stages import get_stage
from vllm.inputs.images import Picture, PromptImages
from vllm.layers.input_rows import AddedRows, InputRows
from vllm.layers.rotary_embedding import RotaryEmbedding
from vllm.logger import init_logger
from vllm.models.vision.families import Whole, frequency_axes, picture_family
from vllm.models.vision.pair import PairEmbedder
from vllm.models.vision.tower import Tower
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.features.images.scheduler import StepPictures
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.guests import Completion, RunnerGuest, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import NO_ID

logger = init_logger(__name__)
_KEPT_VECTORS = 4096


class PicturePlaces(RunnerGuest):
    """The places that the slots' requests have pictures at: the positions of their tokens, and which see each other.
    Where layers are split into stages, it is all that others than the first one need."""

    def __init__(self, runner: Any) -> None:
        config = runner.model_config
        self._states, self._device = runner.states, runner.device
        self._family = family = picture_family(config.hf_config, Path(config.path))
        self._whole = family.whole_blocks
        self._vocab_size: int = config.vocab_size
        self._images: dict[int, PromptImages] = {}
        self._rotaries: list[tuple[RotaryEmbedding, Tensor]] = []
        self._max_model_len, self._num_tables = config.max_model_len, 0
        if family.has_axes:
            found = {id(each): each for each in map(_rotary, runner.model.modules()) if each is not None}
            for rotary in found.values():
                axes = frequency_axes(family, rotary.num_frequencies)
                self._rotaries.append((rotary, torch.tensor(axes, device=runner.device)))

    def version(self) -> int:
        return self._num_tables

    def remove(self, slot: int) -> None:
        self._images.pop(slot, None)

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        images = (step.parts.of(StepPictures) or StepPictures()).images.get(new.req_id)
        if images is not None:
            self._images[slot] = images
            if images.shift > 0:  # a video takes more time than it has tokens
                longest = self._max_model_len + images.shift
                self._num_tables += any([rotary.reach(longest) for rotary, _ in self._rotaries])
            # Some models have ids for rows that are none of their words'.
            ids = self._states.token_ids[slot]
            ids[: len(new.prefill_token_ids)][ids[: len(new.prefill_token_ids)] >= self._vocab_size] = NO_ID

    def begin(self, step: SchedulerOutput) -> None:
        self._clear()

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        if not self._images:
            return
        if self._whole is not None:
            self._give_blocks(batch, self._whole)
        if self._rotaries:
            self._give_positions(batch)

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        self._clear()

    def _clear(self) -> None:
        for rotary, _ in self._rotaries:
            rotary.clear()

    def _give_blocks(self, batch: InputBatch, whole: Whole) -> None:
        blocks: list[WholeBlock] = []
        starts, ends, origins = batch.num_computed_np.tolist(), batch.seq_lens_np.tolist(), batch.origins_np.tolist()
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            images = self._images.get(slot)
            if images is None:
                continue
            runs = images.runs() if whole.kind == "pictures" else [(0, images.num_tokens)]
            for begin, end in runs:
                first = max(begin, starts[row])
                if first < end <= ends[row]:
                    seen_from = begin if whole.beyond_windows else None
                    blocks.append(WholeBlock(row, first + origins[row], end + origins[row], end, seen_from))
        if blocks:
            batch.is_changed, batch.can_record_change = True, False
            batch.whole_blocks, batch.whole_in_windows_only = blocks, whole.in_windows_only

    def _give_positions(self, batch: InputBatch) -> None:
        shown = np.repeat(batch.positions_np[None], 3, axis=0)
        origins, bounds = batch.origins_np, batch.query_start_loc_np
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            images = self._images.get(slot)
            if images is None or images.positions is None:
                continue
            first, last = int(bounds[row]), int(bounds[row + 1])
            begin = first - int(origins[row])
            given = images.positions[:, begin : begin + last - first]
            shown[:, first : first + given.shape[1]] = given
            shown[:, first + given.shape[1] : last] += images.shift
        if (shown == shown[0]).all():
            batch.shown_positions_np = shown[0]
            return
        batch.is_changed, batch.can_record_change = True, False
        batch.shown_positions_np = np.arange(shown.shape[1])
        positions = upload(shown, self._device)
        for rotary, axes in self._rotaries:
            rotary.give(positions, axes)


class PictureRows(PicturePlaces):
    """The rows that the slots' requests have of pictures, too."""

    def __init__(self, runner: Any) -> None:
        """ValueError: the model's tower cannot be loaded, the decoder takes more of a token than its embedding, or
        further rows of a picture belong to layers of other stages."""
        super().__init__(runner)
        config, family = runner.model_config, self._family
        self._filler_id = family.filler_id or 0  # any that can be looked up, where nothing else is
        has_further = family.filler_id is not None
        rows: InputRows | None = getattr(runner.model.model if has_further else runner.model, "input_rows", None)
        if rows is None:
            raise ValueError(
                f"{family.name} reads no pictures here: {type(runner.model).__name__} takes more of a token than its "
                "embedding; pass language_model_only=True to run its text decoder alone"
            )
        self._rows = rows
        self._added: AddedRows | None = getattr(getattr(runner.model, "model", None), "added_rows", None)
        own_layers = get_stage().layers
        num_first = max(family.added_before, default=0)
        if own_layers is not None and num_first > len(own_layers):
            raise ValueError(
                f"pipeline_parallel_size: {family.name} adds something of pictures in its first {num_first} layers, "
                f"which the first stage must have, and VLLM_PP_LAYER_PARTITION gives it {len(own_layers)}"
            )
        self._width: int = config.input_embedding_size
        self.tower = Tower(family, config, runner.device)
        self._own_bytes = config.encoder_cache_bytes
        self._cache = EncodedPictures(family.parts_of_a_row * self._width)
        self._why_unsound: dict[int, str] = {}  # by slot

    @property
    def own_bytes(self) -> int:
        return self._own_bytes

    def models(self) -> Sequence[Any]:
        return (self.tower,)

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        self.tower.load_weights(weights)
        self._cache.clear()

    def reset(self, sizes: Any) -> None:
        self._cache.clear()

    def begin(self, step: SchedulerOutput) -> None:
        super().begin(step)
        for digest in (step.parts.of(StepPictures) or StepPictures()).dropped:
            self._cache.drop(digest)

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        if self._images:
            self._give_rows(batch)
        super().before_forward(step, batch)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        self._why_unsound.pop(slot, None)

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        if not self._why_unsound:
            return None
        slots = enumerate(batch.idx_mapping_np.tolist())
        known = {batch.req_ids[row]: self._why_unsound[slot] for row, slot in slots if slot in self._why_unsound}

        def complete(outcome: StepOutcome) -> None:
            outcome.errors.update({name: why for name, why in known.items() if name in outcome.errors})

        return complete

    def _clear(self) -> None:
        super()._clear()
        self._rows.clear()
        if self._added is not None:
            self._added.clear()

    def _give_rows(self, batch: InputBatch) -> None:
        tokens: list[np.ndarray] = []
        wanted: list[tuple[Picture, int, int]] = []
        slots: list[int] = []
        starts, ends, origins = batch.num_computed_np, batch.seq_lens_np, batch.origins_np
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            images = self._images.get(slot)
            for picture in () if images is None else images.pictures:
                places = picture.start + picture.rows
                first, last = np.searchsorted(places, (starts[row], ends[row])).tolist()
                if first < last:
                    tokens.append(places[first:last] + origins[row])
                    wanted.append((picture, first, last))
                    slots.append(slot)
        if not wanted:
            return
        encoded = self._cache.take([picture for picture, _, _ in wanted], self.tower)
        for slot, (picture, _, _) in zip(slots, wanted, strict=True):
            if picture.digest in self._cache.why_unsound:
                self._why_unsound[slot] = self._cache.why_unsound[picture.digest]
        values = torch.cat([encoded[picture.digest][first:last] for picture, first, last in wanted])
        numbers = np.concatenate(tokens)
        batch.input_ids_np[numbers] = self._filler_id
        batch.is_changed, batch.can_record_change = True, False
        own, *others = values.split(self._width, dim=1)
        places_on_device = upload(numbers, self._device)
        self._rows.give(places_on_device, own.contiguous())
        if others:
            assert self._added is not None
            self._added.give(places_on_device, dict(zip(self._family.added_before, others, strict=True)))


class PictureVectors(RunnerGuest):
    """The vectors of pictures that are whole requests."""

    def __init__(self, model: PairEmbedder) -> None:
        self._model = model
        self._pictures: dict[int, Picture] = {}
        self._kept: OrderedDict[str, Tensor] = OrderedDict()  # by digest, the longest unused first

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        self._kept.clear()

    def remove(self, slot: int) -> None:
        self._pictures.pop(slot, None)

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        images = (step.parts.of(StepPictures) or StepPictures()).images.get(new.req_id)
        if images is not None:
            (self._pictures[slot],) = images.pictures

    def vector(self, slot: int) -> Tensor | None:
        picture = self._pictures.get(slot)
        if picture is None:
            return None
        found = self._kept.pop(picture.digest, None)
        if found is None:
            # One at a time, so that no picture's vector depends on others.
            found = self._model.embed_picture(picture.values)
        self._kept[picture.digest] = found
        if len(self._kept) > _KEPT_VECTORS:
            self._kept.popitem(last=False)
        return found


class EncodedPictures:
    """The rows of pictures by their digests, until the scheduler drops them."""

    def __init__(self, width: int) -> None:
        """`width`: values of a row."""
        self.num_encoded = 0
        self.why_unsound: dict[str, str] = {}  # by digest, of the latest `take`
        self._width = width
        self._rows: dict[str, Tensor] = {}

    def take(self, pictures: Sequence[Picture], tower: Tower) -> dict[str, Tensor]:
        """The rows of these, [N, L * W] each, by their digests; the tower encodes each that is not there, once."""
        missing = list({each.digest: each for each in pictures if each.digest not in self._rows}.values())
        unsound: dict[str, Tensor] = {}
        self.why_unsound.clear()
        runs = [[missing[number] for number in numbers] for numbers in tower.runs([each.values for each in missing])]
        while runs:
            run = runs.pop()
            counts, kept = [len(each.rows) for each in run], self._rows
            try:
                rows = self._encoded(run, tower)
            except Exception as error:
                # transformers' code may fail on a picture in any way, which would end all requests of the step.
                if len(run) > 1:
                    runs += [[each] for each in run]  # one of them may be at fault alone
                    continue
                logger.exception("pictures cannot be encoded: their requests end, as their logits are not finite")
                rows, kept = tower.unsound_rows(sum(counts), self._width), unsound
                self.why_unsound[run[0].digest] = f"a picture cannot be encoded: {type(error).__name__}: {error}"
            for each, own in zip(run, rows.split(counts), strict=True):
                # Otherwise dropping one picture would free nothing.
                kept[each.digest] = own if len(run) == 1 else own.clone()
            self.num_encoded += len(run)
        return {each.digest: (unsound if each.digest in unsound else self._rows)[each.digest] for each in pictures}

    def _encoded(self, run: Sequence[Picture], tower: Tower) -> Tensor:
        rows = tower.encode_together([each.values for each in run])
        count = sum(len(each.rows) for each in run)
        if rows.shape != (count, self._width):
            wanted = f"{count} rows of {self._width}"
            raise ValueError(f"the tower made {list(rows.shape)} of {len(run)} pictures that have {wanted}")
        return rows

    def drop(self, digest: str) -> None:
        """Forget a picture, if it is there."""
        self._rows.pop(digest, None)

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()


def _rotary(module: Any) -> RotaryEmbedding | None:
    found = getattr(module, "rotary", None)
    return found if isinstance(found, RotaryEmbedding) else None
