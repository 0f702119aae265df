"""Scores of labels after a prompt: the requests that read them, and the sums of their readings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown
from vllm.outputs import LabelScores, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import check_texts, check_token_id, check_vocabulary, wrong_type
from vllm.v1.engine.input_processor import ProcessedPrompt


@dataclass(frozen=True)
class Label:
    """A continuation to score. `text`: None when it was given as ids."""

    text: str | None
    token_ids: list[int]

    def __str__(self) -> str:
        if self.text is not None:
            return repr(self.text)
        return str(self.token_ids[0] if len(self.token_ids) == 1 else self.token_ids)


def encode_labels(labels: Any, tokenizer: Tokenizer | None, vocab_size: int, name: str = "labels") -> list[Label]:
    """Labels, distinct and not empty, from a list of texts, token ids or lists of them. `name`: the user's field."""
    elements = labels.tolist() if hasattr(labels, "tolist") else labels
    if isinstance(elements, (str, bytes)) or not isinstance(elements, Sequence):
        raise wrong_type(name, labels, "a list of strings or of token ids")
    if not elements:
        raise VLLMValidationError(f"{name} must not be empty", name, labels)
    encoded: list[Label] = []
    seen: dict[tuple[int, ...], Label] = {}
    for element in elements:
        label = _encode_label(name, element, tokenizer, vocab_size)
        same = seen.setdefault(tuple(label.token_ids), label)
        if same is not label:
            raise VLLMValidationError(
                f"{name} {same} and {label} are the same tokens, {label.token_ids}", name, element
            )
        encoded.append(label)
    return encoded


