"""Labels of `vllm score`: from what the user names to token ids, and from readings to results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.errors import CliError
from vllm.entrypoints.cli.score_io import Item

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.tokenizer import Tokenizer

GOLD_FIELD = "label"


@dataclass(frozen=True)
class Labels:
    """The labels, in the order given.

    Attributes:
        names: their keys in the output: the strings, or the ids as strings.
        texts: what they read as, to be compared with the input's label field.
        ids: their token ids.
    """

    names: list[str]
    texts: list[str]
    ids: list[int]

    @classmethod
    def from_strings(cls, strings: Sequence[str], tokenizer: Tokenizer) -> Labels:
        """Labels given as strings.

        Raises:
            CliError: one that is not one token, with its tokens; two that are the same token.
        """
        encoded = [tokenizer.encode(string, add_special_tokens=False) for string in strings]
        faults = [
            _not_one_token(string, ids, tokenizer)
            for string, ids in zip(strings, encoded, strict=True)
            if len(ids) != 1
        ]
        if faults:
            raise CliError("; ".join(faults))
        ids = [own[0] for own in encoded]
        for i, token_id in enumerate(ids):
            if token_id in ids[:i]:
                same = strings[ids.index(token_id)]
                raise CliError(f"--labels: {same!r} and {strings[i]!r} are the same token, {token_id}")
        return cls(list(strings), list(strings), ids)

    @classmethod
    def from_ids(cls, ids: Sequence[int], tokenizer: Tokenizer) -> Labels:
        """Labels given as token ids, which the engine checks against its vocabulary."""
        return cls([str(token_id) for token_id in ids], tokenizer.decode_tokens(ids), list(ids))

    def headings(self) -> list[str]:
        """What to call them in a table: an id together with its text."""
        return [
            text if text == name else f"{name} {text.strip()}".strip()
            for name, text in zip(self.names, self.texts, strict=True)
        ]


def make_record(index: int, item: Item, output: RequestOutput, labels: Labels) -> dict[str, Any]:
    """One text's line of the output file; the input's other fields are kept where no result has their name.

    A value that JSON has no number for (a masked-out label's logprob, say) is None.
    """
    (completion,) = output.outputs
    record: dict[str, Any] = {"index": index, "text": item.text}
    results: dict[str, Any] = {"num_prompt_tokens": len(output.prompt_token_ids)}
    if completion.error is not None or not completion.logprobs:
        results["error"] = completion.error or f"no readings came back ({completion.finish_reason})"
    else:
        position = completion.logprobs[0]
        probs = position.softmax(labels.ids)
        named = list(zip(labels.names, labels.ids, strict=True))
        best = max(labels.ids, key=lambda token_id: probs[token_id])
        results = {
            "probs": {name: _finite(probs[token_id]) for name, token_id in named},
            "logprobs": {name: _finite(position[token_id].logprob) for name, token_id in named},
            "logits": {name: _finite(position[token_id].logit) for name, token_id in named},
            "ranks": {name: position[token_id].rank for name, token_id in named},
            "label_mass": _finite(position.mass(labels.ids)),
            "prediction": None if math.isnan(probs[best]) else labels.names[labels.ids.index(best)],
            **results,
        }
    kept = {name: value for name, value in item.fields.items() if name not in results and name not in record}
    return {**record, **kept, **results}


def verdicts(records: Sequence[dict[str, Any]], items: Sequence[Item], labels: Labels) -> list[bool | None]:
    """Whether each prediction is the input's own label; None where the input has none of the labels."""
    text_of = {name: text.strip() for name, text in zip(labels.names, labels.texts, strict=True)}
    known = {*text_of, *text_of.values()}
    result: list[bool | None] = []
    for record, item in zip(records, items, strict=True):
        gold, prediction = str(item.fields.get(GOLD_FIELD, "")).strip(), record.get("prediction")
        if gold not in known or prediction is None:
            result.append(None)
        else:
            result.append(gold in (prediction.strip(), text_of[prediction]))
    return result


def _not_one_token(string: str, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    if not ids:
        return f"label {string!r} has no token"
    tokens = ", ".join(f"{token_id} {text!r}" for token_id, text in zip(ids, tokenizer.decode_tokens(ids), strict=True))
    hint = ""
    for other in (" " + string, string.strip()):
        if other != string and len(tokenizer.encode(other, add_special_tokens=False)) == 1:
            hint = f" ({other!r} is one)"
            break
    return f"label {string!r} must be one token, but is {len(ids)}: {tokens}{hint}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
