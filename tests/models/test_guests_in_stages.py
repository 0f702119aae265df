"""Drafts, pictures, embeddings and recorded steps in stages: the same bits as of one process without any of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from prediction_models import Reference
from test_eagle import Head
from test_split_by_layers import FIELDS, assert_equal_bits, run
from thread_stages import make_staged_llm
from tiny_vision import FAMILIES, draw, make_vision_model

from vllm import LLM, SamplingParams
from vllm.v1.features.images.runner import PicturePlaces, PictureRows

pytestmark = pytest.mark.usefixtures("one_thread")

READS = SamplingParams(
    max_tokens=14, temperature=0, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprob_token_ids=[3, 7]
)
ALWAYS = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [(1, 1024, 4)]}


def workers(llm: LLM) -> list[Any]:
    """The last stage's first."""
    return llm.llm_engine.engine_core.executor.workers


def eagle(takes_streams: bool) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        Head(takes_streams, folder, folder / "head")
        return {"method": "eagle3" if takes_streams else "eagle", "model": str(folder / "head")}

    return make


def draft_model(folder: Path) -> dict[str, Any]:
    make_architecture("llama", folder)
    make_architecture("qwen2", folder / "draft", seed=3, vocab_size=VOCAB_SIZE, use_sliding_window=False)
    return {"model": str(folder / "draft")}


def copying(name: str, method: str) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        make_architecture(name, folder)
        # A single token that comes again is a reason to draft, mostly wrong tokens.
        return {"method": method} | ({"prompt_lookup_min": 1, "prompt_lookup_max": 2} if method == "ngram" else {})

    return make


def predicting(name: str) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        Reference(name, folder, is_near=True)
        return {"method": "mtp"}

    return make


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(copying("llama", "ngram"), id="ngram"),
        pytest.param(copying("qwen3_next", "ngram"), id="ngram, states"),
        pytest.param(copying("gemma3", "suffix"), id="suffix, windows"),
        pytest.param(draft_model, id="draft model"),
        pytest.param(predicting("qwen3_next"), id="mtp, states"),
        pytest.param(predicting("deepseek_v3"), id="mtp"),
        pytest.param(eagle(False), id="eagle"),
        pytest.param(eagle(True), id="eagle3"),
    ],
)
def test_drafts(make: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    speculation = ALWAYS | make(tmp_path)
    expected = run(LLM(str(tmp_path), **FIELDS), READS)
    staged = make_staged_llm(tmp_path, 2, **FIELDS, speculative_config=speculation)
    # The second time from the prefix cache.
    for _ in range(2):
        assert_equal_bits(run(staged, READS), expected)
    counts = staged.llm_engine.engine_core.stats()
    assert counts["num_accepted_tokens"] < counts["num_draft_tokens"]
    if speculation.get("method") == "mtp":
        assert counts["num_accepted_tokens"]
    staged.llm_engine.engine_core.shutdown()


def test_streams_of_all_stages_reach_the_last(tmp_path: Path) -> None:
    """Its head is none for the other stages, which pass on what came before."""
    speculation = ALWAYS | eagle(True)(tmp_path)
    fields = {**FIELDS, "speculative_config": speculation}
    engines = LLM(str(tmp_path), **fields), make_staged_llm(tmp_path, 3, **fields)
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    found = []
    for llm in engines:
        llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params, use_tqdm=False)
        found.append([each.clone() for each in llm.llm_engine.engine_core.executor.worker.get_model().model.streams])
    assert len(found[0]) == 3 and found[0][0].shape[0] == 4
    assert all(map(torch.equal, *found))
    engines[1].llm_engine.engine_core.shutdown()


PICTURES = [draw(40, 30, 1), draw(64, 24, 2)]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "paligemma"])
def test_pictures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are added after further layers and positions on axes; pictures and prompts that are computed in
    one step."""
    make_vision_model(name, tmp_path)
    place = FAMILIES[name].placeholder
    prompts = [
        {"prompt": f"look {place} and {place} here", "multi_modal_data": {"image": PICTURES}},
        {"prompt": "plain text"},
        {"prompt": f"again {place}", "multi_modal_data": {"image": PICTURES[1:]}},
    ]
    if name == "paligemma":
        prompts = [{"prompt": f"{place}{'what ' * 20}", "multi_modal_data": {"image": PICTURES[:1]}}] * 2
    fields = {"dtype": "float32", "max_model_len": 400, "max_num_batched_tokens": 160, "max_num_seqs": 8}
    engines = LLM(str(tmp_path), **fields), make_staged_llm(tmp_path, 2, **fields)
    expected, found = (llm.generate(prompts, READS, use_tqdm=False) for llm in engines)
    assert_equal_bits(found, expected)
    last, first = (worker.model_runner for worker in workers(engines[1]))
    assert first.guest(PictureRows) is not None and type(last.guest(PicturePlaces)) is PicturePlaces
    engines[1].llm_engine.engine_core.shutdown()
    if name == "qwen3_vl":
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
        with pytest.raises(ValueError, match="which the first stage must have, and VLLM_PP_LAYER_PARTITION gives it 1"):
            make_staged_llm(tmp_path, 2, **fields)


def test_embeddings(tmp_path: Path) -> None:
    make_architecture("llama", tmp_path)
    rows = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    prompts = [{"prompt_embeds": rows}, {"prompt_token_ids": [5, 6, 7]}, {"prompt_embeds": rows[:5]}]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False, logprobs=3)
    fields = {**FIELDS, "enable_prompt_embeds": True}
    engines = LLM(str(tmp_path), **fields), make_staged_llm(tmp_path, 2, **fields)
    alone, staged = (llm.generate(prompts, params, use_tqdm=False) for llm in engines)
    for own, wanted in zip(staged, alone, strict=True):
        assert own.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert own.outputs[0].logprobs.logprobs.tolist() == wanted.outputs[0].logprobs.logprobs.tolist()
    engines[1].llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_steps_are_replayed_on_every_stage(name: str, tmp_path: Path) -> None:
    make_architecture(name, tmp_path)
    expected, eager = (run(LLM(str(tmp_path), **FIELDS, enforce_eager=each), READS) for each in (False, True))
    assert_equal_bits(eager, expected)
    staged = make_staged_llm(tmp_path, 3, **FIELDS)
    replays = [worker.model_runner.replay.steps for worker in workers(staged)]
    assert all(steps._records for steps in replays)
    # How requests share steps depends on the stages' times, and a step is recorded once it comes again.
    for _ in range(8):
        assert_equal_bits(run(staged, READS), expected)
        if all(steps._recorded for steps in replays):
            break
    assert all(steps._recorded for steps in replays)
    staged.llm_engine.engine_core.shutdown()
