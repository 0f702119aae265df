"""Weights that change in parts or at once, while requests run or wait, and the version that each output is of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llm import make_tiny_llm, make_tiny_model
from torch import Tensor

from vllm import LLM, AsyncEngineArgs, AsyncLLM, RequestOutput, SamplingParams

PROMPT = {"prompt_token_ids": list(range(5, 45))}
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False, logprobs=0)
WRONG = ("model.norm.weight", torch.zeros(3))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("old"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("new"), max_position_embeddings=1024)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def llm(old: Path) -> LLM:
    return make_tiny_llm(old, enable_prefix_caching=True)


def weights_of(folder: Path) -> list[tuple[str, Tensor]]:
    return list(load_file(folder / "model.safetensors").items())


def read(llm: LLM) -> tuple[list[int], Any, list[Any]]:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    (completion,) = output.outputs
    return list(completion.token_ids), completion.cumulative_logprob, completion.weight_versions


def test_outputs_say_how_often_weights_changed(llm: LLM, old: Path, new: Path) -> None:
    first = read(llm)
    assert first[2] == [0] == [llm.get_weight_version()]
    for name, tensor in weights_of(new):  # tensor by tensor: one change for those who read
        llm.update_weights({"update_info": {"weights": [(name, tensor)]}})
    assert llm.get_weight_version() == 1
    assert read(llm) == (*read(make_tiny_llm(new))[:2], [1])
    llm.update_weights({"update_info": {"path": str(old / "model.safetensors")}})
    assert read(llm) == (*first[:2], [2])


def test_buckets_change_weights_at_once_and_name_them(llm: LLM, new: Path) -> None:
    before, buckets = read(llm), weights_of(new)
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    half = len(buckets) // 2
    for bucket in (buckets[:half], buckets[half:]):
        llm.update_weights({"update_info": {"weights": bucket}})
        for _, tensor in bucket:
            tensor.zero_()  # the trainer uses its memory again
        assert read(llm) == before
    llm.finish_weight_update("step-7")
    assert read(llm) == (*read(make_tiny_llm(new))[:2], ["step-7"])
    llm.start_weight_update()
    llm.finish_weight_update()  # without weights only the name goes
    assert read(llm)[2] == [1]


def test_a_bucket_that_does_not_fit_changes_nothing(llm: LLM, new: Path) -> None:
    before = read(llm)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": weights_of(new)}})
    llm.update_weights({"update_info": {"weights": [WRONG]}})
    with pytest.raises(ValueError, match=r"model.norm.weight must have shape"):
        llm.finish_weight_update("step-8")
    assert read(llm) == before
    llm.update_weights({"update_info": {"weights": weights_of(new)}})  # the failed update is over
    assert read(llm)[2] == [1]


def test_tokens_of_both_weights_name_both(llm: LLM, new: Path) -> None:
    engine, outputs = llm.llm_engine, []
    engine.add_request("a", PROMPT, PARAMS)
    for step in range(100):
        if step == 6:
            llm.update_weights({"update_info": {"weights": weights_of(new)}})
        outputs += engine.step()
        if not engine.has_unfinished_requests():
            break
    assert outputs[-1].outputs[0].weight_versions == [0, 1]
    assert all(output.outputs[0].weight_versions in ([0], [0, 1]) for output in outputs)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"update_info": {"shapes": [], "path": "x"}}, "must have one entry: path.*got shapes, path"),
        ({"update_info": {"names": [], "dtype_names": [], "shapes": []}}, "no trainer was met"),
        ({}, "must have one entry"),
        ({"update_info": {"path": "/nowhere/w.safetensors"}}, "/nowhere/w.safetensors is not a safetensors file"),
    ],
)
def test_updates_that_say_nothing_are_refused(llm: LLM, request_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.update_weights(request_)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(loop: asyncio.AbstractEventLoop, old: Path) -> Iterator[AsyncLLM]:
    args = AsyncEngineArgs(str(old), dtype="float32", max_model_len=1024, max_num_seqs=4)
    engine = AsyncLLM.from_engine_args(args)
    yield engine

    async def end() -> None:
        engine.shutdown()
        await asyncio.sleep(0)  # what it cancelled ends

    loop.run_until_complete(end())


LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_weights_change_while_requests_are_paused(
    engine: AsyncLLM, loop: asyncio.AbstractEventLoop, old: Path, new: Path, mode: str
) -> None:
    async def last(request_id: str) -> RequestOutput:
        outputs = []
        async for output in engine.generate(PROMPT, LONG, request_id):
            outputs.append(output)
            begun.set()
        return outputs[-1]

    async def run() -> tuple[RequestOutput, RequestOutput, int, int]:
        before = await engine.get_weight_version()
        running = asyncio.create_task(last(f"running-{mode}"))
        await begun.wait()
        # As OpenRLHF asks for it.
        assert engine.output_processor.get_num_unfinished_requests() == 1
        await engine.pause_generation(mode=mode)
        await engine.start_weight_update()
        await engine.update_weights({"update_info": {"path": str(new / "model.safetensors")}})
        await engine.finish_weight_update()
        waiting = asyncio.create_task(last(f"waiting-{mode}"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.resume_generation()
        outputs = await asyncio.gather(running, waiting)
        after = await engine.get_weight_version()
        await engine.update_weights({"update_info": {"path": str(old / "model.safetensors")}})
        return *outputs, before, after

    begun = asyncio.Event()
    running, waiting, before, after = loop.run_until_complete(run())
    assert after == before + 1
    assert waiting.outputs[0].weight_versions == [after]
    if mode == "abort":
        # The output so far comes back, as verl needs it.
        assert running.finished and running.outputs[0].finish_reason == "abort"
        assert 0 < len(running.outputs[0].token_ids) < 900
        assert running.outputs[0].weight_versions == [before]
        return
    assert len(running.outputs[0].token_ids) == 900
    assert running.outputs[0].weight_versions == ([before] if mode == "wait" else [before, after])
