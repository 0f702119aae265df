"""Pictures of prompts in the scheduler: what their tokens are known by in the cache, and how many a step encodes."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vllm.exceptions import VLLMValidationError
from vllm.inputs.images import DATA, Picture, PromptImages
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

ROWS_OF_A_STEP = 1024
"""The most rows of pictures that a step encodes, but for its first picture: other requests' tokens wait meanwhile."""

LONE_PICTURES_OF_A_STEP = 8
"""The most pictures of a step where each is a request of its own."""


@dataclass
class StepPictures:
    """A step's pictures, as the workers need to know them.

    Attributes:
        images: by id, those of the requests that get slots.
        dropped: digests of encoded pictures to forget, before any of this step is encoded.
    """

    images: dict[str, PromptImages] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


class PictureTurns(SchedulerGuest):
    """Lets pictures be told apart by their content, and be encoded a few a step."""

    def __init__(
        self,
        requests: Mapping[str, Request],
        whole: str | None,
        max_step_tokens: int,
        max_kept_rows: int,
        block_size: int,
    ) -> None:
        """
        Args:
            requests: the scheduler's.
            whole: what no step may end within, as its tokens see those after them: "pictures", "prompt" or nothing.
            max_step_tokens: of a request in a step, at least.
            max_kept_rows: of encoded pictures that the workers keep beside those of a step.
            block_size: of the KV cache.
        """
        self._requests = requests
        self._whole, self._max_step_tokens, self._block_size = whole, max_step_tokens, block_size
        self.takes_whole_steps = whole is not None
        self._runs: dict[str, list[tuple[int, int]]] = {}
        self._secret = os.urandom(16)  # so that nobody can look for pictures with equal numbers
        self._row_ids: dict[str, list[int]] = {}
        # Pictures that the workers have encoded, and their rows, the longest unused first.
        self._encoded: OrderedDict[str, int] = OrderedDict()
        self._max_kept_rows, self._num_kept_rows = max_kept_rows, 0
        self._dropped: list[str] = []  # that the workers are still to be told of
        # The step being scheduled has these requests that show a picture, and encodes these pictures.
        self._shown: dict[str, set[str]] = {}
        self._new: set[str] = set()
        self._num_rows = 0  # of these

    # -- content -------------------------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        if request.images is None:
            return
        if self._whole is not None:
            self._keep_whole(request, request.images)
        ids, kept = request.token_ids, []
        for picture in request.images.pictures:
            number = self._number(picture)
            for row in picture.rows.tolist():
                kept.append(ids[picture.start + row])
                ids[picture.start + row] = number
        self._row_ids[request.request_id] = kept

    def _keep_whole(self, request: Request, images: PromptImages) -> None:
        runs = images.runs()
        if self._whole == "prompt":
            runs = [(0, images.num_tokens)]
            # The values of the prompt's beginning depend on its end.
            content = hashlib.blake2b(array("q", request.token_ids[: images.num_tokens]).tobytes(), digest_size=16)
            content.update("".join(each.digest for each in images.pictures).encode())
            request.cache_salt = f"\0{content.hexdigest()}\0{request.cache_salt or ''}"
        longest = max(end - begin for begin, end in runs)
        if longest > self._max_step_tokens:
            message = (
                f"{DATA}: {longest} tokens of the {self._whole} see each other and are computed in one step, and a "
                f"step has room for {self._max_step_tokens}: set a higher max_num_batched_tokens"
            )
            raise VLLMValidationError(message, DATA, longest)
        self._runs[request.request_id] = runs

    def _number(self, picture: Picture) -> int:
        """Stands for a token id where tokens are compared; below all of these."""
        digest = hashlib.blake2b(picture.digest.encode(), digest_size=8, key=self._secret).digest()
        return -2 - (int.from_bytes(digest, "big") >> 2)

    def ended(self, request: Request) -> None:
        self._row_ids.pop(request.request_id, None)
        self._runs.pop(request.request_id, None)

    def fill(self, step: SchedulerOutput) -> None:
        self._drop_unused()
        pictures = StepPictures(dropped=self._dropped)
        self._dropped, self._num_rows = [], 0
        self._shown.clear()
        self._new.clear()
        for new in step.scheduled_new_reqs:
            images = self._requests[new.req_id].images
            if images is None:
                continue
            pictures.images[new.req_id] = images
            places = (each.start + row for each in images.pictures for row in each.rows.tolist())
            for place, token_id in zip(places, self._row_ids[new.req_id], strict=True):
                new.prefill_token_ids[place] = token_id
        if pictures.images or pictures.dropped:
            step.parts.add(pictures)

    # -- encoded pictures ----------------------------------------------------------------------------------------

    def _drop_unused(self) -> None:
        for digest in list(self._encoded):
            if self._num_kept_rows <= self._max_kept_rows:
                break
            if digest not in self._shown:
                self._drop(digest)

    def _drop(self, digest: str) -> None:
        self._num_kept_rows -= self._encoded.pop(digest)
        self._dropped.append(digest)

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        for digest, ids in list(self._shown.items()):
            ids.discard(request.request_id)
            if not ids:
                del self._shown[digest]
                if digest in self._new:
                    self._new.discard(digest)
                    self._num_rows -= self._encoded[digest]
                    self._drop(digest)

    def discarded(self, step: SchedulerOutput) -> None:
        self.reset_cache()  # the workers may have stopped anywhere

    def reset_cache(self) -> None:
        for digest in list(self._encoded):
            self._drop(digest)

    # -- turns ---------------------------------------------------------------------------------------------------

    def share(self, request: Request, begin: int, num_new: int) -> int:
        if request.images is None:
            return num_new
        end = self._before_whole(request, begin, begin + num_new)
        num_rows, seen = self._num_rows, set[str]()
        for picture in _within(request.images, begin, end):
            if picture.digest in seen:
                continue
            if not self._has_room(picture, num_rows):
                before = self._before_whole(request, begin, picture.start)
                # Pictures of one run of whole tokens are encoded together, however many they are.
                return max(before - begin, 0) if before > begin or self._num_rows else end - begin
            if picture.digest not in self._encoded:
                num_rows += len(picture.rows)
            seen.add(picture.digest)
        return end - begin

    def _before_whole(self, request: Request, begin: int, end: int) -> int:
        """`end`, or where the tokens begin within which it is and no step may end."""
        for first, last in self._runs.get(request.request_id, ()):
            if first < end < last:
                return max(first, begin)
        return end

    def _has_room(self, picture: Picture, num_rows: int) -> bool:
        return picture.digest in self._encoded or not num_rows or num_rows + len(picture.rows) <= ROWS_OF_A_STEP

    def computes(self, request: Request, begin: int, end: int, step: SchedulerOutput) -> None:
        if request.images is None:
            return
        for picture in _within(request.images, begin, end):
            digest, num_rows = picture.digest, len(picture.rows)
            self._shown.setdefault(digest, set()).add(request.request_id)
            if digest not in self._encoded:
                self._encoded[digest] = num_rows
                self._num_kept_rows += num_rows
                self._num_rows += num_rows
                self._new.add(digest)
            self._encoded.move_to_end(digest)


