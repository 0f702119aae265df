"""A store of blocks: later engines compute only what it does not have, and read the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded import FORKED
from tiny_adapters import make_adapter
from tiny_llm import make_tiny_llm, make_tiny_model
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

PREFIX = [3 + number * 7 % 200 for number in range(100)]
PROMPTS = [[*PREFIX, 50 + number] for number in range(3)]
READS = SamplingParams(max_tokens=4, temperature=0.0, logprobs=8)
NUM_BLOCKS = len(PREFIX) // 16


def run(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = READS, **fields: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": each, **fields} for each in prompts], params, use_tqdm=False)


def readings(outputs: list[Any]) -> list[tuple[Any, ...]]:
    """Tokens and the bits of what was read of them."""
    found = []
    for output in outputs:
        for completion in output.outputs:
            arrays = completion.logprobs
            columns = (arrays.token_ids, arrays.logprobs, arrays.logits, arrays.ranks, arrays.lse)
            found.append((tuple(completion.token_ids), *(np.asarray(each).tobytes() for each in columns)))
    return found


def cached(outputs: list[Any]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def counts(llm: LLM) -> tuple[int, int]:
    stats = llm.llm_engine.engine_core.stats()
    return stats["num_stored_blocks"], stats["num_loaded_blocks"]


def end(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()


def fill(model: Path, store: Path, prompts: list[list[int]] = PROMPTS, run_fields: Any = None, **fields: Any) -> None:
    """An engine that computes prompts, and ends."""
    llm = make_tiny_llm(model, kv_store=str(store), **fields)
    run(llm, prompts, **(run_fields or {}))
    end(llm)


def test_a_later_process_computes_only_the_tail(folder, tmp_path):
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import json
from test_kv_store import PROMPTS, run, counts
from tiny_llm import make_tiny_llm
llm = make_tiny_llm({str(folder)!r}, kv_store={str(tmp_path / "store")!r})
print(json.dumps([output.num_cached_tokens for output in run(llm, PROMPTS[:1])]))
"""
    written = subprocess.run(
        [sys.executable, "-c", FORKED + code], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(written.stdout.splitlines()[-1]) == [0]
    llm = make_tiny_llm(folder, kv_store=str(tmp_path / "store"))
    outputs = run(llm)
    assert cached(outputs)[0] == NUM_BLOCKS * 16 and min(cached(outputs)) >= NUM_BLOCKS * 16
    assert counts(llm) == (0, NUM_BLOCKS)
    assert readings(outputs) == readings(run(make_tiny_llm(folder)))
    end(llm)


def test_loaded_blocks_have_the_bits_of_computed_ones(folder, tmp_path):
    fill(folder, tmp_path)
    caches = []
    for fields in ({"kv_store": str(tmp_path)}, {}):
        llm = make_tiny_llm(folder, **fields)
        run(llm, PROMPTS[:1])
        core = llm.llm_engine.engine_core
        request = core.scheduler.kv
        hashes = [key for key in request.pool._block_of if len(key) == 16]
        caches.append(
            {
                key: [
                    tensor[request.pool.find(key)].view(torch.uint8).numpy().tobytes()
                    for group in core.executor.worker.model_runner.kv_caches
                    for tensor in group
                ]
                for key in hashes
            }
        )
        end(llm)
    assert len(caches[0]) >= NUM_BLOCKS and caches[0] == caches[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"max_num_batched_tokens": 24, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 8},
        {"async_scheduling": True},
        {"swap_space": 0.01, "num_gpu_blocks_override": 8},
    ],
    ids=["bfloat16", "8 bits", "chunks", "few blocks", "steps ahead", "swap"],
)
def test_readings_are_those_without_a_store(folder, tmp_path, fields):
    expected = readings(run(make_tiny_llm(folder, **fields)))
    for number in range(2):
        llm = make_tiny_llm(folder, kv_store=str(tmp_path), **fields)
        outputs = run(llm)
        assert readings(outputs) == expected
        assert cached(outputs)[0] == number * NUM_BLOCKS * 16
        end(llm)


@pytest.mark.parametrize(
    "fields", [{"dtype": "bfloat16"}, {"block_size": 32}, {"kv_cache_dtype": "fp8"}, {"quantization": "int8"}]
)
def test_what_computes_other_values_has_blocks_of_its_own(folder, tmp_path, fields):
    fill(folder, tmp_path)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path), **fields)
    assert cached(run(llm))[0] == 0
    end(llm)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path), **fields)
    assert readings(run(llm)) == readings(run(make_tiny_llm(folder, **fields)))
    assert counts(llm)[1] > 0
    end(llm)


