"""A checkpoint's prediction layers as drafters: they draft what their formula says, and change no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE, make_architecture
from byte_tokenizer import VOCAB_SIZE as WORDS_VOCAB_SIZE
from byte_tokenizer import make_byte_tokenizer
from models_util import random_prompts
from prediction_models import FAMILIES, Reference
from safetensors.torch import load_file, save_file
from test_state_models import assert_equal_bits
from tiny_adapters import make_adapter
from tiny_llm import is_empty

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.features.drafts.runner import Speculator

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 4
PROMPTS = random_prompts(VOCAB_SIZE, (1, 40, 16))
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, detokenize=False, logprobs=2)
DRAWN = SamplingParams(max_tokens=14, temperature=0.3, seed=3, detokenize=False, logprobs=2, logprob_token_ids=[5])
LONG = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, detokenize=False, logprobs=2)


def make_llm(folder: Path, num_tokens: int = 0, method: str = "mtp", **fields: Any) -> LLM:
    usual = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 120}
    if num_tokens:
        # Drafts of random layers do not pay.
        usual["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": num_tokens,
            "num_speculative_tokens_per_batch_size": [(1, 1024, num_tokens)],
        }
    return LLM(str(folder), **(usual | fields))


def run(llm: LLM, params: SamplingParams | list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[Any]:
    found = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    assert is_empty(llm)
    return found


def drafts_of(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Fills with each text that something was drafted after, and what."""
    proposer: Any = llm.llm_engine.engine_core.executor.worker.model_runner.guest(Speculator).proposer
    found: list[tuple[list[int], list[int]]] = []
    propose = proposer.propose

    def noted(slots: np.ndarray, states: Any, room: np.ndarray) -> list[np.ndarray]:
        texts = [states.token_ids[slot, : states.total_len[slot]].tolist() for slot in slots.tolist()]
        drafts = propose(slots, states, room)
        found.extend((text, draft.tolist()) for text, draft in zip(texts, drafts, strict=True))
        return drafts

    proposer.propose = noted
    return found


def assert_as_reference(drafts: list[tuple[list[int], list[int]]], reference: Reference) -> None:
    assert sum(len(draft) for _, draft in drafts) > 10
    for text, draft in drafts:
        for step, (token, logits) in enumerate(zip(draft, reference.logits(text, len(draft))[1], strict=True)):
            # Close seconds are as good, but what follows them is another draft.
            assert logits[token] >= logits.max() - 1e-3, (len(text), step)
            if token != int(logits.argmax()):
                break


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, Reference(request.param, folder)


def test_drafts_follow_the_formula(made: tuple[Path, Reference]) -> None:
    """Drafts of each family, with more tokens than layers; the second time after cached prefixes."""
    folder, reference = made
    plain = make_llm(folder)
    llm = make_llm(folder, NUM_TOKENS)
    drafts = drafts_of(llm)
    for params in (GREEDY, DRAWN):
        assert_equal_bits(run(llm, params), run(plain, params))
    assert_as_reference(drafts[::5], reference)


