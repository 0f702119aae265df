"""The request about a rollout, and the row that its readings make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from vllm.exceptions import CliError, VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.scoring.files import Item

TABLES = ("token_ids", "logprobs", "logits", "ranks")
OWN = ("own_logprobs", "own_logits", "own_ranks")
DIVERGENCES = ("reverse_kl", "forward_kl")
NAMES = (*TABLES, *OWN, "lse", "entropy", *DIVERGENCES)
"""The arrays that a row may have."""

_INTEGERS = ("token_ids", "ranks", "own_ranks")


class Rollout(NamedTuple):
    """
    Attributes:
        token_ids: None: the text is to be tokenised.
        ids: a list for all positions, or a list for each of the last ones; None: the top k alone.
        student: logprobs, as `student_table` takes them.
        start: the first position whose logits are read; None: as the ids say.
    """

    text: str
    token_ids: list[int] | None
    ids: list[Any] | None
    student: list[Any] | None
    start: int | None


@dataclass(frozen=True)
class TeacherOptions:
    """The flags; fields are names of the input's."""

    text_field: str
    prompt_logprobs: int | None
    ids_field: str | None
    student_field: str | None
    start_field: str | None
    names: tuple[str, ...]  # of the arrays, of NAMES

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        names = (self.text_field, self.ids_field, self.student_field, self.start_field)
        return tuple(name for name in names if name is not None)

    def rollout(self, place: str, item: Item) -> Rollout:
        """CliError, at `place`: a field is missing or of a wrong type."""

        def field(name: str | None, kind: type, flag: str) -> Any:
            if name is None:
                return None
            if name not in item.fields:
                known = ", ".join(map(repr, item.fields))
                raise CliError(f"{place}:{item.line}: no field {name!r}; there is {known} (see {flag})")
            value = item.fields[name]
            if type(value) is not kind:
                expected = "a list" if kind is list else "an integer"
                raise CliError(f"{place}:{item.line}: field {name!r} must be {expected}, got {type(value).__name__}")
            return value

        text = item.fields[self.text_field]
        return Rollout(
            item.text,
            None if isinstance(text, str) else text,
            field(self.ids_field, list, "--prompt-ids-field"),
            field(self.student_field, list, "--student-logprobs-field"),
            field(self.start_field, int, "--prompt-start-field"),
        )

    def params(self, rollout: Rollout, num_tokens: int) -> SamplingParams:
        """The request for a prompt of so many tokens. VLLMValidationError: there can be none."""
        ids, start = rollout.ids, rollout.start
        if start is None and ids and not isinstance(ids[0], int):
            start = num_tokens - 1 - len(ids)
            if start < 0:
                message = (
                    f"{self.ids_field} has {len(ids)} lists, more than the prompt has positions ({num_tokens - 1})"
                )
                raise VLLMValidationError(message, self.ids_field, len(ids))
        return SamplingParams(
            max_tokens=0,
            temperature=0,
            prompt_logprobs=0 if self.prompt_logprobs is None else self.prompt_logprobs,
            prompt_logprob_token_ids=ids,
            prompt_logprob_start=start,
            logprob_entropy="entropy" in self.names,
            logprob_ranks=bool({"ranks", "own_ranks"}.intersection(self.names)),
        )

    def results(self, token_ids: Sequence[int], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """A row's results; `arrays` are those of PromptTables, with the divergences, as far as `names` has them."""
        positions = arrays["positions"]
        row: dict[str, Any] = {
            "prompt_token_ids": pa.array(np.asarray(token_ids, np.int32)),
            "first_position": int(positions[0]) if len(positions) else len(token_ids),
        }
        for name in self.names:
            row[name] = _rows(arrays[name], arrays["token_ids"] >= 0) if name in TABLES else pa.array(arrays[name])
        return {**row, "num_prompt_tokens": len(token_ids)}

    @property
    def asked(self) -> tuple[str, ...]:
        """The arrays that `results` needs."""
        return tuple(dict.fromkeys(("positions", "token_ids", *self.names)))

    def schema(self) -> pa.Schema:
        """The columns of results."""
        kinds: dict[str, pa.DataType] = {"prompt_token_ids": pa.list_(pa.int32()), "first_position": pa.int64()}
        for name in self.names:
            kind = pa.list_(pa.int32() if name in _INTEGERS else pa.float32())
            kinds[name] = pa.list_(kind) if name in TABLES else kind
        return pa.schema({**kinds, "num_prompt_tokens": pa.int64(), "error": pa.string()})


def _rows(table: np.ndarray, is_id: np.ndarray) -> pa.ListArray:
    """Lists of the cells that have an id, a list a row."""
    ends = np.concatenate([[0], np.cumsum(is_id.sum(axis=1))]).astype(np.int32)
    cells = table.reshape(-1) if is_id.all() else table[is_id]
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.ascontiguousarray(cells)))
