"""Kullback-Leibler divergences between a student and a teacher, of whose distributions some logprobs are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm.exceptions import VLLMValidationError, shown

STUDENT_FIELD = "prompt_student_logprobs"
"""Errors call a student's logprobs so."""

TAIL_RESOLUTION = 2.0**-20
"""Least mass of the bucket of all other ids where the other model's is divided by it. Masses are 1 minus sums of
float32 probabilities, whose rounding is about this large."""
LARGEST_MASS = 1.01
"""Limit of the sum of a row's probabilities; between 1 and this it is rounding (of float16 logits, say), and the other
ids have none."""

_IDS_FIELD = "prompt_logprob_token_ids"


class KLTerms(NamedTuple):
    """Divergences at R positions, in nats."""

    reverse: np.ndarray  # float32 [R], KL(student || teacher)
    forward: np.ndarray  # float32 [R], KL(teacher || student)


def kl_terms(student: np.ndarray, teacher: np.ndarray) -> KLTerms:
    """The divergences of two models' next tokens, where the C ids of a row are told apart, and all others are one
    bucket. With p, q the probabilities of student and teacher, and p0 = max(1 - sum p_i, 0), q0 = max(1 - sum q_i, 0):

        reverse = sum_i p_i (log p_i - log q_i) + p0 (log p0 - log max(q0, r))
        forward = sum_i q_i (log q_i - log p_i) + q0 (log q0 - log max(p0, r))

    r is TAIL_RESOLUTION. A term whose first factor is 0 is 0; inf where an id has a probability in the first model and
    none in the second. Both are lower bounds of the divergences over the whole vocabulary (grouping outcomes lowers
    them), but for r, and by rounding as low as about -1e-6 for equal models. Computed in float64.

    Args:
        student, teacher: float32 [R, C], logprobs of the same ids; -inf in both where a row has no id.
    """
    first, second = (np.asarray(each, np.float64) for each in (student, teacher))
    p, q = np.exp(first), np.exp(second)
    p0, q0 = (np.maximum(1 - each.sum(axis=1), 0.0) for each in (p, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = first - second
        reverse = np.where(p > 0, p * difference, 0.0).sum(axis=1) + _tail(p0, q0)
        forward = np.where(q > 0, q * -difference, 0.0).sum(axis=1) + _tail(q0, p0)
    return KLTerms(reverse.astype(np.float32), forward.astype(np.float32))


def _tail(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    ratio = np.log(own) - np.log(np.maximum(other, TAIL_RESOLUTION))
    return np.where(own > 0, own * ratio, 0.0)


def student_table(values: Any, ids: np.ndarray) -> np.ndarray:
    """A student's logprobs as float32 [R, C], -inf where a row has no id.

    Args:
        values: a float array [R, C], whose cells without an id are ignored; or R lists of as many numbers as the row
            has ids (or columns), None for -inf.
        ids: int32 [R, C], distinct within a row, -1 where there is no id.

    Raises:
        VLLMValidationError: names STUDENT_FIELD or the field of the ids, the row, and what is wrong.
    """
    _check_distinct(ids)
    table = values if isinstance(values, np.ndarray) and values.ndim == 2 else _from_lists(values, ids)
    if table.dtype.kind != "f":
        raise _wrong(f"{STUDENT_FIELD} must be logprobs, got an array of {table.dtype}", str(table.dtype))
    if table.shape != ids.shape:
        message = (
            f"{STUDENT_FIELD} must be {list(ids.shape)}, a number for each id that is read, got {list(table.shape)}"
        )
        raise _wrong(message, list(table.shape))
    table = np.where(ids < 0, -np.inf, table).astype(np.float32)
    if (is_bad := ~(table <= np.log(LARGEST_MASS))).any():
        row, column = np.argwhere(is_bad)[0].tolist()
        value = float(table[row, column])
        raise _wrong(f"{STUDENT_FIELD}[{row}] must be logprobs, at most 0 each, got {value:g}", value)
    mass = np.exp(table.astype(np.float64)).sum(axis=1)
    if (is_bad := mass > LARGEST_MASS).any():
        row = int(is_bad.argmax())
        message = f"{STUDENT_FIELD}[{row}] must have a probability of at most 1 in all, got {mass[row]:g}"
        raise _wrong(message, float(mass[row]))
    return table


def _check_distinct(ids: np.ndarray) -> None:
    ordered = np.sort(ids, axis=1)
    is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if is_twice.any():
        row, column = np.argwhere(is_twice)[0].tolist()
        token_id = int(ordered[row, column])
        message = f"{_IDS_FIELD}[{row}] has {token_id} twice, whose probability would count twice"
        raise VLLMValidationError(message, _IDS_FIELD, token_id)


def _from_lists(values: Any, ids: np.ndarray) -> np.ndarray:
    rows = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise _wrong(f"{STUDENT_FIELD} must be a list of lists of logprobs, got {shown(values)}", values)
    if len(rows) != len(ids):
        raise _wrong(f"{STUDENT_FIELD} has {len(rows)} lists, but {len(ids)} positions are read", len(rows))
    table = np.full(ids.shape, -np.inf)
    for index, (row, own) in enumerate(zip(rows, ids, strict=True)):
        row = row.tolist() if hasattr(row, "tolist") else row
        count = int((own >= 0).sum())
        if not isinstance(row, Sequence) or isinstance(row, (str, bytes)) or len(row) not in (count, len(own)):
            found = f"{len(row)} numbers" if isinstance(row, (list, tuple)) else shown(row)
            raise _wrong(f"{STUDENT_FIELD}[{index}] must have a number for each of {count} ids, got {found}", row)
        if wrong := [each for each in row if not _is_number(each)]:
            raise _wrong(f"{STUDENT_FIELD}[{index}] must hold numbers, got {shown(wrong[0])}", wrong[0])
        cells = own >= 0 if len(row) == count else slice(None)
        table[index, cells] = [-np.inf if each is None else each for each in row]
    return table


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float, np.floating)) and not isinstance(value, bool))


def _wrong(message: str, value: Any) -> VLLMValidationError:
    return VLLMValidationError(message, STUDENT_FIELD, value)