def test_two_models_share_a_folder(folder, tmp_path):
    other = make_tiny_model(tmp_path / "other", initializer_range=0.5)
    for model in (folder, other):
        fill(model, tmp_path / "store")
    for model in (folder, other):
        llm = make_tiny_llm(model, kv_store=str(tmp_path / "store"))
        outputs = run(llm)
        assert cached(outputs)[0] == NUM_BLOCKS * 16
        assert readings(outputs) == readings(run(make_tiny_llm(model)))
        end(llm)


def test_a_checkpoint_that_was_written_anew_finds_nothing(folder, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    fill(model, tmp_path / "store")
    make_tiny_model(model, initializer_range=0.5)
    llm = make_tiny_llm(model, kv_store=str(tmp_path / "store"))
    assert cached(run(llm))[0] == 0
    end(llm)


def test_salted_blocks_are_kept_only_if_asked(folder, tmp_path):
    for is_kept in (False, True):
        fields = {"kv_store": str(tmp_path), "kv_store_salted": is_kept}
        for number in range(2):
            llm = make_tiny_llm(folder, **fields)
            outputs = run(llm, PROMPTS[:1], cache_salt="tenant")
            assert cached(outputs) == [NUM_BLOCKS * 16 if is_kept and number else 0]
            end(llm)
    llm = make_tiny_llm(folder, **fields)
    assert cached(run(llm, PROMPTS[:1], cache_salt="another")) == [0]
    assert cached(run(llm, PROMPTS[:1])) == [0]
    end(llm)


def test_after_new_weights_the_store_is_left_alone(folder, tmp_path):
    fill(folder, tmp_path)
    files = sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir())
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    llm.collective_rpc("load_weights", args=([("model.layers.0.input_layernorm.weight", torch.zeros(size))],))
    assert cached(run(llm))[0] == 0
    assert cached(run(llm, [[*PREFIX[::-1], 5]])) == [0]
    end(llm)
    assert sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir()) == files


def test_the_store_outlives_a_reset_of_the_prefix_cache(folder, tmp_path):
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    run(llm)
    llm.llm_engine.engine_core.scheduler.guests[-1].store.flush()
    assert llm.reset_prefix_cache()
    assert cached(run(llm))[0] == NUM_BLOCKS * 16
    end(llm)


def test_a_prompt_with_which_another_engine_goes_on_ends_once_it_is_written(folder, tmp_path, monkeypatch):
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    writing = llm.llm_engine.engine_core.scheduler.guests[-1].store._writing
    write, may_write = writing._write, threading.Event()
    monkeypatch.setattr(writing, "_write", lambda waiting: may_write.wait(60) and write(waiting))
    asked = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})

    def next_end() -> tuple[str, Any]:
        while True:
            for output in llm.llm_engine.step():
                if output.finished:
                    return output.request_id, output.kv_transfer_params

    llm.llm_engine.add_request("asked", {"prompt_token_ids": PROMPTS[0]}, asked)
    llm.llm_engine.add_request("other", {"prompt_token_ids": [9] * 20}, READS)
    assert next_end() == ("other", None)
    may_write.set()
    assert next_end() == ("asked", {"do_remote_prefill": True, "do_remote_decode": False})
    may_write.clear()
    monkeypatch.setattr("vllm.v1.features.kv_store.scheduler._HAND_ON_SECONDS", 0.05)
    llm.llm_engine.add_request("asked", {"prompt_token_ids": [8, *PREFIX]}, asked)
    assert next_end() == ("asked", None) and not llm.llm_engine.engine_core.has_work()
    # One that is aborted meanwhile does not end another of its name.
    monkeypatch.undo()
    llm.llm_engine.add_request("asked", {"prompt_token_ids": [7, *PREFIX]}, asked)
    llm.llm_engine.step()
    llm.llm_engine.abort_request(["asked"])
    llm.llm_engine.add_request("asked", {"prompt_token_ids": [9] * 20}, READS)
    may_write.set()
    assert next_end() == ("asked", None)
    end(llm)


