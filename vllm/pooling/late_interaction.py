"""Queries and documents of late interaction as requests; see vllm/config/checkpoint/late_interaction.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig
from vllm.config.checkpoint.late_interaction import LateInteraction, Side, TextForm
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tokenizers.truncation import truncate_text
from vllm.utils.checks import check_integer
from vllm.v1.engine.input_processor import ProcessedPrompt

if TYPE_CHECKING:
    from torch import Tensor

Request = tuple[ProcessedPrompt, PoolingParams]


class LateTexts:
    """
    Args:
        settings: the model's.

    Raises:
        VLLMValidationError: a token that the settings name is none, or queries are longer than the model may read.
    """

    def __init__(self, config: ModelConfig, settings: LateInteraction, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._max_len = tokenizer, config.max_model_len
        self._forms: dict[Side, TextForm] = {"query": settings.query, "document": settings.document}
        self._prefixes = {side: self._prefix(side, form.prefix) for side, form in self._forms.items()}
        if (length := settings.query.expand_to) > self._max_len:
            message = f"queries of this model have {length} tokens: max_model_len must be at least that"
            raise VLLMValidationError(message, "max_model_len", self._max_len)

    def requests(
        self,
        texts: Sequence[str],
        side: Side,
        params: PoolingParams,
        truncate_to: int | None = None,
        names: Sequence[str] = (),
    ) -> list[Request]:
        """A request for each text.

        Args:
            params: of each request, less truncate_prompt_tokens.
            truncate_to: longest prompt, in tokens; -1: as the model reads; None: longer ones are errors. What exceeds
                the model's own length for such texts is cut in any case, as in training.
            names: of the texts, in errors.

        Raises:
            VLLMValidationError: a text that is too long.
        """
        if truncate_to not in (None, -1):
            truncate_to = check_integer("truncate_prompt_tokens", truncate_to, 1, self._max_len)
        form = self._forms[side]
        own = params.clone()
        own.task, own.truncate_prompt_tokens = "token_embed", None
        if hidden := self._not_compared(form):
            own.extra_kwargs = {**(own.extra_kwargs or {}), **hidden}
        begun = [form.prompt + text for text in texts]
        if form.strips:
            begun = [text.strip() for text in begun]
        requests = []
        for index, (text, ids) in enumerate(zip(begun, self._tokenizer.encode_batch(begun), strict=True)):
            name = names[index] if names else f"input[{index}]"
            ids = self._cut(text, ids, side, truncate_to, name)
            width = form.expand_to if truncate_to in (None, -1) else min(form.expand_to, truncate_to)  # type: ignore[type-var]
            requests.append(self._expanded(texts[index], ids, form, width, own))  # type: ignore[arg-type]
        return requests

    def _cut(self, text: str, ids: list[int], side: Side, truncate_to: int | None, name: str) -> list[int]:
        """The ids with the prefix, and as many as they may be."""
        prefix, longest = self._prefixes[side], self._forms[side].max_length
        num_tokens = min(len(ids) + len(prefix), longest or len(ids) + len(prefix))
        if truncate_to is None and num_tokens > self._max_len:
            message = (
                f"{name} has {num_tokens} tokens: the model's maximum context length is {self._max_len} tokens; "
                "truncate_prompt_tokens lets the rest go"
            )
            raise VLLMValidationError(message, name, num_tokens)
        limit = min(num_tokens, self._max_len if truncate_to in (None, -1) else truncate_to)  # type: ignore[type-var]
        ids = truncate_text(self._tokenizer, text, ids, limit - len(prefix), "right")  # type: ignore[operator]
        return ids[:1] + prefix + ids[1:]

    def _expanded(self, text: str, ids: list[int], form: TextForm, width: int, params: PoolingParams) -> Request:
        missing = width - len(ids)
        if missing <= 0:
            return ProcessedPrompt(text, ids, None), params
        if not form.attends:
            params = params.clone()
            params.extra_kwargs = {**(params.extra_kwargs or {}), "attended_tokens": len(ids)}
        return ProcessedPrompt(text, ids + [self._filler(form)] * missing, None), params

    def _not_compared(self, form: TextForm) -> dict[str, Any]:
        """Fields of extra_kwargs that leave tokens out."""
        fields: dict[str, Any] = {"kept_token_ids": list(form.kept)} if form.kept else {}
        known = [self._tokenizer.token_to_id(word) for word in form.skipped]
        skipped = {each for each in known if each is not None}
        if None in known and form.skips_unknown and (unknown := self._tokenizer.unk_token_id) is not None:
            skipped.add(unknown)
        return {**fields, "skipped_token_ids": sorted(skipped)} if skipped else fields

    def _prefix(self, side: Side, token: str) -> list[int]:
        return [self._known(f"{side}_prefix", token)] if token else []

    def _filler(self, form: TextForm) -> int:
        if form.filler is not None:
            return self._known("query_expansion: token", form.filler)
        own = self._tokenizer.hf_tokenizer
        # transformers warns of a mask token that is not there.
        mask = None if own.mask_token is None else own.mask_token_id
        if mask is None and own.eos_token_id is None:
            message = "query expansion needs a tokenizer with a mask token or an end-of-text token, and this has none"
            raise VLLMValidationError(message, "query_expansion")
        return own.eos_token_id if mask is None else mask

    def _known(self, name: str, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise VLLMValidationError(f"{name}={token!r} of this model is no token of its tokenizer", name, token)
        return found


def compute_maxsim_score(q_emb: Tensor, d_emb: Tensor) -> Tensor:
    """MaxSim: the sum over the query's tokens of the best dot product with a token of the document, float32 []; 0 where
    the document has none.

    Args:
        q_emb, d_emb: [tokens, size] of the query and of the document.
    """
    if not len(d_emb):
        return q_emb.new_zeros(()).float()
    return (q_emb.float() @ d_emb.float().T).amax(-1).sum()
