"""Adapters through what an engine does beside steps: sleep, new loads, ranks, cached states, a draft model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_architecture
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from thread_ranks import make_thread_llm
from tiny_adapters import PREFIX, linears, make_adapter, merged
from tiny_llm import make_tiny_llm
from torch import Tensor

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.usefixtures("one_thread")

# float32, summed in another order.
TOLERANCE = 1e-4
READS = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=0, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
PROMPTS = [[5, 9, 12, 40, 7], list(range(30, 70)), [8], [5, 9, 12, 40, 7, 90, 91]]


def adapters_of(folder: Path, model: Any, count: int = 2) -> tuple[list[LoRARequest], dict[str | None, Any]]:
    """Adapters with products, magnitudes and whole norms; and the merged models by their names."""
    models: dict[str | None, Any] = {None: model}
    requests = []
    for number in range(1, count + 1):
        generator = torch.Generator().manual_seed(number)
        tensors: dict[str, Tensor] = {}
        for name, (outputs, _) in linears(model).items():
            magnitude = torch.rand(outputs, generator=generator) + 0.5
            tensors[f"{PREFIX}{name}.lora_magnitude_vector"] = magnitude
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                tensors[f"{PREFIX}{name}"] = torch.rand(weight.shape, generator=generator) + 0.5
        path = make_adapter(folder / f"a{number}", model, rank=3, seed=number, tensors=tensors, use_dora=True)
        requests.append(LoRARequest(f"a{number}", number, str(path)))
        models[f"a{number}"] = merged(model, path)
    return requests, models


@torch.no_grad()
def check(llm: LLM, models: dict[str | None, Any], asked: list[LoRARequest | None], params: Any = READS) -> None:
    """Every prompt with its adapter gives the merged model's greedy tokens and readings."""
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=asked)
    for prompt, own, output in zip(PROMPTS, asked, outputs, strict=True):
        found = list(output.outputs[0].token_ids)
        rows = models[own and own.lora_name](torch.tensor([prompt + found])).logits[0].double().log_softmax(-1)
        assert found == rows[len(prompt) - 1 : -1].argmax(-1).tolist()
        readings = [*(output.prompt_logprobs or [None])[1:], *output.outputs[0].logprobs]
        for row, reading in zip(rows[-1 - len(readings) : -1], readings, strict=True):
            for token, entry in reading.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoRARequest], dict[str | None, Any]]:
    folder = tmp_path_factory.mktemp("kept")
    _, model = make_random_model("llama", "small", folder / "model", vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(folder / "model")
    return folder / "model", *adapters_of(folder, model)


@pytest.mark.parametrize("level", (1, 2))
def test_adapters_stay_through_sleep(made: Any, level: int) -> None:
    folder, requests, models = made
    llm = make_tiny_llm(folder, enable_lora=True, max_loras=2)
    asked = [requests[0], None, requests[1], requests[0]]
    check(llm, models, asked)
    for _ in range(2):
        llm.sleep(level)
        assert llm.llm_engine.list_loras() == {1, 2}
        llm.wake_up()
        check(llm, models, asked)
    llm.sleep(level)
    assert llm.llm_engine.remove_lora(2) and llm.collective_rpc("list_loras") != [{1, 2}]
    with pytest.raises(RuntimeError, match=r"call wake_up\(\) first"):
        llm.llm_engine.add_lora(requests[1])
    llm.wake_up()
    assert llm.llm_engine.list_loras() == {1}
    check(llm, models, asked)


def num_bytes() -> int:
    """The bytes of all tensors that there are."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, Tensor) and each.device.type == "cpu"
    }
    return sum(storages.values())


def test_memory_returns_after_unloading(made: Any) -> None:
    """All of it but the rows of the layers, which the first adapter of each takes."""
    folder, requests, models = made
    llm = make_tiny_llm(folder, enable_lora=True, max_loras=2, max_cpu_loras=2)
    engine = llm.llm_engine
    manager = engine.engine_core.executor.worker.adapters
    asked = [requests[0], requests[1], None, requests[0]]
    held = []
    for _ in range(5):
        check(llm, models, asked)
        held.append(num_bytes())
        assert engine.remove_lora(1) and engine.remove_lora(2)
        llm.generate({"prompt_token_ids": [5]}, GREEDY, use_tqdm=False)
        held.append(num_bytes())
        assert not manager.numbers() and manager._numbers == [None, None]
        assert not any(product._whole for product in manager._products.values() if hasattr(product, "_whole"))
    # The first rounds make what the engine keeps of its own, some hundred bytes.
    assert len(set(held[4::2])) == 1 and len(set(held[5::2])) == 1, held
    assert max(held[1::2]) - min(held[1::2]) < 1000 < held[0] - held[1]


def test_ranks_share_adapters(made: Any) -> None:
    folder, requests, models = made
    llm = make_thread_llm(folder, 2, enable_lora=True, max_loras=2)
    check(llm, models, [requests[0], None, requests[1], requests[0]])
    check(llm, models, [None, requests[1], requests[0], requests[1]])


def test_ranks_share_what_is_whole(tmp_path: Path) -> None:
    """Weights, biases, embeddings with magnitudes, some tokens' rows."""
    _, model = make_random_model("llama", "small", tmp_path / "model", vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(tmp_path / "model")
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(1)
    table = f"{PREFIX}model.embed_tokens"
    whole = {
        f"{PREFIX}model.layers.0.mlp.down_proj.weight": torch.randn(hidden, 96, generator=generator) * 0.1,
        f"{PREFIX}model.layers.1.self_attn.o_proj.bias": torch.randn(hidden, generator=generator),
        f"{PREFIX}lm_head.weight": torch.randn(VOCAB_SIZE, hidden, generator=generator) * 0.1,
    }
    tables = {
        f"{table}.lora_embedding_A": torch.randn(2, VOCAB_SIZE, generator=generator),
        f"{table}.lora_embedding_B": torch.randn(hidden, 2, generator=generator),
        f"{table}.lora_magnitude_vector": torch.rand(hidden, generator=generator) + 0.5,
    }
    rows = {f"{table}.token_adapter.trainable_tokens_delta": torch.randn(3, hidden, generator=generator)}
    folders = [
        make_adapter(tmp_path / "whole", model, 2, ("q_proj",), tensors=whole),
        make_adapter(tmp_path / "tables", model, 2, ("q_proj",), tensors=tables),
        make_adapter(tmp_path / "rows", model, 2, ("q_proj",), tensors=rows, trainable_token_indices=[5, 40, 200]),
    ]
    requests = [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1)]
    models = {None: model, **{folder.name: merged(model, folder) for folder in folders}}
    llm = make_thread_llm(tmp_path / "model", 2, enable_lora=True, max_loras=3)
    check(llm, models, [*requests, None])


def test_cached_states_are_an_adapters_own(tmp_path: Path) -> None:
    """A hybrid's snapshots, and a mixture's experts, while requests give their blocks to others and come back."""
    for name in ("lfm2", "qwen3_next"):
        model = make_architecture(name, tmp_path / name)
        requests, models = adapters_of(tmp_path / f"{name}-adapters", model)
        fields: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 3, "max_num_batched_tokens": 24}
        llm = make_tiny_llm(tmp_path / name, enable_lora=True, max_loras=2, **fields)
        for asked in ([requests[0], None, requests[1], requests[0]], [requests[1], requests[0], None, None]):
            for _ in range(2):
                check(llm, models, asked, GREEDY)


def test_a_draft_models_guesses_are_verified_with_adapters(made: Any) -> None:
    folder, requests, models = made
    drafts = {
        "model": str(folder),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [(1, 1024, 3)],
    }
    llm = make_tiny_llm(folder, enable_lora=True, max_loras=2, speculative_config=drafts)
    check(llm, models, [requests[0], None, requests[1], requests[0]], GREEDY)
    assert llm.llm_engine.engine_core.stats()["num_accepted_tokens"]
