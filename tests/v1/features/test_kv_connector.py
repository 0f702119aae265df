"""Connectors after upstream's interface: a later engine computes only what one cannot load, and reads the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import make_architecture
from prediction_models import Reference
from preloaded import FORKED
from thread_stages import make_staged_llm
from tiny_adapters import make_adapter
from tiny_llm import is_empty, make_tiny_llm
from tiny_vision import make_vision_model, prompt_of_two
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import EngineDeadError
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.features.kv_connector.runner import ConnectedLayers
from vllm.v1.features.kv_connector.scheduler import Connections

PROMPT = [3 + number * 7 % 200 for number in range(101)]
NUM_BLOCKS = 100 // 16
READS = SamplingParams(max_tokens=4, temperature=0.0, logprobs=8)
# For models without a tokenizer.
PROMPT_OF_50 = [1 + number % 50 for number in range(101)]
UNREAD = SamplingParams(max_tokens=4, temperature=0.0, logprobs=8, detokenize=False)


@pytest.fixture(autouse=True)
def _module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def connector_config(store: Path, **fields: Any) -> dict[str, Any]:
    extra = {"folder": str(store), **fields.pop("extra", {})}
    usual = {"kv_connector": "FileConnector", "kv_connector_module_path": "file_connector", "kv_role": "kv_both"}
    return {**usual, "kv_connector_extra_config": extra, **fields}


def run(llm: LLM, *prompts: list[int], params: SamplingParams = READS) -> list[Any]:
    return llm.generate([{"prompt_token_ids": each} for each in prompts or (PROMPT,)], params, use_tqdm=False)


def readings(outputs: list[Any]) -> list[Any]:
    """Tokens and the bits of what was read of them."""
    found = []
    for output in outputs:
        for completion in output.outputs:
            read = completion.logprobs
            bits = (each.tobytes() for each in (read.token_ids, read.logprobs, read.logits, read.ranks, read.lse))
            found.append((tuple(completion.token_ids), *bits))
    return found


def sides(llm: LLM) -> tuple[Any, Any]:
    """The connectors of the scheduler and of the worker."""
    core = llm.llm_engine.engine_core
    guest = next(guest for guest in core.scheduler.guests if isinstance(guest, Connections))
    return guest.connector, core.executor.worker.model_runner.guest(ConnectedLayers)._connector


def end(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 24, "max_num_seqs": 2},
        {"swap_space": 0.01, "num_gpu_blocks_override": 9},
    ],
    ids=["float32", "bfloat16", "fp8", "async", "chunks", "swap"],
)
def test_a_second_engine_computes_only_the_tail(folder, tmp_path, fields):
    first = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path / "blocks"), **fields)
    assert [output.num_cached_tokens for output in run(first)] == [0]
    end(first)
    others = [[7, *PROMPT[1:]], PROMPT[:40]]
    second = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path / "blocks"), **fields)
    plain = make_tiny_llm(folder, **fields)
    outputs, expected = run(second), run(plain)
    assert [output.num_cached_tokens for output in outputs] == [NUM_BLOCKS * 16]
    assert readings(outputs) == readings(expected)
    _, worker = sides(second)
    computed = [call[2] for call in worker.calls if call[0] == "save"]
    assert max(computed) == len(PROMPT) - NUM_BLOCKS * 16
    stats = second.llm_engine.engine_core.stats()
    assert (stats["num_loaded_blocks"], stats["num_external_hit_tokens"]) == (NUM_BLOCKS, NUM_BLOCKS * 16)
    # Loaded blocks are content as any other, and blocks that the connector does not have are computed.
    assert readings(run(second, PROMPT, *others)) == readings(run(plain, PROMPT, *others))
    end(second)


@pytest.mark.parametrize("connector", ["FileConnector", "LateConnector"])
def test_each_rank_has_a_connector(folder, tmp_path, connector):
    """One of them fails to load a block, which all compute then."""
    plain = make_tiny_llm(folder, tensor_parallel_size=2)
    expected = readings(run(plain))
    end(plain)
    found = []
    for extra in ({}, {}, {"answers": {"load_error": True}, "failing_rank": 1}):
        fields = {"kv_connector": connector, "extra": extra, "kv_load_failure_policy": "recompute"}
        llm = make_tiny_llm(folder, tensor_parallel_size=2, kv_transfer_config=connector_config(tmp_path, **fields))
        outputs = run(llm)
        assert readings(outputs) == expected
        found.append(outputs[0].num_cached_tokens)
        core = llm.llm_engine.engine_core
        while core.has_work():
            core.step()
        assert is_empty(llm)
        end(llm)
    assert found == [0, NUM_BLOCKS * 16, 0 if connector == "FileConnector" else 2 * 16]
    if connector == "FileConnector":
        fields["kv_load_failure_policy"] = "fail"
        llm = make_tiny_llm(folder, tensor_parallel_size=2, kv_transfer_config=connector_config(tmp_path, **fields))
        with pytest.raises(EngineDeadError, match="could not load the blocks"):
            run(llm)
        # The workers are gone, and the engine's end is none the less one.
        end(llm)


@pytest.mark.parametrize("connector", ["FileConnector", "LateConnector"])
def test_each_stage_has_a_connector(folder, tmp_path, connector):
    prompts = [PROMPT, [9] * 5, [7, *PROMPT[1:]]]
    expected = readings(run(make_tiny_llm(folder), *prompts))
    for attempt in range(2):
        config = connector_config(tmp_path, kv_connector=connector)
        llm = make_staged_llm(folder, 2, dtype="float32", max_model_len=128, kv_transfer_config=config)
        core = llm.llm_engine.engine_core
        described = sides(llm)[0]._kv_cache_config.kv_cache_groups[0].layer_names
        assert described == [f"model.layers.{layer}.self_attn.attn" for layer in range(len(described))]
        outputs = run(llm, *prompts)
        assert readings(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [attempt * each * 16 for each in (6, 0, 6)]
        while core.has_work():
            core.step()
        assert is_empty(llm)
        told = [call for call in sides(llm)[0].calls if call[0] == "output" and call[1]]
        assert len(told) == (2 if connector == "LateConnector" and not attempt else 0)
        end(llm)


def test_layers_with_windows_keep_all_blocks(tmp_path):
    make_architecture("gemma3", tmp_path)
    usual = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128}
    prompts = [PROMPT_OF_50, [7, *PROMPT_OF_50[1:]]]
    plain = LLM(str(tmp_path), **usual)
    windows = plain.llm_engine.engine_core.executor.worker.kv_group_windows
    assert None in windows and len(windows) > 1
    expected = readings(run(plain, *prompts, params=UNREAD))
    for attempt, connector in enumerate(["FileConnector", "FileConnector", "LateConnector"]):
        config = connector_config(tmp_path / "blocks", kv_connector=connector)
        llm = LLM(str(tmp_path), kv_transfer_config=config, **usual)
        outputs = run(llm, *prompts, params=UNREAD)
        assert readings(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [bool(attempt) * NUM_BLOCKS * 16] * 2
        assert len(sides(llm)[1].caches) == len(llm.llm_engine.engine_core.executor.worker.model_runner.kv_caches)
        end(llm)


def test_drafts_from_hidden_states_are_those_of_a_computed_prompt(tmp_path):
    Reference("mimo", tmp_path, is_near=True)
    draft = {"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 1024, 3)]}
    usual = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128}
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=8, ignore_eos=True, detokenize=False)
    # Blocks that had other content before are used again.
    others = [[9 + number, *PROMPT_OF_50] for number in range(2)]
    expected = readings(run(LLM(str(tmp_path), **usual), PROMPT_OF_50, params=params))
    found = []
    for connector in ("FileConnector", "FileConnector", "LateConnector"):
        config = connector_config(tmp_path / "blocks", kv_connector=connector)
        sizes = {"num_gpu_blocks_override": 9, "max_num_seqs": 1}
        llm = LLM(str(tmp_path), kv_transfer_config=config, speculative_config=draft, **usual, **sizes)
        core = llm.llm_engine.engine_core
        run(llm, *others, params=params)
        before = core.stats()
        outputs = run(llm, PROMPT_OF_50, params=params)
        assert readings(outputs) == expected
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        found.append((outputs[0].num_cached_tokens, [core.stats()[name] - before[name] for name in names]))
        assert "model.hidden_states" in sides(llm)[1].caches
        end(llm)
    assert [num_cached for num_cached, _ in found] == [0, NUM_BLOCKS * 16, NUM_BLOCKS * 16]
    assert found[0][1] == found[1][1] == found[2][1] and found[0][1][2] > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_follow_what_was_loaded(folder, tmp_path, method):
    draft = {"method": method, "num_speculative_tokens": 3, "model": None if method == "ngram" else str(folder)}
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=8, ignore_eos=True)
    expected = readings(run(make_tiny_llm(folder), params=params))
    for attempt in range(2):
        config = connector_config(tmp_path)
        llm = make_tiny_llm(folder, speculative_config=draft, kv_transfer_config=config)
        outputs = run(llm, params=params)
        assert readings(outputs) == expected and outputs[0].num_cached_tokens == attempt * NUM_BLOCKS * 16
        assert llm.llm_engine.engine_core.stats()["num_draft_tokens"]
        end(llm)


def test_adapters_are_told(folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder)
    for seed, name in enumerate(("one", "two")):
        make_adapter(tmp_path / name, base, seed=seed)
    fields = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}

    def read(llm, name, number):
        request = LoRARequest(name, number, str(tmp_path / name))
        return llm.generate([{"prompt_token_ids": PROMPT}], READS, lora_request=request, use_tqdm=False)

    plain = make_tiny_llm(folder, **fields)
    expected = {name: readings(read(plain, name, number)) for number, name in enumerate(("one", "two"), 1)}
    hashes = []
    for names in (("one",), ("two", "one")):
        llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path / "blocks"), **fields)
        for number, name in enumerate(names, 1):
            llm.llm_engine.add_lora(LoRARequest(name, number, str(tmp_path / name)))
            outputs = read(llm, name, number)
            assert readings(outputs) == expected[name]
            is_there = len(names) == 2 and name == "one"
            assert outputs[0].num_cached_tokens == (NUM_BLOCKS * 16 if is_there else 0)
        hashes.append(sides(llm)[0].hashes)
        end(llm)
    # Names of content are the same in every process, whatever else was loaded there.
    assert hashes[0][0] == hashes[1][-1] != hashes[1][0] and len(hashes[0][0]) == NUM_BLOCKS


def test_pictures_are_told_by_their_values(tmp_path):
    make_vision_model("llava", tmp_path / "model")

    def read(seeds: tuple[int, int], **fields: Any) -> Any:
        llm = LLM(str(tmp_path / "model"), dtype="float32", limit_mm_per_prompt={"image": 2}, **fields)
        outputs = llm.generate(prompt_of_two("llava", seeds), READS, use_tqdm=False)
        end(llm)
        return outputs

    expected = {seeds: readings(read(seeds)) for seeds in ((0, 1), (0, 2))}
    config = {"kv_transfer_config": connector_config(tmp_path / "store")}
    found = [(seeds, read(seeds, **config)) for seeds in ((0, 1), (0, 2), (0, 1))]
    assert all(readings(outputs) == expected[seeds] for seeds, outputs in found)
    num_tokens = len(found[0][1][0].prompt_token_ids)
    assert [outputs[0].num_cached_tokens for _, outputs in found] == [0, 0, (num_tokens - 1) // 16 * 16]


@pytest.mark.parametrize("fields", [{}, {"async_scheduling": True, "max_num_batched_tokens": 40}], ids=["", "async"])
def test_requests_that_are_preempted_read_the_same(folder, tmp_path, fields):
    prompts = [[*PROMPT[: 10 + 9 * number % 80], 50 + number] for number in range(24)]
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=4, ignore_eos=True)
    expected = readings(run(make_tiny_llm(folder), *prompts, params=params))
    num_loaded = 0
    for _ in range(2):
        config = connector_config(tmp_path)
        llm = make_tiny_llm(folder, kv_transfer_config=config, num_gpu_blocks_override=14, max_num_seqs=5, **fields)
        assert readings(run(llm, *prompts, params=params)) == expected
        assert llm.llm_engine.engine_core.stats()["num_preemptions"] > 0
        num_loaded = llm.llm_engine.engine_core.stats()["num_loaded_blocks"]
        assert is_empty(llm)
        end(llm)
    assert num_loaded > 0


def test_another_process_finds_what_the_connector_has(folder, tmp_path):
    config = connector_config(tmp_path / "blocks")
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from test_kv_connector import run
from tiny_llm import is_empty, make_tiny_llm
run(make_tiny_llm({str(folder)!r}, kv_transfer_config={json.dumps(config)!r}))
"""
    subprocess.run([sys.executable, "-c", FORKED + code], capture_output=True, text=True, check=True, timeout=300)
    llm = make_tiny_llm(folder, kv_transfer_config=KVTransferConfig(**config))
    outputs = run(llm)
    assert [output.num_cached_tokens for output in outputs] == [NUM_BLOCKS * 16]
    assert readings(outputs) == readings(run(make_tiny_llm(folder)))
    end(llm)


