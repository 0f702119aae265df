"""Calls of LLM beside generating, by upstream's names and arguments."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from models_util import random_prompts
from safetensors.torch import load_file
from tiny_llm import make_tiny_llm, make_tiny_model
from transformers import AutoTokenizer

from vllm import LLM, EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


class Extension:
    """Methods for workers."""

    def rank_and(self, value):
        return self.rank, value, type(self.get_model()).__name__


class Hiding:
    """A method that workers have themselves."""

    def execute_model(self):
        raise AssertionError


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder, worker_extension_cls=Extension)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_arguments_at_their_neutral_values(llm):
    plain = tokens(llm.generate(["ab", "cd"], GREEDY))
    assert plain == tokens(
        llm.generate(
            [{"prompt": "ab", "multi_modal_data": {}}, {"prompt": "cd", "mm_processor_kwargs": None}],
            [GREEDY, GREEDY],
            use_tqdm=False,
            lora_request=[None, None],
            priority=0,
            tokenization_kwargs={},
            mm_processor_kwargs={},
        )
    )
    ids = [llm.get_tokenizer().encode(text) for text in ("ab", "cd")]
    assert tokens(llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)) == plain
    assert tokens(llm.generate(None, GREEDY, prompt_token_ids=ids)) == plain


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"lora_request": LoRARequest("a", 1, "b")}, "lora_request: LoRA adapters are not enabled"),
        ({"lora_request": [None, LoRARequest("a", 1, "b")]}, "lora_request: LoRA adapters are not enabled"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs is not supported"),
        ({"tokenization_kwargs": {"max_length": 3}}, "truncate_prompt_tokens"),
        ({"prompt_token_ids": [1]}, "two ways"),
    ],
)
def test_arguments_that_ask_for_more(llm, arguments, problem):
    with pytest.raises(VLLMValidationError, match=problem):
        llm.generate(["ab", "cd"], GREEDY, **arguments)


def test_tokenization_without_special_tokens(llm):
    (output,) = llm.generate("ab", GREEDY, tokenization_kwargs={"add_special_tokens": False})
    assert output.prompt_token_ids == llm.get_tokenizer().encode("ab", add_special_tokens=False)


def test_what_was_enqueued_comes_in_order(llm):
    first = llm.enqueue(["ab", "cd"], GREEDY)
    second = llm.enqueue("ef", SamplingParams(max_tokens=1, temperature=0))
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert tokens(outputs)[:2] == tokens(llm.generate(["ab", "cd"], GREEDY))
    assert llm.wait_for_completion() == []


def test_conversations_are_enqueued_as_chat_writes_them(llm):
    conversations = [[{"role": "user", "content": each}] for each in ("ab", "cde")]
    template = {"chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    first = llm.enqueue_chat(conversations, GREEDY, **template)
    second = llm.enqueue_chat(conversations[0], GREEDY, **template, tokenization_kwargs={"truncate_prompt_tokens": 2})
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    wanted = llm.chat(conversations, GREEDY, use_tqdm=False, **template)
    assert [output.prompt_token_ids for output in outputs[:2]] == [output.prompt_token_ids for output in wanted]
    assert tokens(outputs[:2]) == tokens(wanted)
    assert outputs[2].prompt_token_ids == wanted[0].prompt_token_ids[-2:]


def test_sampling_defaults_are_the_models(folder, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 4}')
    llm = make_tiny_llm(folder, generation_config=str(tmp_path))
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.0, 4)
    explicit = SamplingParams(temperature=0, max_tokens=4)
    assert tokens(llm.generate(["ab", "cd"])) == tokens(llm.generate(["ab", "cd"], explicit))


def test_queued_requests_know_the_models_stop_tokens(llm):
    process = llm.llm_engine.input_processor.process_params
    assert process(SamplingParams(stop_token_ids=[5]), 3).all_stop_token_ids == {2, 5}
    assert process(SamplingParams(ignore_eos=True), 3).all_stop_token_ids == set()


def test_calls_of_workers(llm):
    assert llm.collective_rpc("rank_and", args=(3,)) == [(0, 3, "LlamaForCausalLM")]
    assert llm.collective_rpc("rank_and", 5.0, (), {"value": 4}) == [(0, 4, "LlamaForCausalLM")]
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    assert llm.get_world_size() == 1
    # As upstream's documents reach for the model.
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    assert executor.driver_worker.worker.get_model() is executor.driver_worker.worker.model_runner.model


def test_the_weight_of_an_embedding_whose_copy_the_head_has_packed(tmp_path):
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    llm = make_tiny_llm(folder)
    weight, parameters = llm.apply_model(
        lambda model: (model.model.embed_tokens.weight, dict(model.named_parameters()))
    )[0]
    assert "model.embed_tokens.weight" not in parameters
    assert torch.equal(weight, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_attributes_that_upstreams_callers_read(llm, folder):
    assert llm.input_processor is llm.llm_engine.input_processor and llm.runner_type == "generate"
    assert isinstance(llm.llm_engine, llm.engine_class) and llm.default_sampling_params == {}
    config = llm.llm_engine.vllm_config
    assert config.num_speculative_tokens == 0 and not config.model_config.is_quantized
    assert (config.model_config.generation_config, config.model_config.override_generation_config) == ("auto", None)
    own = EngineArgs(str(folder), generation_config="vllm", override_generation_config={"top_p": 0.5})
    config = own.create_engine_config().model_config
    assert (config.generation_config, config.override_generation_config) == ("vllm", {"top_p": 0.5})


def test_an_engine_has_what_the_llm_has(llm):
    engine = llm.llm_engine
    assert engine.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    with pytest.raises(ValueError, match="disable_log_stats=False"):
        llm.get_metrics()
    assert engine.do_log_stats() is None
    engine.abort_request(["unknown"], internal=True)
    with pytest.raises(VLLMValidationError, match="enable_lora=True"):
        engine.add_lora(LoRARequest("mine", 1, "/adapter"))


@pytest.mark.parametrize(
    ("extension", "problem"),
    [("no.such.module.Class", "worker_extension_cls"), ("text", "worker_extension_cls"), (Hiding, "execute_model")],
)
def test_bad_extensions(folder, extension, problem):
    with pytest.raises(ValueError, match=problem):
        make_tiny_llm(folder, worker_extension_cls=extension)


def test_a_profile_is_a_trace_file_and_metrics_are_kept(folder, tmp_path):
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    llm = make_tiny_llm(folder, profiler_config=profiler, disable_log_stats=False)
    llm.start_profile("mine")
    llm.generate("ab", GREEDY)
    llm.stop_profile()
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("mine-rank0")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]

    output = llm.generate(["ab", "cde"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics() if "finished_reason" not in metric.labels}
    num_prompt_tokens = sum(len(each.prompt_token_ids) for each in output)
    generated, prompts = metrics["vllm:generation_tokens"], metrics["vllm:request_prompt_tokens"]
    assert generated.value == GREEDY.max_tokens + 6 and prompts.count == 3
    assert prompts.sum == num_prompt_tokens + 2 and metrics["vllm:num_requests_running"].value == 0
    assert generated.labels == {"model_name": str(folder), "engine": "0"}
    assert metrics["vllm:cache_config_info"].labels["block_size"] == "16"
    # As programs free an engine.
    del llm.llm_engine.model_executor.driver_worker


def test_a_profile_needs_a_folder(llm, monkeypatch):
    monkeypatch.delenv("VLLM_TORCH_PROFILER_DIR", raising=False)
    with pytest.raises(ValueError, match="torch_profiler_dir"):
        llm.start_profile()
    with pytest.raises(VLLMValidationError, match="max_iterations"):
        llm.start_profile(max_iterations=3)


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "reward"])
def test_pooling_is_refused(llm, method):
    with pytest.raises(VLLMValidationError, match="reward models|not served as a pooling model: .*score_labels"):
        getattr(llm, method)("ab")


def test_from_engine_args(folder, llm):
    other = LLM.from_engine_args(EngineArgs(model=str(folder), dtype="float32", max_model_len=128))
    assert tokens(other.generate("ab", GREEDY)) == tokens(llm.generate("ab", GREEDY))


def test_a_request_may_leave_the_prefix_cache_alone(folder):
    llm = make_tiny_llm(folder)
    (prompt,) = random_prompts(200, (60,))
    again = SamplingParams(max_tokens=1, temperature=0)
    leaving = SamplingParams(max_tokens=1, temperature=0, skip_reading_prefix_cache=True)
    cached = [llm.generate(prompt, params)[0].num_cached_tokens for params in (again, again, leaving, again)]
    assert cached[0] == cached[2] == 0
    assert min(cached[1], cached[3]) >= 48


def test_reset_of_running_requests(folder):
    llm = make_tiny_llm(folder)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    wanted = tokens(llm.generate("abc", params))
    llm.llm_engine.add_request("a", "abc", params)
    for _ in range(4):
        llm.llm_engine.step()
    assert not llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
    assert tokens(outputs) == wanted


_TORCHRUN = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, tensor_parallel_size=2,
          distributed_executor_backend="external_launcher")
params = SamplingParams(max_tokens=8, temperature=0.7, ignore_eos=True, logprob_token_ids=[3])
print([output.outputs[0].token_ids for output in llm.generate(["abc", "de"], params, use_tqdm=False)])
"""


