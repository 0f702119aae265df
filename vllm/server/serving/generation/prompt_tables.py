"""A prompt's readings as arrays: fields of a JSON answer, or, by the Accept header, the whole body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from fastapi import Request

from vllm.logprobs import PromptLogprobs
from vllm.logprobs.divergence import STUDENT_FIELD, kl_terms, student_table
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.server.errors import ApiError
from vllm.server.http.streaming import ByteStream
from vllm.server.protocol.prompt_tables import PromptTableFields
from vllm.server.rendering.table_bytes import (
    PIECE_BYTES,
    ArrowStream,
    json_of,
    rows_a_piece,
    safetensors_parts,
)
from vllm.server.rendering.written_json import turn
from vllm.server.serving.engine_requests import Submission
from vllm.server.serving.generation.sampling import PreparedPrompts
from vllm.server.serving.usage import UsageCount
from vllm.utils.npy import array_of_npy

Result = TypeVar("Result")

ARROW = "application/vnd.apache.arrow.stream"
SAFETENSORS = "application/vnd.safetensors"
BYTES = "application/octet-stream"
BODY_TYPES = (ARROW, SAFETENSORS, BYTES)
"""Media types of answers that are arrays alone; the last one is safetensors, too."""

_KL = ("reverse_kl", "forward_kl")
_MANY_CELLS = 2**15
"""So many are put together in a thread."""


@dataclass
class TableReply:
    """A request's wishes for its prompts' readings as arrays.

    Attributes:
        body_type: one of BODY_TYPES; None: the answer is JSON.
        as_base64: in JSON, as .npy files.
        names: of the arrays to answer; None: all that there are.
        student: the student's logprobs as they came.
    """

    body_type: str | None
    as_base64: bool
    names: frozenset[str] | None
    student: Any
    asked_by: str  # the field that an error names
    _student: np.ndarray | None = None  # float32 [rows, ids], of the only prompt
    _first: int = 0  # position of its first row's token
    _sent: set[int] = field(default_factory=set)  # prompts of which there was a part
    _arrow: ArrowStream | None = field(default=None, repr=False)

    @classmethod
    async def of(cls, body: PromptTableFields, accept: str | None) -> TableReply | None:
        """Read a body and an Accept header; None: no arrays. ApiError: they cannot be written."""
        body_type = accepted_body(accept)
        as_base64 = body.encoding_format == "base64"
        asked = {
            "prompt_tables": body.prompt_tables is not None,
            STUDENT_FIELD: body.prompt_student_logprobs is not None,
            "encoding_format": as_base64,
            "Accept": body_type is not None,
        }
        asked_by = next((name for name, is_asked in asked.items() if is_asked), None)
        if asked_by is None:
            return None
        names = None if body.prompt_tables is None else frozenset(body.prompt_tables)
        answer = cls(body_type, as_base64, names, body.prompt_student_logprobs, asked_by)
        if body_type == ARROW:
            answer._arrow = await asyncio.to_thread(ArrowStream)  # which imports pyarrow
        return answer

    def applied(self, params: SamplingParams, num_prompts: int, **others: bool) -> SamplingParams:
        """The parameters, of which the arrays take what they need.

        Args:
            others: fields of the request that the arrays leave no room for, and whether they are given.

        Raises:
            ApiError: the fields contradict each other.
        """
        self._check(params, num_prompts)
        streams = params.output_kind is RequestOutputKind.DELTA
        if self.body_type is not None:
            transfers = bool((params.extra_args or {}).get("kv_transfer_params"))
            others = {"stream": streams, "n": params.num_sequences > 1, "kv_transfer_params": transfers, **others}
            if params.max_tokens != 0:
                message = f"max_tokens must be 0: an answer in {self.body_type} has the prompt's readings alone"
                raise ApiError(400, message, "max_tokens", "invalid_value")
            if params.num_logprobs is not None:
                name = "logprobs" if params.logprobs is not None else "logprob_token_ids"
                message = f"{name}: an answer in {self.body_type} has the prompt's readings alone"
                raise ApiError(400, message, name, "invalid_value")
        for name, is_given in others.items():
            if is_given:
                message = f"{name} and the prompt's readings as arrays ({self.asked_by}) exclude each other"
                raise ApiError(400, message, name, "invalid_value")
        if self.body_type is not None or streams:
            params._prompt_in_parts = True
            params.output_kind = RequestOutputKind.DELTA
        return params

    def _check(self, params: SamplingParams, num_prompts: int) -> None:
        def refuse(name: str, problem: str) -> ApiError:
            return ApiError(400, f"{name}: {problem}", name, "invalid_value")

        if not params.reads_prompt:
            problem = "there are no readings of the prompt: give prompt_logprobs or prompt_logprob_token_ids"
            raise refuse(self.asked_by, problem)
        if self.student is not None and params.prompt_logprob_token_ids is None:
            raise refuse(STUDENT_FIELD, "needs prompt_logprob_token_ids, the ids that these are the logprobs of")
        if self.student is not None and num_prompts != 1:
            raise refuse(STUDENT_FIELD, f"is of one prompt, and there are {num_prompts}")
        names = self.names or frozenset()
        if self.student is None and (found := names.intersection(_KL)):
            raise refuse("prompt_tables", f"{min(found)} needs {STUDENT_FIELD}")
        if not params.logprob_entropy and "entropy" in names:
            raise refuse("prompt_tables", "entropy needs logprob_entropy")
        if not params.logprob_ranks and (found := names.intersection(("ranks", "own_ranks"))):
            raise refuse("prompt_tables", f"{min(found)}: logprob_ranks=false leaves ranks out")

    async def check_prompts(self, prepared: PreparedPrompts) -> None:
        """VLLMValidationError: the student's logprobs are none, or not of the prompt's ids."""
        if self.student is None:
            return
        (prompt,), (params,) = prepared
        self._first = 1 + (params.first_prompt_row or 0)
        ids = params.prompt_id_table(len(prompt.token_ids))

        def make() -> np.ndarray:
            values = self.student
            return student_table(array_of_npy(STUDENT_FIELD, values) if isinstance(values, str) else values, ids)

        self._student = await _computed(ids.size, make)
        self.student = None

    async def arrays(self, readings: PromptLogprobs) -> dict[str, np.ndarray]:
        """The asked arrays of readings, by name."""

        def make() -> dict[str, np.ndarray]:
            tables = readings.tables()
            arrays = tables.arrays()
            if self._student is not None:
                start = readings.num_unread - self._first
                student = self._student[start : start + len(tables.lse)]
                terms = kl_terms(student, tables.logprobs[:, tables.num_topk :])
                arrays |= {"reverse_kl": terms.reverse, "forward_kl": terms.forward}
            return arrays if self.names is None else {n: each for n, each in arrays.items() if n in self.names}

        return await _computed(readings.num_cells, make)

    async def fields(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The field of a JSON answer for the readings that an output of prompt `index` has."""
        readings = self._next_readings(index, output)
        if readings is None:
            return {}
        arrays = await self.arrays(readings)
        return {"prompt_tables": {name: await json_of(each, self.as_base64) for name, each in arrays.items()}}

    def response(self, request: Request, submission: Submission, metadata: Mapping[str, str]) -> ByteStream:
        """The answer whose body is arrays. `metadata` stands at its beginning."""
        assert self.body_type is not None
        parts = self._parts(submission, UsageCount(request))
        write = self._as_arrow if self.body_type == ARROW else self._as_safetensors
        return ByteStream(write(parts, metadata), submission.abort, self.body_type)

    async def _parts(
        self, submission: Submission, usage: UsageCount
    ) -> AsyncGenerator[tuple[int, dict[str, np.ndarray]], None]:
        """(prompt, arrays) of further rows, in the order in which they are read."""
        async for index, output in submission.events():
            usage.add(index, output)
            readings = self._next_readings(index, output)
            if readings is not None:
                arrays = await self.arrays(readings)
                num_rows = len(readings) - readings.num_unread
                yield index, {"prompt_index": np.full(num_rows, index, np.int32), **arrays}

    def _next_readings(self, index: int, output: RequestOutput) -> PromptLogprobs | None:
        """The output's readings, which may be none only in a prompt's first part."""
        readings = output.prompt_logprobs
        if readings is None or (index in self._sent and len(readings) == readings.num_unread):
            return None
        self._sent.add(index)
        return readings

    async def _as_arrow(
        self, parts: AsyncIterator[tuple[int, dict[str, np.ndarray]]], metadata: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        assert self._arrow is not None
        async for _, arrays in parts:
            step = min(rows_a_piece(each, PIECE_BYTES // 16) for each in arrays.values())
            num_rows = len(arrays["prompt_index"])
            for start in range(0, max(num_rows, 1), step):
                await turn()
                yield self._arrow.batch({n: each[start : start + step] for n, each in arrays.items()}, metadata)
        yield self._arrow.end()

    async def _as_safetensors(
        self, parts: AsyncIterator[tuple[int, dict[str, np.ndarray]]], metadata: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        found = [part async for part in parts]
        found.sort(key=lambda part: part[0])
        for piece in safetensors_parts([arrays for _, arrays in found], metadata):
            await turn()
            yield piece


async def _computed(num_cells: int, make: Callable[[], Result]) -> Result:
    """The result of `make`, in a thread where it may take long."""
    return await asyncio.to_thread(make) if num_cells > _MANY_CELLS else make()


def accepted_body(accept: str | None) -> str | None:
    """The type of BODY_TYPES that an Accept header prefers to JSON, if any."""
    best, found = 0.0, None
    for entry in (accept or "").split(","):
        kind, *options = (each.strip() for each in entry.split(";"))
        weight = next((each[2:] for each in options if each.startswith("q=")), "1")
        try:
            quality = float(weight)
        except ValueError:
            continue
        if quality > best:
            best, found = quality, kind.lower()
    return found if found in BODY_TYPES else None