def test_the_calls_come_in_upstreams_order(folder, tmp_path):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path), num_gpu_blocks_override=20)
    run(llm, params=SamplingParams(max_tokens=2, temperature=0.0))
    llm.llm_engine.engine_core.step()
    end(llm)
    scheduler, worker = sides(llm)
    assert scheduler.role is KVConnectorRole.SCHEDULER and worker.role is KVConnectorRole.WORKER
    # It is asked when the request is queued, and again when it is admitted; the last step computes nothing.
    steps = ["alloc", "meta", "output", "meta", "finished", "output", "meta"]
    assert [call[0] for call in scheduler.calls] == ["match", "match", *steps, "shutdown"]
    request_id = scheduler.calls[0][1]
    assert scheduler.calls[1] == ("match", request_id, 0)
    alloc, metas = scheduler.calls[2], [call[1] for call in scheduler.calls if call[0] == "meta"]
    assert alloc[2] == 0 and len(alloc[3]) == 1 and len(alloc[3][0]) == NUM_BLOCKS + 1
    assert metas == [{request_id: len(PROMPT)}, {request_id: 1}, {}]
    ended = next(call for call in scheduler.calls if call[0] == "finished")
    assert ended == ("finished", request_id, alloc[3][0], 2)

    names = [f"model.layers.{index}.self_attn.attn" for index in range(2)]
    config = llm.llm_engine.vllm_config.model_config.hf_config
    shape = (2, 20, config.num_key_value_heads, 16, config.head_dim)
    registered, calls = worker.calls[0], worker.calls[1:]
    assert registered == ("register", dict.fromkeys(names, shape))
    step = ["load", "wait", "wait", "save", "save", "saved", "get_finished", "clear"]
    assert [call[0] for call in calls] == [*step, *step, "load", "get_finished", "clear", "shutdown"]
    assert [call[1] for call in calls if call[0] == "get_finished"] == [set(), set(), {request_id}]
    assert calls[0] == ("load", True)
    assert [call[1] for call in calls if call[0] == "wait"] == names * 2
    assert [call[1:] for call in calls if call[0] == "save"] == [
        *((name, len(PROMPT)) for name in names),
        *((name, 1) for name in names),
    ]


