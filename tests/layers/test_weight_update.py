"""New weights for an engine that serves: results are those of an engine that was started with them, bit for bit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from layouts import needs_kernels
from models_util import ARCHITECTURES, make_random_model, random_prompts
from safetensors.torch import load_file, save_file

from vllm import LLM, SamplingParams

PROMPTS = random_prompts(199, (5, 40, 18))
PARAMS = SamplingParams(
    max_tokens=6, temperature=0, ignore_eos=True, detokenize=False, logprob_token_ids=[3, 7], prompt_logprobs=1
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request, tmp_path_factory):
    """A model, and one like it with other weights."""
    folders = []
    for name in ("first", "second"):
        made, _ = make_random_model(request.param, "small", tmp_path_factory.mktemp(name))
        folders.append(made)
    path = folders[1] / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: (tensor + 0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return folders[0], folders[1], weights


def make_llm(folder, **fields):
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=128, enable_sleep_mode=True, **fields)


def readings(llm):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [
        (own.token_ids, own.logprobs.logits.copy(), own.logprobs.lse.copy(), output.prompt_logprobs.logprobs.copy())
        for output in outputs
        for own in output.outputs
    ]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for mine, yours in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, yours)


def model_of(llm):
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


FIELDS = [
    {"dtype": "float32"},
    pytest.param({"dtype": "bfloat16"}, marks=needs_kernels),
    pytest.param({"dtype": "float16"}, marks=needs_kernels),
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=needs_kernels),
    {"dtype": "float32", "enforce_eager": True},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_one_tensor_a_call(models, fields):
    first, second, weights = models
    llm, wanted = make_llm(first, **fields), readings(make_llm(second, **fields))
    before = readings(llm)
    for name in reversed(weights):
        assert model_of(llm).load_weights([(name, torch.nn.Parameter(weights[name]))]) == {name}
    # No reset_prefix_cache: what the old weights computed must not be found.
    assert_same(readings(llm), wanted)
    llm.collective_rpc("reload_weights")
    assert_same(readings(llm), before)
    llm.collective_rpc("update_weights", args=(list(weights.items()),))
    assert_same(readings(llm), wanted)


def test_requests_in_between_begin_anew(models):
    first, second, weights = models
    llm, reference = make_llm(first), make_llm(second)
    prompt = {"prompt_token_ids": PROMPTS[1]}
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("a", prompt, params)
    for _ in range(5):
        (output,) = llm.llm_engine.step()
    begun = output.outputs[0].token_ids[:]
    model_of(llm).load_weights(weights.items())
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens = output.outputs[0].token_ids
    rest = {"prompt_token_ids": PROMPTS[1] + begun}
    params = SamplingParams(max_tokens=20 - len(begun), temperature=0, ignore_eos=True, detokenize=False)
    assert tokens[: len(begun)] == begun
    assert tokens[len(begun) :] == reference.generate(rest, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_parts_of_stacked_layers_change_alone(models, tmp_path, fields):
    """Query without key and value, gate without up: what was not given stays as it is, to the bit."""
    first, _, weights = models
    given = {name: weights[name] for name in weights if name.endswith(("q_proj.weight", "gate_proj.weight"))}
    mixed = tmp_path / "mixed"
    shutil.copytree(first, mixed)
    save_file({**load_file(first / "model.safetensors"), **given}, mixed / "model.safetensors")
    llm = make_llm(first, **fields)
    if "quantization" in fields:
        model_of(llm).load_weights(given.items())
        with pytest.raises(ValueError, match="these make one layer"):
            readings(llm)
        return
    before = readings(llm)
    assert model_of(llm).load_weights(given.items()) == set(given)
    assert_same(readings(llm), readings(make_llm(mixed, **fields)))
    original = load_file(first / "model.safetensors")
    model_of(llm).load_weights((name, original[name]) for name in given)
    assert_same(readings(llm), before)


def test_a_quantised_stacked_layer_changes_as_a_whole(models):
    first, _, weights = models
    llm = make_llm(first, dtype="bfloat16", quantization="int8")
    before = readings(llm)
    original = load_file(first / "model.safetensors")
    query = next(name for name in weights if name.endswith("q_proj.weight"))
    model_of(llm).load_weights([(query, weights[query])])
    with pytest.raises(ValueError, match=r"q_proj.weight without .*k_proj"):
        readings(llm)
    layer = query.removesuffix("q_proj.weight")
    same = {name: tensor for name, tensor in original.items() if name.startswith(layer) and "_proj" in name}
    model_of(llm).load_weights(same.items())
    assert_same(readings(llm), before)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(models, level):
    first, second, weights = models
    llm, wanted = make_llm(first), readings(make_llm(second))
    before = readings(llm)
    llm.sleep(level)
    assert llm.is_sleeping()
    with pytest.raises(RuntimeError, match="wake_up"):
        readings(llm)
    if level == 2:
        with pytest.raises(ValueError, match="weights, which sleep.* must come before"):
            llm.wake_up(tags=["kv_cache"])
        with pytest.raises(RuntimeError, match="wake_up"):
            llm.collective_rpc("update_weights", args=(list(weights.items()),))
    assert not llm.wake_up(tags=["weights"])
    model_of(llm).load_weights(weights.items())
    assert llm.wake_up(tags=["kv_cache"])
    assert_same(readings(llm), wanted)
    llm.collective_rpc("reload_weights")
    llm.sleep(level)
    assert llm.wake_up()
    assert_same(readings(llm), before)


def test_a_deeper_sleep_after_a_light_one(models):
    first, _, weights = models
    llm = make_llm(first)
    before = readings(llm)
    llm.sleep(1)
    llm.sleep(1)
    llm.sleep(2)
    for method, args in (("update_weights", (list(weights.items()),)), (lambda worker: worker.model_runner.model, ())):
        with pytest.raises(RuntimeError, match="the weights were freed"):
            llm.collective_rpc(method, args=args)
    llm.sleep(1)  # nothing is left to keep
    assert not llm.wake_up(tags=["weights"])
    llm.sleep(2)
    assert llm.is_sleeping() and llm.wake_up()
    assert_same(readings(llm), before)


def test_bad_calls(models):
    llm = make_llm(models[0])
    with pytest.raises(ValueError, match="no weight nothing"):
        model_of(llm).load_weights([("nothing", torch.zeros(1))])
    name, tensor = next(iter(models[2].items()))
    with pytest.raises(ValueError, match=rf"{name} must have shape"):
        model_of(llm).load_weights([(name, tensor[..., :-1])])
    for call, problem in (
        (lambda: llm.sleep(3), "level"),
        (lambda: llm.sleep(mode="now"), "mode must be one of"),
        (lambda: llm.wake_up(["everything"]), "tags must be of"),
    ):
        with pytest.raises(ValueError, match=problem):
            call()


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def tied(request, tmp_path_factory):
    """An engine of a model whose head is its embedding, and the embedding's name and weight."""
    folder, _ = make_random_model("llama", "small", tmp_path_factory.mktemp("tied"))
    llm = make_llm(folder, model_impl=request.param)
    return llm, folder, load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def test_a_tied_head_is_its_embedding(tied):
    """One that differs would have no effect."""
    llm, _, embedding = tied
    other = embedding.flip(0).contiguous()
    own = ("model.embed_tokens.weight", embedding)
    before = readings(llm)
    with pytest.raises(ValueError, match="lm_head.weight differs from .*embed_tokens.weight, but the model ties them"):
        model_of(llm).load_weights([own, ("lm_head.weight", other)])
    with pytest.raises(ValueError, match="lm_head.weight differs from .*embed_tokens.weight, but the model ties them"):
        llm.collective_rpc("load_weights", args=([("lm_head.weight", other), own],))
    assert_same(readings(llm), before)
    model_of(llm).load_weights([own, ("lm_head.weight", embedding)])
    model_of(llm).load_weights([("lm_head.weight", embedding.clone())])
    assert_same(readings(llm), before)
    model_of(llm).load_weights([("lm_head.weight", other), ("model.embed_tokens.weight", other)])
    assert not np.array_equal(readings(llm)[0][1], before[0][1])


