"""LLM.generate as its callers know it: prompts, parameters, order, errors, interruptions, what it prints."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from byte_tokenizer import EOS, byte_ids
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.entrypoints.interrupts import InterruptsBetweenSteps
from vllm.exceptions import VLLMValidationError
from vllm.tool_parsers import ToolParserManager

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder)


def ids_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_calls_of_several_threads_take_turns(llm):
    prompts = [["a" * length] * length for length in range(1, 7)]
    alone = [ids_of(llm.generate(each, GREEDY, use_tqdm=False)) for each in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda each: ids_of(llm.generate(each, GREEDY, use_tqdm=False)), prompts))
    assert together == alone and is_empty(llm)


@pytest.mark.parametrize(
    "call",
    [LLM.sleep, LLM.reset_prefix_cache, lambda llm: llm.collective_rpc("determine_num_host_blocks")],
    ids=["sleep", "reset_prefix_cache", "collective_rpc"],
)
def test_a_call_upon_the_engine_waits_for_a_generation(llm, monkeypatch, call):
    expected = ids_of(llm.generate(["abc"], GREEDY, use_tqdm=False))
    thread = threading.Thread(target=call, args=(llm,))
    step, waited = llm.llm_engine.step, []

    def with_another_thread():
        if not waited:
            thread.start()
            thread.join(0.3)
            waited.append(thread.is_alive())
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", with_another_thread)
    assert ids_of(llm.generate(["abc"], GREEDY, use_tqdm=False)) == expected and waited == [True]
    thread.join()
    llm.wake_up()


def test_what_was_enqueued_outlasts_another_call(llm):
    llm.enqueue(["a", "b"], GREEDY)
    expected = ids_of(llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False))[:2]
    assert ids_of(llm.wait_for_completion(use_tqdm=False)) == expected and is_empty(llm)


class TestPrompts:
    def test_every_kind_in_one_call(self, llm):
        ids = llm.llm_engine.tokenizer.encode("the cat")
        kinds = [
            "the cat", ids, tuple(ids), np.array(ids), torch.tensor(ids), {"prompt": "the cat"},
            TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids, "prompt": "shown"},
        ]  # fmt: skip
        outputs = llm.generate(kinds, GREEDY, use_tqdm=False)
        assert all(output.prompt_token_ids == ids for output in outputs)
        assert all(tokens == ids_of(outputs)[0] for tokens in ids_of(outputs))
        texts = ["the cat", None, None, None, None, "the cat", None, "shown"]
        assert [output.prompt for output in outputs] == texts

    @pytest.mark.parametrize("prompt", ["ab", {"prompt": "ab"}, byte_ids("ab"), np.array(byte_ids("ab"))])
    def test_one_prompt_needs_no_list(self, llm, prompt):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == byte_ids("ab")

    def test_one_prompt_of_numpy_integers(self, llm):
        (output,) = llm.generate(list(np.array(byte_ids("ab"))), GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == byte_ids("ab")
        assert all(type(token) is int for token in output.prompt_token_ids)

    def test_no_prompts(self, llm):
        assert llm.generate([], GREEDY, use_tqdm=False) == []
        assert llm.generate([], [], use_tqdm=False) == []

    def test_results_come_in_order_whenever_they_finish(self, llm):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 2, 7)]
        prompts = [byte_ids(letter) for letter in "abcde"]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert [len(tokens) for tokens in ids_of(outputs)] == [9, 1, 5, 2, 7]
        assert all(output.finished and output.metrics.finished_time is not None for output in outputs)
        numbers = [int(output.request_id) for output in outputs]
        assert numbers == sorted(numbers)


class TestErrors:
    @pytest.mark.parametrize(
        ("prompts", "params", "message"),
        [
            (["a", ""], None, r"prompts\[1\]: a decoder prompt cannot be empty.*parameter=prompt"),
            (["a", [5] * 128], None, r"128 tokens.*max_model_len=128.*parameter=prompt, value=128"),
            (["a", [9999]], None, r"prompt_token_ids must be in \[0, 268\).*9999"),
            (["a", {"prompt": "x", "multi_modal_data": {"image": 1}}], None, "multi_modal_data"),
            (["a", {"prompt": "x", "cache_salt": 3}], None, r"cache_salt must be a string, got int"),
            (["a", "b"], [GREEDY], "sampling_params has 1 entries for 2 prompts"),
            (["a", "b"], [], "sampling_params has 0 entries for 2 prompts"),
            (["a", "b"], [GREEDY, None], "sampling_params must be SamplingParams, got NoneType"),
            (["a", "b"], {"temperature": 0}, "sampling_params must be SamplingParams, got dict"),
            (["a", "b"], [GREEDY, SamplingParams(stop_token_ids=[9999])], r"stop_token_ids.*9999"),
            (["a", "b"], [GREEDY, SamplingParams(logit_bias={9999: 1})], r"logit_bias.*9999"),
            (["a", "b"], [GREEDY, SamplingParams(allowed_token_ids=[9999])], r"allowed_token_ids.*9999"),
            (["a", "b"], [GREEDY, SamplingParams(logprobs=300)], r"logprobs of 300.*max allowed: 268"),
            (5, None, "prompts must be a prompt or a list of prompts, got int"),
        ],
    )
    def test_a_bad_request_is_refused_before_anything_is_queued(self, llm, prompts, params, message):
        with pytest.raises(VLLMValidationError, match=message):
            llm.generate(prompts, params, use_tqdm=False)
        assert is_empty(llm)
        assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == 2

    @pytest.mark.parametrize("priority", [[1], ["1", "2"], [0, 1.5], [True, False], [0, 2**63]])
    def test_bad_priorities(self, llm, priority):
        with pytest.raises(VLLMValidationError, match="priority"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=priority)
        assert is_empty(llm)

    def test_priorities_without_the_priority_policy_are_one_warning(self, llm, caplog, monkeypatch):
        monkeypatch.setattr("vllm.logger._seen", set())
        plain = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        for _ in range(2):
            assert ids_of(llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[0, -1])) == ids_of(plain)
        (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert line == "priority changes nothing: it needs scheduling_policy='priority', and this engine's is 'fcfs'"

    def test_a_request_larger_than_the_cache_names_the_limit(self, folder):
        llm = make_tiny_llm(folder, num_gpu_blocks_override=2)
        with pytest.raises(VLLMValidationError, match=r"prompt 30, max_tokens 4.*cache holds 32") as caught:
            llm.generate([[5] * 3, [5] * 30], GREEDY, use_tqdm=False)
        assert caught.value.parameter == "max_tokens"
        assert is_empty(llm)
        assert len(ids_of(llm.generate([[5] * 29], GREEDY, use_tqdm=False))[0]) == 4

    def test_unknown_arguments_are_named(self, folder):
        with pytest.raises(TypeError, match="'max_lenght'"):
            LLM(str(folder), max_lenght=3)


class TestInterruptions:
    def test_an_interrupted_step_leaves_the_engine_usable_and_empty(self, llm, monkeypatch):
        before = ids_of(llm.generate(["a", "b"], GREEDY, use_tqdm=False))
        core = llm.llm_engine.engine_core
        places = (
            (core.scheduler, "schedule"),
            (core.executor, "execute_model"),
            (core.executor.worker.model_runner.model, "compute_logits"),
            (core.executor.worker.model_runner.states, "append_sampled"),
            (core.scheduler, "update_from_output"),
            (llm.llm_engine.output_processor, "process_outputs"),
        )
        for owner, name in places:
            for at in (1, 3):
                calls = itertools.count(1)
                inner = getattr(owner, name)

                def interrupt(*args, inner=inner, at=at, calls=calls, **kwargs):
                    if next(calls) == at:
                        raise KeyboardInterrupt
                    return inner(*args, **kwargs)

                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
                assert is_empty(llm), (name, at)
                assert ids_of(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == before, (name, at)

    def test_control_c_at_any_line_leaves_the_engine_whole(self, folder):
        """A signal at every so many lines of the engine's code, preemptions included."""
        llm = make_tiny_llm(folder, num_gpu_blocks_override=8, max_num_batched_tokens=40)
        prompts = [[5] * 30, [6] * 20, [7] * 33]
        params = [
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprob_token_ids=[3, 4]),
            SamplingParams(seed=1, max_tokens=8, ignore_eos=True, logit_bias={3: 1.0}),
            SamplingParams(seed=1, max_tokens=3, n=2, stop=["never"]),
        ]
        before = ids_of(llm.generate(prompts, params, use_tqdm=False))
        lines, target = 0, -1

        def trace(frame, event, arg):
            nonlocal lines
            if f"{os.sep}vllm{os.sep}" not in frame.f_code.co_filename:
                return None
            if event == "line":
                lines += 1
                if lines == target:
                    signal.raise_signal(signal.SIGINT)
            return trace

        def run() -> None:
            nonlocal lines
            lines, tracer = 0, sys.gettrace()
            sys.settrace(trace)
            try:
                llm.generate(prompts, params, use_tqdm=False)
            finally:
                sys.settrace(tracer)

        # Twice: the first time, steps of a size that is new are recorded, which takes more lines.
        run()
        run()
        # Preparing a call is not part of a step, and nothing to clean up after.
        total, step = lines, lines // 41
        for target in range(step, total, step):
            with pytest.raises(KeyboardInterrupt):
                run()
            assert is_empty(llm), target
            assert ids_of(llm.generate(prompts, params, use_tqdm=False)) == before, target

    def test_the_second_control_c_does_not_wait(self):
        with pytest.raises(KeyboardInterrupt), InterruptsBetweenSteps() as interrupts:
            signal.raise_signal(signal.SIGINT)
            noted = True
            signal.raise_signal(signal.SIGINT)
            noted = False
        assert noted and interrupts

    def test_control_c_waits_for_the_check_or_the_end(self):
        before = signal.getsignal(signal.SIGINT)
        with InterruptsBetweenSteps() as interrupts:
            interrupts.check()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
            interrupts.check()
        with pytest.raises(KeyboardInterrupt), InterruptsBetweenSteps():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before

    def test_generate_works_outside_the_main_thread(self, llm):
        with ThreadPoolExecutor(1) as pool:
            assert len(pool.submit(llm.generate, ["a"], GREEDY, use_tqdm=False).result()) == 1

    def test_a_fault_of_the_model_reaches_the_caller_and_the_next_call_works(self, llm, monkeypatch):
        model = llm.llm_engine.engine_core.executor.worker.model_runner.model
        with monkeypatch.context() as patch:
            patch.setattr(model, "compute_logits", lambda hidden: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        assert is_empty(llm)
        assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False)) == 2

    def test_a_progress_bar_that_breaks_leaves_nothing_behind(self, llm):
        def broken(**kwargs):
            raise OSError("no terminal")

        with pytest.raises(OSError, match="no terminal"):
            llm.generate(["a"], GREEDY, use_tqdm=broken)
        assert is_empty(llm)

    def test_requests_of_others_are_none_of_generates_business(self, llm):
        llm.llm_engine.add_request("mine", "a", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        llm.llm_engine.add_request("long", "a", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        outputs = llm.generate(["b", "c"], GREEDY, use_tqdm=False)
        assert [len(tokens) for tokens in ids_of(outputs)] == [4, 4]
        llm.llm_engine.abort_request(["mine", "long"])
        assert is_empty(llm)


class TestOutput:
    def test_quiet_by_default(self, llm, capfd):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        assert capfd.readouterr() == ("", "")
        llm.generate(["a", "b"], GREEDY)
        out, err = capfd.readouterr()
        assert out == ""
        assert "2/2" in err

    def test_a_callable_stands_in_for_tqdm(self, llm):
        class Bar:
            def __init__(self, total, **kwargs):
                self.total, self.done, self.closed = total, 0, False
                bars.append(self)

            def update(self, count):
                self.done += count

            def close(self):
                self.closed = True

        bars: list[Bar] = []
        llm.generate(["a", "b", "c"], SamplingParams(n=2, max_tokens=3), use_tqdm=Bar)
        assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(3, 3, True)]


class TestFinish:
    def test_max_tokens_is_16_unless_asked(self, llm):
        (output,) = llm.generate(["a"], SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (16, "length")

    def test_max_tokens_none_goes_to_the_end_of_the_context(self, llm):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
        (output,) = llm.generate([[5] * 100], params, use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (28, "length")

    def test_the_end_of_sequence(self, llm):
        # A bias makes the model say it at once.
        always = {"temperature": 0, "logit_bias": {EOS: 100}, "max_tokens": 6}
        params = [
            SamplingParams(**always),
            SamplingParams(**always, ignore_eos=True),
            SamplingParams(**always, min_tokens=3),
            SamplingParams(**always, include_stop_str_in_output=True, skip_special_tokens=False),
        ]
        plain, ignored, late, shown = (output.outputs[0] for output in llm.generate(["a"] * 4, params, use_tqdm=False))
        assert (plain.token_ids, plain.text, plain.finish_reason, plain.stop_reason) == (
            [EOS],
            "",
            "stop",
            None,
        )
        assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * 6, "length")
        assert (len(late.token_ids), late.token_ids[-1], late.finish_reason) == (4, EOS, "stop")
        assert EOS not in late.token_ids[:-1]
        assert (shown.text, shown.token_ids) == ("</s>", [EOS])

    def test_stop_token_ids(self, llm):
        (free,) = ids_of(
            llm.generate(["ab"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        )
        stop = free[4]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
        completion = llm.generate(["ab"], params, use_tqdm=False)[0].outputs[0]
        assert completion.token_ids == free[: free.index(stop) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)

    def test_a_stop_string_across_tokens(self, llm):
        bias = {token: 100 for token in byte_ids("xyz")}
        sampled = SamplingParams(seed=3, max_tokens=100, ignore_eos=True, logit_bias=bias)
        text = llm.generate(["a"], sampled, use_tqdm=False)[0].outputs[0].text
        stop = text[20:24]
        where = text.index(stop)
        for included in (False, True):
            params = sampled.clone()
            params.stop, params.include_stop_str_in_output = [stop], included
            completion = llm.generate(["a"], params, use_tqdm=False)[0].outputs[0]
            assert completion.text == text[: where + (4 if included else 0)]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            assert len(completion.token_ids) == where + 4
        assert is_empty(llm)


def test_chat_renders_tools_and_calls_and_its_answers_are_parsed(llm):
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(',') }});"
        "{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}|{% endfor %}"
    )
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
    ]
    (output,) = llm.chat(messages, GREEDY, chat_template=template, tools=tools, use_tqdm=False)
    assert output.prompt == "weather(city);user:?|assistant:Oslo|tool:cold|"
    (plain,) = llm.chat(messages, GREEDY, chat_template=template, use_tqdm=False)
    assert plain.prompt == output.prompt.removeprefix("weather(city);")
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    found = ToolParserManager.get_tool_parser("hermes")(llm.get_tokenizer()).extract_tool_calls(text, None)
    assert [each.function.arguments for each in found.tool_calls] == ['{"city": "Rome"}']