def test_a_connector_of_all_groups_is_told_of_each(folder, tmp_path):
    config = connector_config(tmp_path, kv_connector="GroupsConnector")
    llm = make_tiny_llm(folder, kv_transfer_config=config, num_gpu_blocks_override=20)
    (output,) = run(llm, params=SamplingParams(max_tokens=2, temperature=0.0))
    end(llm)
    assert output.kv_transfer_params == {"num_blocks": NUM_BLOCKS + 1}
    assert ("groups", 1) in sides(llm)[0].calls


def test_a_layers_tensor_is_its_keys_and_values(folder, tmp_path):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path))
    run(llm)
    runner = llm.llm_engine.engine_core.executor.worker.model_runner
    _, worker = sides(llm)
    for tensor, (keys, values) in zip(worker.caches.values(), runner.kv_caches, strict=True):
        assert tensor.data_ptr() == keys.data_ptr() and tensor[1].data_ptr() == values.data_ptr()
        assert torch.equal(tensor[0].flatten(2), keys) and torch.equal(tensor[1].flatten(2), values)
    end(llm)


def test_a_latent_layers_tensor_is_its_rows(tmp_path):
    make_architecture("youtu", tmp_path)
    config = connector_config(tmp_path / "blocks")
    usual = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 20}
    outputs = []
    for _ in range(2):
        llm = LLM(str(tmp_path), kv_transfer_config=config, **usual)
        outputs.append(run(llm, PROMPT_OF_50, params=UNREAD))
        _, worker = sides(llm)
        (cache, *_), *_ = llm.llm_engine.engine_core.executor.worker.model_runner.kv_caches
        first = next(iter(worker.caches.values()))
        assert first.shape[:2] == (20, 16) and first.data_ptr() == cache.data_ptr()
        end(llm)
    assert [output.num_cached_tokens for (output,) in outputs] == [0, NUM_BLOCKS * 16]
    assert readings(outputs[0]) == readings(outputs[1])