class LonePictures(SchedulerGuest):
    """Tells the worker of pictures that are whole requests, a few a step."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._num = 0  # in the step being scheduled

    def share(self, request: Request, begin: int, num_new: int) -> int:
        return 0 if request.images is not None and self._num == LONE_PICTURES_OF_A_STEP else num_new

    def computes(self, request: Request, begin: int, end: int, step: SchedulerOutput) -> None:
        self._num += request.images is not None

    def fill(self, step: SchedulerOutput) -> None:
        self._num = 0
        found = {new.req_id: self._requests[new.req_id].images for new in step.scheduled_new_reqs}
        pictures = StepPictures({name: images for name, images in found.items() if images is not None})
        if pictures.images:
            step.parts.add(pictures)


class WholePictureTurns(PictureTurns):
    """PictureTurns where tokens of a layer with a window see others beyond it."""

    def longest_prefix(self, request: Request, hashes: list[bytes], count: int) -> int:
        # Such a layer's cache keeps nothing before its window, so all that see each other are computed at once.
        size = self._block_size
        for first, last in self._runs.get(request.request_id, ()):
            if first < count * size < last:
                return first // size
        return count


def _within(images: PromptImages, begin: int, end: int) -> Iterator[Picture]:
    """The pictures that have tokens from `begin` to `end`."""
    return (picture for picture in images.pictures if picture.start < end and picture.end > begin)
