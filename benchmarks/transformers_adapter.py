"""transformers in an efficient use.

Scoring: left-padded batches of similar lengths, logits of the last position only; a shared prefix is computed once and
its keys and values are repeated for every batch. Decoding: `generate` on one batch, readings in a logits processor.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from structured_forms import SCHEMA
from workloads import LABEL_IDS, STARTUP_PROMPT, EngineOptions, Workload

SCORE_BATCH = 32
SUFFIX_BATCH = 16
PROMPT_ROWS = 128


class TransformersAdapter:
    """A causal model and its tokenizer."""

    def __init__(self, options: EngineOptions) -> None:
        # Imported after make_adapter has removed this folder from the path.
        import transformers

        self.version = transformers.__version__
        self.notes = {
            "score": f"batches of {SCORE_BATCH} by length, last position's logits only",
            "score_prefix": f"prefix computed once, then repeated for suffixes in batches of {SUFFIX_BATCH}",
            "questions": "as score_prefix",
            "fullvocab": f"log-softmax over the vocabulary, batches of {SCORE_BATCH} by length",
            "decode64_ids": "ids read in a logits processor",
            "prompt_logprobs": f"one prompt at a time, log-softmax in pieces of {PROMPT_ROWS} positions",
        }
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        dtype = getattr(torch, options.dtype)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._form: Any = None

    @torch.inference_mode()
    def run(self, work: Workload) -> np.ndarray | None:
        if work.teacher is not None:
            return self._teach(work)
        if work.one_by_one:
            for prompt in work.prompts:
                self._decode(replace(work, prompts=[prompt]))
            return None
        if work.max_tokens > 1:
            return self._decode(work)
        if work.reads_prompt:
            return self._read_prompts(work)
        return self._score_suffixes(work) if work.shared else self._score(work)

    @torch.inference_mode()
    def score_text(self) -> list[float]:
        encoded = self._tokenizer(STARTUP_PROMPT, return_tensors="pt")
        logits = self._model(**encoded, use_cache=False, logits_to_keep=1).logits
        return _chosen(logits[:, -1], LABEL_IDS)[0].tolist()

    def _score(self, work: Workload) -> np.ndarray:
        readings = np.empty((len(work.prompts), 1, len(work.read_ids)), np.float32)
        order = sorted(range(len(work.prompts)), key=lambda i: len(work.prompts[i]))
        for start in range(0, len(order), SCORE_BATCH):
            batch = order[start : start + SCORE_BATCH]
            ids, mask = _left_padded([work.prompts[i] for i in batch])
            logits = self._model(
                input_ids=ids, attention_mask=mask, position_ids=_positions(mask), use_cache=False, logits_to_keep=1
            ).logits[:, -1]
            if work.full_vocabulary:
                every = torch.log_softmax(logits.float(), -1).numpy()
                readings[batch, 0] = every[:, list(work.read_ids)]
            else:
                readings[batch, 0] = _chosen(logits, work.read_ids).numpy()
        return readings

    def _score_suffixes(self, work: Workload) -> np.ndarray:
        prefix = torch.tensor([work.prompts[0][: work.shared]])
        cached = self._model(input_ids=prefix, use_cache=True, logits_to_keep=1).past_key_values
        suffixes = [prompt[work.shared :] for prompt in work.prompts]
        readings = np.empty((len(suffixes), 1, len(work.read_ids)), np.float32)
        order = sorted(range(len(suffixes)), key=lambda i: len(suffixes[i]))
        for start in range(0, len(order), SUFFIX_BATCH):
            batch = order[start : start + SUFFIX_BATCH]
            ids, mask = _left_padded([suffixes[i] for i in batch])
            past = copy.deepcopy(cached)
            past.batch_repeat_interleave(len(batch))
            logits = self._model(
                input_ids=ids,
                attention_mask=torch.cat([mask.new_ones(len(batch), work.shared), mask], dim=1),
                position_ids=_positions(mask) + work.shared,
                past_key_values=past,
                logits_to_keep=1,
            ).logits[:, -1]
            readings[batch, 0] = _chosen(logits, work.read_ids).numpy()
        return readings

    def _read_prompts(self, work: Workload) -> np.ndarray:
        means = []
        for prompt in work.prompts:
            ids = torch.tensor([prompt])
            hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
            targets = ids[0, 1:, None]
            parts = []
            for start in range(0, len(hidden), PROMPT_ROWS):
                logits = self._model.lm_head(hidden[start : start + PROMPT_ROWS]).float()
                chosen = logits.gather(1, targets[start : start + PROMPT_ROWS])
                parts.append(chosen - logits.logsumexp(-1, keepdim=True))
            means.append(torch.cat(parts).mean().item())
        return np.array(means, np.float32)[:, None, None]

    def _teach(self, work: Workload) -> np.ndarray | None:
        """Logprobs and, where wanted, ranks, in pieces of PROMPT_ROWS positions."""
        assert work.teacher is not None
        num_ids, num_topk, ranks = work.teacher
        reads = num_ids != 0 or num_topk is not None
        means = []
        for prompt in work.prompts:
            tokens = torch.tensor([prompt])
            hidden = self._model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
            table = torch.from_numpy(work.ids_a_position(prompt, abs(num_ids))).long()
            parts = []
            for start in range(0, len(hidden) if reads else 0, PROMPT_ROWS):
                rows = slice(start, start + PROMPT_ROWS)
                logits = self._model.lm_head(hidden[rows]).float()
                wanted = torch.cat((tokens[0, 1:, None][rows], table[rows]), dim=1)
                top = num_topk if num_ids >= 0 else -num_ids
                if top:
                    wanted = logits.topk(top).indices
                chosen = logits.gather(1, wanted)
                if ranks and not top:
                    ascending = logits.sort(dim=1).values
                    torch.searchsorted(ascending, chosen, right=True)
                parts.append(chosen - logits.logsumexp(-1, keepdim=True))
            means.append(torch.cat(parts).mean().item() if parts else 0.0)
        return np.array(means, np.float32)[:, None, None] if reads else None

    def _form_processors(self) -> list[Any]:
        """outlines' processor of the form, at an answer's beginning; made once."""
        if self._form is None:
            import outlines

            model = outlines.from_transformers(self._model, self._tokenizer)
            self._form = outlines.Generator(model, outlines.json_schema(json.dumps(SCHEMA))).logits_processor
        self._form.reset()
        return [self._form]

    def _decode(self, work: Workload) -> np.ndarray | None:
        ids, mask = _left_padded(work.prompts)
        reader = _Reader(work.read_ids)
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=work.max_tokens,
            do_sample=work.temperature > 0,
            pad_token_id=0,
            logits_processor=[reader] if work.read_ids else self._form_processors() if work.has_form else [],
        )
        new = output[:, ids.shape[1] :]
        if new.shape[1] != work.max_tokens:
            raise RuntimeError(f"asked for {work.max_tokens} tokens a prompt, got {new.shape[1]}")
        self._tokenizer.batch_decode(new)
        return torch.stack(reader.readings, dim=1).numpy() if work.read_ids else None


class _Reader:
    """A logits processor that records the chosen ids' logprobs and does not change the logits."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._ids = ids
        self.readings: list[torch.Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.readings.append(_chosen(scores, self._ids))
        return scores


def _chosen(logits: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
    """float32 [rows, ids]: logprobs, without a normalised copy of the logits."""
    logits = logits.float()
    return logits[:, list(ids)] - logits.logsumexp(-1, keepdim=True)


def _left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)