def test_a_connector_that_does_not_know_yet_is_asked_again(folder, tmp_path):
    first = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path))
    run(first)
    end(first)
    extra = {"answers": {"undecided": 3}}
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, extra=extra))
    assert [output.num_cached_tokens for output in run(llm)] == [NUM_BLOCKS * 16]
    end(llm)


def test_prompt_readings_are_computed_and_not_loaded(folder, tmp_path):
    reads = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    first = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path))
    run(first)
    end(first)
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path))
    found, expected = (run(each, params=reads)[0] for each in (llm, make_tiny_llm(folder)))
    assert found.num_cached_tokens == 0
    assert found.prompt_logprobs.logprobs.tobytes() == expected.prompt_logprobs.logprobs.tobytes()
    end(llm)


@pytest.mark.parametrize("fields", [{}, {"async_scheduling": True}, {"swap_space": 0.01}], ids=["", "async", "swap"])
def test_blocks_are_loaded_beside_steps_and_kept_after_a_requests_end(folder, tmp_path, fields):
    prompts = [PROMPT, *([PROMPT[0] + number, *PROMPT[1:70]] for number in range(1, 6))]
    expected = readings(run(make_tiny_llm(folder), *prompts))
    sizes = {"num_gpu_blocks_override": 18, "max_num_seqs": 2, **fields}
    for attempt in range(2):
        config = connector_config(tmp_path, kv_connector="LateConnector")
        llm = make_tiny_llm(folder, kv_transfer_config=config, **sizes)
        core = llm.llm_engine.engine_core
        outputs = run(llm, *prompts)
        assert readings(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [attempt * each for each in (96, *[64] * 5)]
        if not attempt:
            # An engine without requests goes on as long as blocks are kept; the params came with the outputs.
            assert [output.kv_transfer_params for output in outputs] == [{"num_blocks": each} for each in (6, *[4] * 5)]
            assert core.has_work()
        while core.has_work():
            core.step()
        assert core.scheduler.kv.pool.num_free == 18 and is_empty(llm)
        end(llm)


def test_a_request_that_is_aborted_while_it_is_loaded_for_leaves_nothing(folder, tmp_path):
    config = connector_config(tmp_path, kv_connector="LateConnector")
    llm = make_tiny_llm(folder, kv_transfer_config=config)
    expected = readings(run(llm))
    core = llm.llm_engine.engine_core
    while core.has_work():
        core.step()
    assert llm.reset_prefix_cache()
    llm.llm_engine.add_request("one", {"prompt_token_ids": PROMPT}, READS)
    llm.llm_engine.step()
    assert core.scheduler.is_transferring
    llm.llm_engine.abort_request(["one"])
    while core.has_work():
        core.step()
    assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
    assert readings(run(llm)) == expected
    # Nor does one that is aborted between the step that has ended the load and the next.
    for num_steps in range(1, 7):
        assert llm.reset_prefix_cache()
        for name, prompt in (("other", [9] * 5), ("one", PROMPT)):
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(num_steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(["one"])
        core.step()
        llm.llm_engine.abort_request(["other"])
        while core.has_work():
            core.step()
        assert is_empty(llm)
    # Sleep waits for what has begun.
    assert llm.reset_prefix_cache()
    llm.llm_engine.add_request("two", {"prompt_token_ids": PROMPT}, READS)
    llm.llm_engine.step()
    llm.sleep(mode="keep")
    llm.wake_up()
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
    assert readings(outputs) == expected
    end(llm)


@pytest.mark.parametrize(
    ("connector", "error", "num_cached"),
    [
        ("FileConnector", "load_error", 0),
        ("FileConnector", "late_error", 0),
        ("LateConnector", "load_error", 32),
        ("LateConnector", "early_error", 32),
    ],
)
def test_blocks_that_could_not_be_loaded_are_computed(folder, tmp_path, connector, error, num_cached):
    """A late error is told after the forward pass, an early one steps before the load has ended."""
    config = connector_config(tmp_path, kv_connector=connector)
    expected = readings(run(make_tiny_llm(folder)))
    for extra in ({}, {"answers": {error: True}}):
        policy = {"kv_load_failure_policy": "recompute", "kv_connector": connector, "extra": extra}
        llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, **policy))
        core = llm.llm_engine.engine_core
        found = [run(llm) for _ in range(2)]
        assert [readings(each) for each in found] == [expected] * 2
        assert found[0][0].num_cached_tokens == (num_cached if extra else 0)
        # A step that is repeated has loaded nothing.
        assert core.stats()["num_external_hit_tokens"] == (num_cached if extra else 0)
        while core.has_work():
            core.step()
        assert is_empty(llm)
        # A request that begins anew has not ended.
        _, worker = sides(llm)
        ended = [name for call in worker.calls if call[0] == "get_finished" for name in call[1]]
        assert len(ended) == len(set(ended))
        end(llm)
    for name, value, neutral in (("async_scheduling", True, False), ("pipeline_parallel_size", 2, 1)):
        with pytest.raises(ValueError, match=f"kv_load_failure_policy='recompute' needs {name}={neutral}"):
            make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, **policy), **{name: value})
    if connector == "LateConnector":
        config["kv_connector_extra_config"] |= extra
        ended = run(make_tiny_llm(folder, kv_transfer_config=config))[0].outputs[0]
        assert ended.finish_reason == "error" and "could not load the blocks" in ended.error