def _encode_label(name: str, element: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Label:
    if isinstance(element, str):
        check_texts(name, element)
        if tokenizer is None:
            message = "a text label needs a tokenizer, and skip_tokenizer_init left it out; pass token ids"
            raise VLLMValidationError(message, name, element)
        label = Label(element, tokenizer.encode(element, add_special_tokens=False))
    else:
        values = element.tolist() if hasattr(element, "tolist") else element
        values = values if isinstance(values, (list, tuple, range)) else [values]
        label = Label(None, [check_token_id(name, value) for value in values])
    if not label.token_ids:
        raise VLLMValidationError(f"label {element!r} has no token", name, element)
    if min(label.token_ids) < 0:
        raise VLLMValidationError(f"{name} must not be negative, got {shown(min(label.token_ids))}", name, element)
    check_vocabulary(name, label.token_ids, vocab_size)
    return label


@dataclass(eq=False, slots=True)
class _Node:
    """A node of the trie."""

    children: dict[int, _Node] = field(default_factory=dict)
    edges: dict[int, int] = field(default_factory=dict)  # child's token id -> number of the edge, once planned
    ends_label: bool = False


class LabelScorer:
    """The labels of one call, from `encode_labels`: requests for a prompt, scores from their outputs.

    The labels' token ids form a trie. A label's logprob is the sum over its path's edges, and the edges out of one node
    are read from one row of logits. So a request is needed for every node with children but no grandchildren: it
    appends the node's tokens to the prompt, its prompt readings give the nodes before, its next position the node
    itself. A node of several paths is read by the first request; the others find the prompt in the prefix cache.
    """

    def __init__(self, labels: Sequence[Label], max_model_len: int) -> None:
        self._labels = list(labels)
        self._texts = [label.text for label in self._labels]
        self._token_ids = [label.token_ids for label in self._labels]
        self._max_model_len = max_model_len
        self._longest = max(self._labels, key=lambda label: len(label.token_ids))
        paths = self._build_paths()
        # The requests for a prompt: token ids to append to it, and parameters whose prompt_logprob_start counts from
        # its last token.
        self._branches: list[tuple[list[int], SamplingParams]] = []
        self._edge_tokens: list[int] = []  # in the order in which the branches' readings come
        for label, path in zip(self._labels, paths, strict=True):
            self._add_branch(label.token_ids[:-1], path)
        numbers = [
            node.edges[token]
            for label, path in zip(self._labels, paths, strict=True)
            for node, token in zip(path, label.token_ids, strict=True)
        ]
        self._edges = np.asarray(numbers)  # int64 [tokens of all labels]
        self._starts = np.cumsum([0, *(len(ids) for ids in self._token_ids[:-1])])  # int64 [labels], into _edges
        self._continues_none = np.asarray([not any(node.ends_label for node in path) for path in paths])

    def _build_paths(self) -> list[list[_Node]]:
        """For each label, the nodes where its tokens are read."""
        root = _Node()
        paths = []
        for label in self._labels:
            node, path = root, []
            for token in label.token_ids:
                path.append(node)
                node = node.children.setdefault(token, _Node())
            node.ends_label = True
            paths.append(path)
        return paths

    def _add_branch(self, token_ids: list[int], path: list[_Node]) -> None:
        """Plan the request for the path's last node, unless a longer path passes it or an earlier one ended there."""
        if path[-1].edges or any(child.children for child in path[-1].children.values()):
            return
        num_shared = sum(bool(node.edges) for node in path)
        lists: list[list[int]] = []
        for node, taken in zip(path[num_shared:], [*token_ids[num_shared:], None], strict=True):
            # A prompt position's readings begin with the prompt's token.
            first = [] if taken is None else [taken]
            lists.append(list(dict.fromkeys([*first, *node.children])))
            node.edges = {token: number for number, token in enumerate(lists[-1], start=len(self._edge_tokens))}
            self._edge_tokens += lists[-1]
        *earlier, last = lists
        params = SamplingParams(
            temperature=0.0,
            max_tokens=0,
            logprob_token_ids=last,
            prompt_logprob_token_ids=earlier or None,
            prompt_logprob_start=num_shared if earlier else None,
            logprobs_mode="raw_logprobs",
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._branches.append((token_ids, params))

    def check_prompts(self, prompts: Sequence[ProcessedPrompt]) -> None:
        """Raises VLLMValidationError when a prompt leaves no room for the longest label."""
        for index, prompt in enumerate(prompts):
            num_tokens, longest = len(prompt.token_ids), len(self._longest.token_ids)
            if num_tokens > self.max_prompt_len:
                name = "the prompt" if len(prompts) == 1 else f"prompts[{index}]"
                sizes = f"{num_tokens} tokens and label {self._longest} {longest}"
                limit = f"all but the label's last must fit within max_model_len={self._max_model_len}"
                raise VLLMValidationError(f"{name} has {sizes}; {limit}", "prompts", num_tokens)

    @property
    def num_requests(self) -> int:
        """Requests for each prompt."""
        return len(self._branches)

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt that leaves room for the labels."""
        # The last token of a label is read, never computed.
        return self._max_model_len - len(self._longest.token_ids) + 1

    def requests(self, prompt: ProcessedPrompt) -> list[tuple[ProcessedPrompt, SamplingParams]]:
        """Requests to queue for a prompt, in this order; ready for the engine core, as the caps on ids do not apply."""
        last_row = len(prompt.token_ids) - 1
        result = []
        for token_ids, shared_params in self._branches:
            params = shared_params.clone()
            if params.prompt_logprob_start is not None:
                params.prompt_logprob_start += last_row
            result.append((prompt.with_ids(prompt.token_ids + token_ids), params))
        return result

    def scores(self, prompt: ProcessedPrompt, outputs: Sequence[RequestOutput]) -> LabelScores:
        """The prompt's scores from the outputs of its `requests`, in their order. After an error they are NaN."""
        error = next((output.outputs[0].error for output in outputs if output.outputs[0].error is not None), None)
        if error is None:
            logprobs, logits, ranks = (edges[self._edges] for edges in self._gather(outputs))
        else:
            logprobs = logits = np.full(len(self._edges), np.nan, np.float32)
            ranks = np.zeros(len(self._edges), np.int32)
        totals = np.add.reduceat(logprobs.astype(np.float64), self._starts)
        return LabelScores(
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            label_texts=self._texts,
            label_token_ids=self._token_ids,
            logprobs=totals,
            probabilities=_softmax(totals),
            mass=math.fsum(np.exp(totals[self._continues_none])),
            token_logprobs=logprobs,
            token_ranks=ranks,
            token_logits=logits,
            error=error,
        )

    def _gather(self, outputs: Sequence[RequestOutput]) -> list[np.ndarray]:
        """Logprob, logit (float32) and rank (int32) of every edge."""
        readings = [
            part
            for output in outputs
            for part in (output.prompt_logprobs, output.outputs[0].logprobs)
            if part is not None
        ]
        # The order of entries is that of the requests, the prompt's token first: the order of the edges' numbers.
        assert np.array_equal(np.concatenate([part.token_ids for part in readings]), self._edge_tokens)
        names = ("logprobs", "logits", "ranks")
        return [np.concatenate([getattr(part, name) for part in readings]) for name in names]


def _softmax(logprobs: np.ndarray) -> np.ndarray:
    """NaN when all are -inf or NaN."""
    top = logprobs.max()
    if not np.isfinite(top):
        return np.full_like(logprobs, np.nan)
    weights = np.exp(logprobs - top)
    return weights / weights.sum()
