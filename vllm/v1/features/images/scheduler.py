"""Pictures of prompts in the scheduler: what their tokens are known by in the cache, and how many a step encodes."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from vllm.exceptions import VLLMValidationError
from vllm.inputs.images import DATA, Picture, PromptImages
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

ROWS_OF_A_STEP = 1024
"""The most rows of pictures that a step encodes, but for its first picture: other requests' tokens wait meanwhile."""
_KNOWN = 4096  # pictures of which it is known that they were encoded


class StepPictures(dict[str, PromptImages]):
    """By id, the pictures of the requests that get slots in a step."""


class PictureTurns(SchedulerGuest):
    """Lets pictures be told apart by their content, and be encoded a few a step."""

    def __init__(self, requests: Mapping[str, Request], whole: str | None, max_step_tokens: int) -> None:
        """
        Args:
            requests: the scheduler's.
            whole: what no step may end within, as its tokens see those after them: "pictures", "prompt" or nothing.
            max_step_tokens: of a request in a step, at least.
        """
        self._requests = requests
        self._whole, self._max_step_tokens = whole, max_step_tokens
        self._runs: dict[str, list[tuple[int, int]]] = {}
        self._secret = os.urandom(16)  # so that nobody can look for pictures with equal numbers
        self._row_ids: dict[str, list[int]] = {}
        self._encoded: OrderedDict[str, None] = OrderedDict()
        self._num_rows = 0  # that the step being scheduled encodes

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
        self._num_rows = 0
        pictures = StepPictures()
        for new in step.scheduled_new_reqs:
            images = self._requests[new.req_id].images
            if images is None:
                continue
            pictures[new.req_id] = images
            places = (each.start + row for each in images.pictures for row in each.rows.tolist())
            for place, token_id in zip(places, self._row_ids[new.req_id], strict=True):
                new.prefill_token_ids[place] = token_id
        if pictures:
            step.parts.add(pictures)

    # -- turns ---------------------------------------------------------------------------------------------------

    def awaits(self, request: Request, num_cached: int) -> bool:
        if request.images is None or not self._num_rows:
            return False
        first = next(_within(request.images, num_cached, num_cached + 1), None)
        return first is not None and not self._has_room(first, self._num_rows)

    def share(self, request: Request, begin: int, num_new: int) -> int:
        if request.images is None:
            return num_new
        for first, end in self._runs.get(request.request_id, ()):
            if first < begin + num_new < end:
                num_new = max(first - begin, 0)
        num_rows, seen = self._num_rows, set[str]()
        for picture in _within(request.images, begin, begin + num_new):
            if picture.digest not in seen and not self._has_room(picture, num_rows) and picture.start > begin:
                return picture.start - begin
            if picture.digest not in seen | self._encoded.keys():
                num_rows += len(picture.rows)
            seen.add(picture.digest)
        return num_new

    def _has_room(self, picture: Picture, num_rows: int) -> bool:
        return picture.digest in self._encoded or not num_rows or num_rows + len(picture.rows) <= ROWS_OF_A_STEP

    def computes(self, request: Request, begin: int, end: int, step: SchedulerOutput) -> None:
        if request.images is None:
            return
        for picture in _within(request.images, begin, end):
            if picture.digest not in self._encoded:
                self._num_rows += len(picture.rows)
            self._encoded[picture.digest] = None
            self._encoded.move_to_end(picture.digest)
        while len(self._encoded) > _KNOWN:
            self._encoded.popitem(last=False)


def _within(images: PromptImages, begin: int, end: int) -> Iterator[Picture]:
    """The pictures that have tokens from `begin` to `end`."""
    return (picture for picture in images.pictures if picture.start < end and picture.end > begin)