def test_blocks_that_could_not_be_loaded_end_the_step(folder, tmp_path):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, extra={"answers": {"load_error": True}}))
    with pytest.raises(RuntimeError, match=r"could not load the blocks \[3\]"):
        run(llm)
    # The next one is computed.
    assert readings(run(llm)) == readings(run(make_tiny_llm(folder)))
    end(llm)


def test_what_a_connector_says_is_heard_whoever_was_in_the_step(folder, tmp_path):
    config = connector_config(tmp_path, kv_connector="LateConnector")
    llm = make_tiny_llm(folder, kv_transfer_config=config, async_scheduling=True)
    core, long = llm.llm_engine.engine_core, SamplingParams(max_tokens=20, ignore_eos=True)
    for num_steps in range(1, 8):
        llm.llm_engine.add_request("kept", {"prompt_token_ids": [num_steps, *PROMPT]}, READS)
        llm.llm_engine.add_request("aborted", {"prompt_token_ids": [9] * 5}, long)
        for _ in range(num_steps + READS.max_tokens):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(["aborted"])
        for _ in range(50):
            core.step()
        assert not core.has_work() and core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
    end(llm)


def test_what_a_failed_step_has_said_is_heard_with_the_next_one(folder, tmp_path, monkeypatch):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, kv_connector="LateConnector"))
    run(llm)
    core, (_, worker) = llm.llm_engine.engine_core, sides(llm)
    get_finished = worker.get_finished

    def fails_as_it_has_sent(names: set[str]) -> tuple[set[str], set[str]]:
        sent, received = get_finished(names)
        worker.failed = {0} if sent else set()
        return sent, received

    monkeypatch.setattr(worker, "get_finished", fails_as_it_has_sent)
    with pytest.raises(RuntimeError, match=r"could not load the blocks \[0\]"):
        run(llm, [9] * 5, params=SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(50):
        core.step()
    assert not core.has_work() and core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
    end(llm)


class Failing:
    """Steps of an engine, one of which fails while the next one runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, core: Any, is_next: Any) -> None:
        """`is_next(step)`: whether the step, which has begun, is the one after that."""
        self.begin, self.is_next = core.executor.begin_step, is_next
        self.latest: Any = None
        monkeypatch.setattr(core.executor, "begin_step", self.begin_step)

    def begin_step(self, step: Any) -> Any:
        pending, before = self.begin(step), self.latest
        if self.is_next(step) and before is not None:
            before.result, self.is_next = self.fail, lambda _: False
        self.latest = SimpleNamespace(result=pending.result)
        return self.latest

    def fail(self) -> None:
        raise RuntimeError("a step failed")


def test_what_a_step_after_a_failed_one_has_said_is_heard(folder, tmp_path, monkeypatch):
    config = connector_config(tmp_path, kv_connector="LateConnector")
    llm = make_tiny_llm(folder, kv_transfer_config=config, async_scheduling=True)
    run(llm)
    core, (_, worker) = llm.llm_engine.engine_core, sides(llm)
    get_finished, sent = worker.get_finished, list[Any]()

    def finished(names: set[str]) -> Any:
        found = get_finished(names)
        sent.append(found[0])
        return found

    monkeypatch.setattr(worker, "get_finished", finished)
    Failing(monkeypatch, core, lambda step: bool(sent and sent[-1]))
    with pytest.raises(RuntimeError, match="a step failed"):
        run(llm, [9] * 5, params=SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(50):
        core.step()
    assert not core.has_work() and core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_blocks
    end(llm)


def test_an_end_is_told_where_the_step_that_told_an_earlier_ones_failed(folder, tmp_path, monkeypatch):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path), async_scheduling=True)
    engine, (scheduler, _) = llm.llm_engine, sides(llm)
    begun = list[str]()

    def is_again(step: Any) -> bool:
        begun.extend(new.req_id for new in step.scheduled_new_reqs)
        return bool(step.scheduled_new_reqs) and begun.count("same") == 2

    Failing(monkeypatch, engine.engine_core, is_again)
    engine.add_request("other", {"prompt_token_ids": [9] * 5}, SamplingParams(max_tokens=60, ignore_eos=True))
    engine.add_request("same", {"prompt_token_ids": PROMPT}, READS)
    while not any(output.finished for output in engine.step()):
        pass
    engine.add_request("same", {"prompt_token_ids": PROMPT[1:]}, READS)
    with pytest.raises(RuntimeError, match="a step failed"):
        for _ in range(9):
            engine.step()
    assert [call[1] for call in scheduler.calls if call[0] == "finished"].count("same") == begun.count("same") == 2
    end(llm)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_request_that_has_come_does_not_wait_for_others_blocks(folder, tmp_path, monkeypatch, num_stages):
    monkeypatch.setattr("file_connector.LateConnector.NUM_STEPS", 99)
    config = connector_config(tmp_path, kv_connector="LateConnector")
    llm = make_staged_llm(folder, num_stages, dtype="float32", max_model_len=128, kv_transfer_config=config)
    run(llm)
    core, waits = llm.llm_engine.engine_core, list[float]()
    monkeypatch.setattr(core.scheduler, "rest", waits.append)
    core.step()
    core.step()
    assert 0 < waits[-2] < waits[-1] and core.scheduler.is_transferring
    llm.llm_engine.add_request("one", {"prompt_token_ids": [9] * 5}, READS)
    waits.clear()
    while core.scheduler.requests:
        core.step()
    assert core.scheduler.is_transferring and not any(waits)
    end(llm)


def test_a_name_that_is_used_again_waits_for_the_earlier_one(folder, tmp_path):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, kv_connector="LateConnector"))
    expected, engine = readings(run(llm, PROMPT[1:])), llm.llm_engine
    core, (scheduler, worker) = engine.engine_core, sides(llm)

    def steps() -> list[Any]:
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        return outputs

    # While the first one is sent.
    engine.add_request("same", {"prompt_token_ids": PROMPT}, READS)
    steps()
    engine.add_request("same", {"prompt_token_ids": PROMPT[1:]}, READS)
    scheduler.calls.clear()
    assert readings(steps()) == expected
    calls = [call for call in scheduler.calls if call[0] == "match" or call[:2] == ("output", {"same"})]
    assert [call[0] for call in calls] == ["output", "match", "match"]
    # While the first one is loaded for, and where the worker's side has not heard of its end.
    for runs in (False, True):
        while core.has_work():
            core.step()
        assert llm.reset_prefix_cache()
        engine.add_request("same", {"prompt_token_ids": [9] * 40 if runs else PROMPT}, READS)
        engine.step()
        engine.abort_request(["same"])
        engine.add_request("same", {"prompt_token_ids": PROMPT[1:]}, READS)
        worker.calls.clear()
        assert readings(steps()) == expected
        assert ("get_finished", {"same"}) in worker.calls
    while core.has_work():
        core.step()
    assert is_empty(llm)
    end(llm)


def test_a_connector_that_raises_leaves_no_request(folder, tmp_path):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, extra={"answers": {"raises": True}}))
    with pytest.raises(KeyError, match="remote_host"):
        run(llm)
    assert not llm.llm_engine.engine_core.has_unfinished_requests()
    assert readings(run(llm)) == readings(run(make_tiny_llm(folder)))
    end(llm)


def test_blocks_of_earlier_weights_are_not_used_while_a_connector_keeps_some(folder, tmp_path, monkeypatch):
    llm = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, kv_connector="LateConnector"))
    run(llm)
    size = llm.llm_engine.vllm_config.model_config.hf_config.hidden_size
    llm.collective_rpc("load_weights", args=([("model.layers.0.input_layernorm.weight", torch.zeros(size))],))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="still loads or sends the blocks"):
        patch.setattr("vllm.v1.features.kv_connector.scheduler._END_SECONDS", -1.0)
        run(llm)
    assert [output.num_cached_tokens for output in run(llm)] == [0]
    end(llm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_connector": "Missing"}, "has no class 'Missing'"),
        ({"kv_connector": "NotOne"}, "has no KVConnectorBase_V1 'NotOne'"),
        ({"kv_connector": "Unfinished"}, "lacks build_connector_meta, get_num_new_matched_tokens"),
        ({"kv_connector": None}, "kv_connector is not given"),
        ({"kv_connector_module_path": "no_such_module"}, "module 'no_such_module' cannot be imported"),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": None}, "'NixlConnector' is not registered"),
        ({"kv_role": "kv_reader"}, "kv_role must be one of kv_producer, kv_both, kv_consumer"),
        ({"kv_role": None}, "kv_connector needs kv_role"),
        ({"kv_rank": 1}, "kv_transfer_config has no field 'kv_rank'"),
        ({"enable_permute_local_kv": True}, "enable_permute_local_kv=True is not done"),
    ],
)
def test_configurations_that_are_refused(folder, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path, **fields))


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching=True"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=False"),
        ({"kv_store": "store"}, "no kv_store"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "backend='mp' or 'ray'"),
    ],
)
def test_options_that_connectors_do_not_go_with(folder, tmp_path, fields, option):
    with pytest.raises(ValueError, match=f"kv_transfer_config needs .*{option}"):
        EngineArgs(str(folder), kv_transfer_config=connector_config(tmp_path), **fields).create_engine_config()


def test_models_with_states_are_refused(tmp_path):
    make_architecture("mamba", tmp_path)
    with pytest.raises(ValueError, match="kv_transfer_config: the model has recurrent states"):
        LLM(str(tmp_path), kv_transfer_config=connector_config(tmp_path / "blocks"), skip_tokenizer_init=True)


def test_the_flag_takes_json(folder, tmp_path):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = ["--model", str(folder), "--kv-transfer-config", json.dumps(connector_config(tmp_path))]
    config = EngineArgs.from_cli_args(parser.parse_args(given)).create_engine_config().kv_transfer_config
    assert config is not None and config.kv_connector == "FileConnector" and config.is_kv_producer
    assert config.get_from_extra_config("folder", None) == str(tmp_path)


def test_after_new_weights_nothing_is_loaded_or_saved(folder, tmp_path):
    first = make_tiny_llm(folder, kv_transfer_config=connector_config(tmp_path))
    run(first)
    engine = first.llm_engine
    engine.add_request("same", {"prompt_token_ids": PROMPT}, READS)
    while engine.has_unfinished_requests():
        engine.step()
    size = first.llm_engine.vllm_config.model_config.hf_config.hidden_size
    first.collective_rpc("load_weights", args=([("model.layers.0.input_layernorm.weight", torch.zeros(size))],))
    run(first, [9] * 8)
    connectors = sides(first)
    num_calls = [len(each.calls) for each in connectors]
    outputs = run(first)
    assert [output.num_cached_tokens for output in outputs] == [0]
    assert [len(each.calls) for each in connectors] == num_calls
    # The connector was not told of this name's end, and is not any more.
    engine.add_request("same", {"prompt_token_ids": PROMPT}, READS)
    for _ in range(READS.max_tokens):
        engine.step()
    assert not engine.has_unfinished_requests()
    end(first)


def test_a_registered_name(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    KVConnectorFactory.register_connector("Files", "file_connector", "FileConnector")
    with pytest.raises(ValueError, match="there is a connector 'Files' already"):
        KVConnectorFactory.register_connector("Files", "file_connector", "FileConnector")
    config = connector_config(tmp_path, kv_connector="Files", kv_connector_module_path=None, engine_id="one")
    llm = make_tiny_llm(folder, kv_transfer_config=config)
    scheduler, _ = sides(llm)
    assert isinstance(scheduler, KVConnectorBase_V1) and type(scheduler).__name__ == "FileConnector"
    assert llm.llm_engine.vllm_config.kv_transfer_config.engine_id == "one"
    end(llm)