def test_an_engine_that_cannot_use_a_store_says_so_and_runs(folder, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("vllm.v1.features.kv_store.make.warn_once", lambda logger, *text: said.append(text))
    llm = make_tiny_llm(folder, kv_store=str(tmp_path / "store"), enable_prefix_caching=False)
    run(llm)
    end(llm)
    assert said and not (tmp_path / "store").exists()


def test_a_folder_that_cannot_be_made_is_no_error(folder, tmp_path):
    (tmp_path / "file").write_text("")
    llm = make_tiny_llm(folder, kv_store=str(tmp_path / "file" / "store"))
    assert readings(run(llm)) == readings(run(make_tiny_llm(folder)))
    end(llm)


def test_the_variable_names_a_folder_too(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KV_STORE", str(tmp_path / "named"))
    llm = make_tiny_llm(folder)
    run(llm)
    end(llm)
    assert list((tmp_path / "named").glob("*.blocks"))
    llm = make_tiny_llm(folder, kv_store="")
    assert not llm.llm_engine.vllm_config.cache_config.kv_store


@pytest.mark.parametrize("gib", [0, -1, float("nan")])
def test_a_bad_bound_is_refused(folder, gib):
    with pytest.raises(ValueError, match="kv_store_gib"):
        make_tiny_llm(folder, kv_store="x", kv_store_gib=gib)


def test_a_path_that_is_none_is_refused(folder):
    with pytest.raises(ValueError, match="kv_store must be the path of a folder, got 5"):
        make_tiny_llm(folder, kv_store=5)


def prompt_readings(outputs: list[Any]) -> list[tuple[bytes, ...]]:
    found = []
    for output in outputs:
        arrays = output.prompt_logprobs
        found.append(tuple(np.asarray(each).tobytes() for each in (arrays.token_ids, arrays.logprobs, arrays.ranks)))
    return found


@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16", "max_num_batched_tokens": 40, "max_num_seqs": 4}])
def test_prompts_are_read_from_hidden_states_that_were_kept(folder, tmp_path, fields):
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, prompt_logprobs=4)
    expected = run(make_tiny_llm(folder, **fields), params=params)
    for number in range(2):
        llm = make_tiny_llm(folder, kv_store=str(tmp_path), **fields)
        outputs = run(llm, params=params)
        assert prompt_readings(outputs) == prompt_readings(expected) and readings(outputs) == readings(expected)
        assert cached(outputs)[0] == number * NUM_BLOCKS * 16
        end(llm)


def test_blocks_without_hidden_states_get_them_from_a_prompt_that_is_read(folder, tmp_path):
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, prompt_logprobs=4)
    expected = prompt_readings(run(make_tiny_llm(folder), params=params))
    fill(folder, tmp_path)
    for number in range(2):
        llm = make_tiny_llm(folder, kv_store=str(tmp_path))
        outputs = run(llm, PROMPTS[:1], params=params)
        assert cached(outputs) == [number * NUM_BLOCKS * 16]
        assert prompt_readings(outputs) == expected[:1]
        end(llm)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path), cache_hidden_states=False)
    assert prompt_readings(run(llm, params=params)) == expected
    end(llm)


def test_an_adapters_blocks_are_found_by_its_files(folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder)
    for name, seed in (("one", 1), ("two", 2)):
        make_adapter(tmp_path / name, base, seed=seed)
    fields = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}

    def read(llm, name, number):
        request = LoRARequest(name, number, str(tmp_path / name))
        llm.llm_engine.add_lora(request)
        return llm.generate([{"prompt_token_ids": PROMPTS[0]}], READS, lora_request=request, use_tqdm=False)

    plain = make_tiny_llm(folder, **fields)
    expected = {name: readings(read(plain, name, number)) for number, name in enumerate(("one", "two"), 1)}
    expected["none"] = readings(run(plain, PROMPTS[:1]))
    assert len(set(map(str, expected.values()))) == 3
    for attempt in range(2):
        llm = make_tiny_llm(folder, kv_store=str(tmp_path / "store"), **fields)
        # Numbers of loads differ between engines.
        for number, name in enumerate(("one", "two") if attempt else ("two", "one"), 1):
            outputs = read(llm, name, number)
            assert cached(outputs) == [attempt * NUM_BLOCKS * 16]
            assert readings(outputs) == expected[name]
        assert readings(run(llm, PROMPTS[:1])) == expected["none"]
        end(llm)
    make_adapter(tmp_path / "one", base, seed=3)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path / "store"), **fields)
    assert cached(read(llm, "one", 1)) == [0]
    end(llm)