def test_torchruns_processes_make_one_engine(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_TORCHRUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "--local-addr=127.0.0.1", str(script), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"\[\[.*?\]\]", done.stdout)  # of two processes, whose line ends may come late
    alone = make_tiny_llm(folder)
    params = SamplingParams(max_tokens=8, temperature=0.7, ignore_eos=True, logprob_token_ids=[3])
    wanted = str(tokens(alone.generate(["abc", "de"], params)))
    assert lines == [wanted, wanted]


def test_an_external_launcher_must_be_there(folder, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun"):
        make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    # One process alone needs nobody to meet.
    make_tiny_llm(folder, distributed_executor_backend="external_launcher")


def test_what_the_model_can_be_asked_for(llm, folder):
    assert llm.supported_tasks == llm.llm_engine.get_supported_tasks() == ("generate",)
    config = EngineArgs(str(folder), runner="pooling", convert="embed").create_model_config()
    assert config.supported_tasks == config.pooling_tasks == ("embed", "token_embed")


def test_the_models_configuration_by_itself(llm, folder):
    assert llm.llm_engine.get_model_config() is llm.model_config
    args = EngineArgs(str(folder), max_model_len=48)
    assert args.create_model_config() == args.create_engine_config().model_config
    with pytest.raises(ValueError, match="max_model_len"):
        EngineArgs(str(folder), max_model_len=0).create_model_config()


def test_another_tokenizer(folder):
    llm = make_tiny_llm(folder)
    plain = llm.generate(["ab"], GREEDY, use_tqdm=False)[0]
    other = copy.deepcopy(llm.get_tokenizer())
    other.add_tokens("ab")
    llm.set_tokenizer(other)
    assert llm.get_tokenizer() is other
    assert llm.llm_engine.input_processor.process_prompts(["ab"], [GREEDY])[0].token_ids == [
        other.convert_tokens_to_ids("ab")
    ]
    llm.set_tokenizer(AutoTokenizer.from_pretrained(folder))
    again = llm.generate(["ab"], GREEDY, use_tqdm=False)[0]
    assert (again.prompt_token_ids, again.outputs[0].text) == (plain.prompt_token_ids, plain.outputs[0].text)
