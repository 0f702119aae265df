"""Beam search by transformers, as sequences without their padding; and what tests of searches share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models_util import make_random_model

from vllm import LLM, SamplingParams

EOS_IDS = [2, *range(30, 60)]


def transformers_search(model: Any, prompts: list[list[int]], width: int, eos: list[int] | None, **options: Any) -> Any:
    """(generated ids, score) of the best `width` sequences of each prompt.

    Args:
        prompts: ids, all of one length.
        width: number of beams, at least 2.
        eos: ids that end a sequence.
        options: further arguments of generate.
    """
    out = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for row, score in zip(out.sequences[:, len(prompts[0]) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i for i, token_id in enumerate(row) if token_id in (eos or ())), len(row) - 1)
        found.append((row[: end + 1], score))
    return [found[i : i + width] for i in range(0, len(found), width)]


def make_model(arch: str, folder: Path) -> tuple[Path, Any]:
    """The folder and transformers' model. With this seed and these ids sequences of many lengths compete."""
    return make_random_model(arch, "small", folder, seed=3, eos_token_id=EOS_IDS)


def make_llm(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, **fields})


def beam_params(width: int, k: int, length_penalty: float, early_stopping: Any, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        use_beam_search=True,
        temperature=0,
        best_of=width,
        n=k,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=max_tokens,
    )


class RecordingBar:
    """Stands in for tqdm."""

    def __init__(self, updates: list[int]) -> None:
        self.updates = updates

    def update(self, count: int) -> None:
        self.updates.append(count)

    def close(self) -> None:
        pass


def contents(outputs: list[Any]) -> list[Any]:
    return [[(each.tokens, each.finish_reason, each.stop_reason) for each in output.sequences] for output in outputs]