@pytest.fixture(scope="module", params=["qwen3_next", "deepseek_v3"])
def near(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """Models most of whose drafts are right: with states, and with two layers."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, Reference(request.param, folder, is_near=True)


SAME_START = [[*PROMPTS[1][:33], token] for token in (3, 4, 5)]


@pytest.mark.parametrize(
    "fields",
    [
        {"enforce_eager": True},
        {"max_num_batched_tokens": 24, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 8, "max_num_seqs": 4, "mamba_block_size": 16},
        {"num_gpu_blocks_override": 8, "max_num_seqs": 4, "mamba_block_size": 16, "swap_space": 1e-3},
    ],
    ids=["eager", "chunked", "preempted", "swapped"],
)
def test_outputs_and_drafts_stay(near: tuple[Path, Reference], fields: dict[str, Any]) -> None:
    folder, reference = near
    prompts = [*PROMPTS, *SAME_START]
    params = [LONG if "num_gpu_blocks_override" in fields else GREEDY, DRAWN] * 3
    llm = make_llm(folder, NUM_TOKENS, **fields)
    drafts = drafts_of(llm)
    expected = run(make_llm(folder, **fields), params, prompts)
    for _ in range(2):
        assert_equal_bits(run(llm, params, prompts), expected)
    stats = llm.llm_engine.engine_core.stats()
    assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > 30
    if "num_gpu_blocks_override" in fields:
        assert llm.llm_engine.engine_core.scheduler.num_preemptions > 0
    assert_as_reference(drafts[::11], reference)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """Llama's kin with three layers, and a tokenizer."""
    folder = tmp_path_factory.mktemp("words")
    reference = Reference("mimo", folder, vocab_size=WORDS_VOCAB_SIZE)
    make_byte_tokenizer(folder)
    return folder, reference


def test_two_ranks_draft_the_same(near: tuple[Path, Reference]) -> None:
    folder, _ = near
    llms = make_llm(folder, NUM_TOKENS), make_llm(folder, NUM_TOKENS, tensor_parallel_size=2)
    tokens = [[each.outputs[0].token_ids for each in run(llm, GREEDY)] for llm in llms]
    stats = [llm.llm_engine.engine_core.stats() for llm in llms]
    assert tokens[0] == tokens[1]
    assert stats[0]["num_accepted_tokens"] == stats[1]["num_accepted_tokens"] > 0


def test_adapters_and_grammars(words: tuple[Path, Reference], tmp_path: Path) -> None:
    """An adapter changes embeddings and head, which drafts take from the model; what a grammar appends has no hidden
    state at first."""
    folder, reference = words
    adapter = make_adapter(tmp_path / "adapter", reference.model)
    size = reference.model.config.hidden_size
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors |= {
        "base_model.model.lm_head.lora_A.weight": torch.randn(4, size),
        "base_model.model.lm_head.lora_B.weight": torch.randn(WORDS_VOCAB_SIZE, 4),
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, WORDS_VOCAB_SIZE),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(size, 4),
    }
    save_file(tensors, adapter / "adapter_model.safetensors")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    fields["target_modules"] += ["lm_head", "embed_tokens"]
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    lora = LoRARequest("one", 1, str(adapter))
    form = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"]}
    params = [
        GREEDY,
        GREEDY,
        DRAWN,
        SamplingParams(max_tokens=30, temperature=0, logprobs=1, structured_outputs=StructuredOutputsParams(json=form)),
    ]
    prompts = [{"prompt_token_ids": each} for each in (*PROMPTS, PROMPTS[1])]
    usual = {"enable_lora": True, "skip_tokenizer_init": False}
    found = []
    for num_tokens in (0, NUM_TOKENS):
        llm = make_llm(folder, num_tokens, **usual)
        found.append(llm.generate(prompts, params, use_tqdm=False, lora_request=[lora, None, lora, None]))
        assert is_empty(llm)
    assert_equal_bits(found[1], found[0])
    assert llm.llm_engine.engine_core.stats()["num_draft_tokens"] > 40


def test_new_weights_and_a_new_cache(words: tuple[Path, Reference]) -> None:
    folder, reference = words
    llm = make_llm(folder, NUM_TOKENS)
    drafts = drafts_of(llm)
    run(llm, GREEDY)
    with torch.no_grad():
        for layer in reference.layers:
            layer.projection.weight.neg_()
    names = [f"model.mtp_layers.{index}.input_proj.weight" for index in range(3)]
    new = zip(names, (layer.projection.weight for layer in reference.layers), strict=True)
    llm.llm_engine.engine_core.executor.worker.load_weights(new)
    llm.reset_prefix_cache()
    for _ in range(2):
        drafts.clear()
        run(llm, GREEDY)
        assert_as_reference(drafts[::3], reference)
        llm.sleep()
        llm.wake_up()


def test_checkpoints_without_layers_are_refused(words: tuple[Path, Reference], tmp_path: Path) -> None:
    folder, _ = words
    make_architecture("glm4_moe", tmp_path / "none")
    make_architecture("llama", tmp_path / "other")
    with pytest.raises(ValueError, match="'mtp' cannot be used with .*: the checkpoint has no prediction layers"):
        make_llm(tmp_path / "none", NUM_TOKENS)
    with pytest.raises(ValueError, match="prediction layers of LlamaForCausalLM are not read"):
        make_llm(tmp_path / "other", NUM_TOKENS)
    with pytest.raises(ValueError, match="is not the target: with method='mtp' the target's own layers draft"):
        make_llm(folder, speculative_config={"method": "mtp", "model": str(tmp_path), "num_speculative_tokens": 1})


def test_as_many_tokens_as_layers_and_made_up_weights(near: tuple[Path, Reference]) -> None:
    folder, reference = near
    for method in ("mtp", "deepseek_mtp"):
        llm = make_llm(folder, speculative_config={"method": method}, load_format="dummy")
        assert llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens == reference.family.count
    run(llm, GREEDY)