def test_a_tied_head_alone_or_in_a_checkpoint(tied):
    llm, folder, embedding = tied
    if llm.llm_engine.vllm_config.model_config.model_impl == "transformers":
        pytest.skip("transformers takes either name for the one weight")
    model_of(llm).load_weights([("model.embed_tokens.weight", embedding)])
    with pytest.raises(ValueError, match="send model.embed_tokens.weight with it or before it, or start with hf_over"):
        model_of(llm).load_weights([("lm_head.weight", embedding + 1)])
    # In a file the head comes before the embedding.
    kept = load_file(folder / "model.safetensors")
    changed = {**kept, "model.embed_tokens.weight": embedding * 0.5, "lm_head.weight": embedding * 0.5}
    save_file(changed, folder / "model.safetensors")
    llm.collective_rpc("reload_weights")
    after = readings(llm)
    save_file(kept, folder / "model.safetensors")
    llm.collective_rpc("reload_weights")
    assert not np.array_equal(readings(llm)[0][1], after[0][1])


@pytest.mark.parametrize("fields", [{}, {"model_impl": "transformers"}, {"quantization": "int8"}])
def test_a_model_that_was_kept(models, fields):
    """Weights given to a kept `model_runner.model` reach the model that lives."""
    first, second, weights = models
    llm, expected = make_llm(first, **fields), readings(make_llm(second, **fields))
    kept, runner = model_of(llm), llm.llm_engine.model_executor.driver_worker.model_runner
    llm.sleep(level=2)
    assert not list(kept.parameters())
    for model in (kept, runner.model):
        with pytest.raises(RuntimeError, match=r"were freed by sleep\(level=2\): call wake_up"):
            model.load_weights(weights.items())
    llm.wake_up()
    kept.load_weights(weights.items())
    assert_same(readings(llm), expected)
    llm.sleep(level=2)
    llm.wake_up()
    runner.model.load_weights(weights.items())
    assert_same(readings(llm), expected)


def test_over_two_ranks(models, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second, weights = models
    alone = readings(make_llm(second, dtype="float32"))
    llm = make_llm(first, dtype="float32", tensor_parallel_size=2)
    try:
        llm.collective_rpc("update_weights", args=([(name, tensor.clone()) for name, tensor in weights.items()],))
        for one, other in zip(readings(llm), alone, strict=True):
            assert one[0] == other[0]
            # Sums in another order.
            np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-4)
        llm.sleep(2)
        llm.wake_up()
        llm.collective_rpc("update_weights", args=([(name, tensor.clone()) for name, tensor in weights.items()],))
        assert [each[0] for each in readings(llm)] == [each[0] for each in alone]
    finally:
        llm.llm_engine.engine_core.shutdown()
