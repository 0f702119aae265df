"""Labels of `vllm score`: from texts or ids to tokens, and from readings to results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.files import Item

if TYPE_CHECKING:
    import pyarrow as pa

    from vllm.outputs import LabelScores
    from vllm.tokenizers.tokenizer import Tokenizer

GOLD_FIELD = "label"


@dataclass(frozen=True)
class Labels:
    """The labels in the order given: their keys in the output (the strings, or the ids as strings), the texts of both
    kinds, which are compared with the input's label field, and their tokens."""

    names: list[str]
    texts: list[str]
    token_ids: list[list[int]]

    @classmethod
    def resolve(cls, given: Sequence[str] | Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> Labels:
        """From texts of any number of tokens, or from token ids; a CliError if `encode_labels` refuses them."""
        from vllm.v1.engine.plans.label_scoring import encode_labels

        try:
            token_ids = [label.token_ids for label in encode_labels(given, tokenizer, vocab_size)]
        except VLLMValidationError as error:
            raise CliError(str(error)) from None
        names = [str(label) for label in given]
        texts = [label if isinstance(label, str) else tokenizer.decode_tokens([label])[0] for label in given]
        return cls(names, texts, token_ids)

    @cached_property
    def stripped(self) -> dict[str, str]:
        return {name: text.strip() for name, text in zip(self.names, self.texts, strict=True)}

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest label."""
        return max(len(ids) for ids in self.token_ids)

    def schema(self) -> pa.Schema:
        """The columns of `label_results`; those by label are structs with a field a label."""
        import pyarrow as pa

        number, integer, string = pa.float64(), pa.int64(), pa.string()
        floats, integers, float_lists, integer_lists = (
            pa.struct([(name, value) for name in self.names])
            for value in (number, integer, pa.list_(number), pa.list_(integer))
        )
        columns = {"probs": floats, "logprobs": floats, "logits": floats, "ranks": integers}
        columns |= {"label_mass": number, "prediction": string}
        if self.longest > 1:
            columns |= {"normalized_logprobs": floats, "token_logprobs": float_lists, "token_ranks": integer_lists}
        return pa.schema({**columns, "num_prompt_tokens": integer, "error": string})

    def headings(self) -> dict[str, str]:
        """Each name as a table shows it: an id with its text."""
        return {
            name: text if text == name else f"{name} {text.strip()}".strip()
            for name, text in zip(self.names, self.texts, strict=True)
        }


def label_results(num_prompt_tokens: int | None, scores: LabelScores | str, labels: Labels) -> dict[str, Any]:
    """The fields of a row beside the input, or its error. A value that is not finite is None, as is `num_prompt_tokens`
    if the server did not say."""
    error = scores if isinstance(scores, str) else scores.error
    if error is not None:
        return {"num_prompt_tokens": num_prompt_tokens, "error": error}
    assert not isinstance(scores, str)
    return {**_results(scores, labels), "num_prompt_tokens": num_prompt_tokens}


def _results(scores: LabelScores, labels: Labels) -> dict[str, Any]:
    named = list(zip(labels.names, scores.labels, strict=True))
    best = scores.best
    certain = best is not None and math.isfinite(best.logprob)
    results: dict[str, Any] = {
        "probs": dict(zip(labels.names, map(finite, scores.probabilities.tolist()), strict=True)),
        "logprobs": {name: finite(own.logprob) for name, own in named},
        "logits": {name: finite(own.token_logits[0]) if len(own.token_ids) == 1 else None for name, own in named},
        "ranks": {name: own.token_ranks[0] for name, own in named},
        "label_mass": finite(scores.mass),
        "prediction": next(name for name, own in named if own is best) if certain else None,
    }
    if labels.longest > 1:
        results |= {
            "normalized_logprobs": {name: finite(own.normalized_logprob) for name, own in named},
            "token_logprobs": {name: [finite(value) for value in own.token_logprobs] for name, own in named},
            "token_ranks": {name: own.token_ranks for name, own in named},
        }
    return results


def verdict(record: dict[str, Any], item: Item, labels: Labels) -> bool | None:
    """Whether the prediction is the input's label; None if that is none of the labels."""
    text_of = labels.stripped
    gold, prediction = str(item.fields.get(GOLD_FIELD, "")).strip(), record.get("prediction")
    if prediction not in text_of or not (gold in text_of or gold in text_of.values()):
        return None
    return gold in (prediction.strip(), text_of[prediction])


def finite(value: float) -> float | None:
    """None for what JSON does not have."""
    return value if math.isfinite(value) else None