def test_embedded_prompts_are_found_by_their_embeddings(folder, tmp_path):
    embeds = [torch.randn(100, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    prompts = [{"prompt_embeds": each.repeat(1, -(-size // 64))[:, :size].contiguous()} for each in embeds]

    def read(**fields):
        llm = make_tiny_llm(folder, enable_prompt_embeds=True, **fields)
        outputs = llm.generate(prompts, READS, use_tqdm=False)
        end(llm)
        return outputs

    expected = readings(read())
    for attempt in range(2):
        outputs = read(kv_store=str(tmp_path))
        assert cached(outputs) == [attempt * NUM_BLOCKS * 16] * 2
        assert readings(outputs) == expected


def test_what_many_wait_for_is_read_once(folder, tmp_path, monkeypatch):
    fill(folder, tmp_path)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    store, read = llm.llm_engine.engine_core.scheduler.guests[-1].store, []
    monkeypatch.setattr(store, "read", lambda keys: read.append(list(keys)) or type(store).read(store, keys))
    outputs = run(llm, [[*PREFIX, 9, number] for number in range(12)])
    assert min(cached(outputs)) >= NUM_BLOCKS * 16
    assert [len(keys) for keys in read] == [NUM_BLOCKS] and counts(llm) == (0, NUM_BLOCKS)
    guest = llm.llm_engine.engine_core.scheduler.guests[-1]
    assert not (guest._staged or guest._pending or guest._reads)
    end(llm)


def test_a_request_rests_until_all_that_it_waits_for_is_read(folder, tmp_path, monkeypatch):
    fill(folder, tmp_path)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    scheduler, rests = llm.llm_engine.engine_core.scheduler, []
    guest = scheduler.guests[-1]
    llm.llm_engine.add_request("one", {"prompt_token_ids": [*PREFIX, 9]}, READS)
    (read,) = guest._reads.values()
    wait_for(read.parts)
    late = Future()
    read.parts.add(late)
    monkeypatch.setattr(type(scheduler.rest), "__call__", lambda _, seconds: rests.append(seconds))
    assert not guest.prepared(True) and rests == [0.02]
    late.set_result({})
    assert [request.request_id for request, _ in guest.prepared(True)] == ["one"] and len(rests) == 1
    end(llm)


def test_a_prefix_that_stays_in_memory_does_not_age(folder, tmp_path, monkeypatch):
    fill(folder, tmp_path)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    run(llm, PROMPTS[:1])
    (index,) = tmp_path.glob("*.index")
    os.utime(index, (1, 1))
    run(llm, PROMPTS[1:2])
    assert index.stat().st_mtime == 1  # it was noted a moment ago
    monkeypatch.setattr("vllm.utils.kv_store.blocks._TOUCH_SECONDS", 0.0)
    run(llm, PROMPTS[2:])
    assert index.stat().st_mtime > 1 and counts(llm) == (0, NUM_BLOCKS)
    end(llm)


def test_what_is_computed_faster_is_not_waited_for(folder, tmp_path):
    fill(folder, tmp_path)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    rates = llm.llm_engine.engine_core.scheduler.guests[-1]._rates
    rates.reading.note(2**30, 1e6)
    rates.computing.note(2**20, 1e-3)
    assert cached(run(llm, PROMPTS[:1])) == [0]
    end(llm)


def test_blocks_that_are_damaged_are_computed_and_written_again(folder, tmp_path):
    fill(folder, tmp_path)
    file = next(tmp_path.glob("*.blocks"))
    data = bytearray(file.read_bytes())
    data[3 * len(data) // NUM_BLOCKS + 100] ^= 4
    file.write_bytes(data)
    expected = readings(run(make_tiny_llm(folder)))
    for blocks in (3, NUM_BLOCKS):
        llm = make_tiny_llm(folder, kv_store=str(tmp_path))
        outputs = run(llm)
        assert readings(outputs) == expected and cached(outputs)[0] == blocks * 16
        end(llm)


def test_a_request_that_ends_while_it_is_read_for_leaves_nothing(folder, tmp_path):
    fill(folder, tmp_path)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    engine = llm.llm_engine
    guest = engine.engine_core.scheduler.guests[-1]
    engine.add_request("one", {"prompt_token_ids": PROMPTS[0]}, READS)
    assert guest._reads
    engine.abort_request(["one"])
    assert not (guest._staged or guest._pending or guest._reads)
    assert readings(run(llm)) == readings(run(make_tiny_llm(folder)))
    end(llm)


def test_of_requests_that_wait_for_the_same_read_each_may_end(folder, tmp_path):
    fill(folder, tmp_path)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    engine = llm.llm_engine
    guest = engine.engine_core.scheduler.guests[-1]
    for name, prompt in zip("abcd", (*PROMPTS, PROMPTS[0][:40]), strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, READS)
    # The fourth's prefix is a part of what is read for the others.
    assert len({*guest._reads.values()}) == 2 and len({*guest._pending.values()}) == 1
    engine.abort_request(["a", "d"])
    wait_for(guest._reads["b"].parts)
    assert [request.request_id for request, _ in guest.prepared(False)] == ["b", "c"]
    assert len(guest._staged) == NUM_BLOCKS
    for name, num_staged in (("b", NUM_BLOCKS), ("c", 0)):
        guest._release(name)
        assert len(guest._staged) == num_staged
    assert not (guest._pending or guest._reads or guest._reads_by_end or guest._done)
    end(llm)


def test_with_a_grammar_a_request_is_prepared_for_both(folder, tmp_path):
    fill(folder, tmp_path)
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, structured_outputs=form)
    llm = make_tiny_llm(folder, kv_store=str(tmp_path))
    outputs = run(llm, PROMPTS[:1], params=params)
    assert cached(outputs) == [NUM_BLOCKS * 16]
    assert readings(outputs) == readings(run(make_tiny_llm(folder), PROMPTS[:1], params=params))
    end(llm)
