"""LLM.chat: conversations in, the template's own words to the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import BOS, VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tiny_llm import is_empty, make_tiny_llm
from tokenizers import processors

from vllm import LLM, SamplingParams
from vllm.answers.prompts import render_conversations
from vllm.exceptions import VLLMValidationError
from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
TEMPLATE = """\
{{- bos_token -}}
{%- if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif -%}
({{ message.role }}) {% if message.content %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{{- mood or '' }}</s>
{%- endfor -%}
{%- if add_generation_prompt %}(assistant){% endif -%}
"""
HELLO = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
LONGER = [*HELLO, {"role": "assistant", "content": "the end"}, {"role": "user", "content": "why?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE)
    backend = make_byte_tokenizer(folder).backend
    # Texts get a <s> of their own, which a rendered template must not.
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return make_tiny_llm(folder)


def chat(llm: LLM, messages, **options):
    return llm.chat(messages, GREEDY, use_tqdm=False, **options)


def hf_ids(llm: LLM, messages, **options) -> list[int]:
    options = {"add_generation_prompt": True, **options}
    return llm.get_tokenizer().apply_chat_template(messages, tokenize=True, return_dict=False, **options)


class TestPrompts:
    def test_prompts_by_themselves(self, tiny):
        prompts = tiny.preprocess_chat([HELLO, LONGER])
        outputs = chat(tiny, [HELLO, LONGER])
        assert [prompt["prompt_token_ids"] for prompt in prompts] == [output.prompt_token_ids for output in outputs]
        assert [prompt["prompt"] for prompt in prompts] == [output.prompt for output in outputs]
        again = tiny.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].text for output in again] == [output.outputs[0].text for output in outputs]
        (open_end,) = tiny.preprocess_chat(HELLO, "{{ messages[-1].content }}", add_generation_prompt=False)
        assert open_end["prompt"] == "hello"
        with pytest.raises(VLLMValidationError, match="mm_processor_kwargs"):
            tiny.preprocess_chat(HELLO, mm_processor_kwargs={"size": 1})

    @pytest.mark.parametrize("messages", [HELLO, LONGER, HELLO[1:]])
    def test_equal_transformers(self, tiny, messages):
        (output,) = chat(tiny, messages)
        assert output.prompt_token_ids == hf_ids(tiny, messages)
        assert output.prompt == tiny.get_tokenizer().apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert len(output.outputs[0].token_ids) == 3

    def test_special_tokens_stand_once(self, tiny):
        assert tiny.llm_engine.tokenizer.encode("hello")[0] == BOS
        (output,) = chat(tiny, HELLO)
        assert output.prompt == "<s>(system) be kind</s>(user) hello</s>(assistant)"
        assert output.prompt_token_ids.count(BOS) == 1

    def test_many_conversations_keep_their_order(self, tiny):
        outputs = chat(tiny, [LONGER, HELLO, HELLO[1:]])
        assert [output.prompt_token_ids for output in outputs] == [
            hf_ids(tiny, each) for each in (LONGER, HELLO, HELLO[1:])
        ]
        alone = [chat(tiny, each)[0].outputs[0].token_ids for each in (LONGER, HELLO, HELLO[1:])]
        assert [output.outputs[0].token_ids for output in outputs] == alone

    def test_no_conversation(self, tiny):
        assert chat(tiny, []) == []

    def test_one_sampling_params_each(self, tiny):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 4)]
        outputs = tiny.chat([HELLO, LONGER], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4]
        assert len(tiny.chat(HELLO, use_tqdm=False)) == 1

    def test_text_parts_are_lines(self, tiny):
        parts = [{"type": "text", "text": "the cat"}, "sat", {"type": "text", "text": ""}]
        (output,) = chat(tiny, [{"role": "user", "content": parts}])
        assert "(user) the cat\nsat\n</s>" in output.prompt

    def test_the_callers_messages_stay_as_they_are(self, tiny):
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        before = json.dumps(messages)
        chat(tiny, messages)
        assert json.dumps(messages) == before

    def test_continuing_the_last_message(self, tiny):
        messages = [*HELLO, {"role": "assistant", "content": "the answ"}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        (output,) = chat(tiny, messages, **options)
        assert output.prompt.endswith("(assistant) the answ")
        assert output.prompt_token_ids == hf_ids(tiny, messages, **options)

    def test_without_generation_prompt(self, tiny):
        (output,) = chat(tiny, HELLO, add_generation_prompt=False)
        assert output.prompt.endswith("hello</s>")

    def test_a_template_of_the_call(self, tiny):
        template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
        (output,) = chat(tiny, HELLO, chat_template=template)
        assert output.prompt == "<be kind><hello>"

    def test_variables_and_tools_reach_the_template(self, tiny):
        tools = [{"type": "function", "function": {"name": "look"}}]
        (output,) = chat(tiny, HELLO, tools=tools, chat_template_kwargs={"mood": "!"})
        assert "(user) hello!</s>" in output.prompt
        assert output.prompt_token_ids == hf_ids(tiny, HELLO, tools=tools, mood="!")
        assert json.dumps(tools[0]) in output.prompt

    def test_arguments_of_tool_calls_are_objects(self, tiny):
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "seen"}]
        (output,) = chat(tiny, messages)
        assert '(assistant) look{"at": "it"}</s>(tool) seen</s>' in output.prompt
        assert call["function"]["arguments"] == '{"at": "it"}'


# In the manner of templates that models come with.
CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
CONCATENATES = "{{ '<' + m.role + '>' + m.content + '' }}" + CALLS
ASKS = (
    "<{{ m['role'] }}>{% if m['content'] is defined and m['content'] is not none %}{{ m['content'] + '' }}{% endif %}"
    + CALLS
)
EITHER_WAY = (
    "<{{ m.role }}>{% if 'tool_calls' in m %}{% if m['content'] is none %}"
    + CALLS
    + "{% else %}{{ m['content'] ~ '' }}"
    + CALLS
    + "{% endif %}{% else %}{{ m.content }}{% endif %}"
)
TRIMS = "{{ '<' + m['role'] + '>' + m['content'] | trim }}" + CALLS
SLICES = "<{{ m.role }}>{% if m.content[:2] != '- ' %}{{ m.content.strip() }}{% endif %}" + CALLS
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize("body", [CONCATENATES, ASKS, EITHER_WAY, TRIMS, SLICES])
class TestMessagesWithoutContent:
    """The content of an assistant's message that calls tools may be null, or not there: to a template it is a text."""

    @pytest.fixture
    def render(self, body, tmp_path):
        tokenizer = make_byte_tokenizer(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        template = "{% for m in messages %}" + body + "{% endfor %}"

        def render(message):
            messages = [HELLO[1], message, {"role": "tool", "tool_call_id": "1", "content": "seen"}]
            return render_conversations(messages, tokenizer, chat_template=template)[0]["prompt"]

        return render

    @pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
    def test_beside_tool_calls(self, render, content):
        message = {"role": "assistant", **content, "tool_calls": [CALL], "refusal": None, "function_call": None}
        assert render(message) == "<user>hello<assistant><call>look</call><tool>seen"

    def test_beside_a_function_call(self, render):
        """A function call is the form from before there were several tool calls."""
        message = {"role": "assistant", "content": None, "function_call": CALL["function"]}
        assert render(message) == "<user>hello<assistant><call>look</call><tool>seen"

    def test_beside_a_refusal(self, render):
        message = {"role": "assistant", "content": None, "refusal": "I would rather not", "tool_calls": None}
        assert render(message) == "<user>hello<assistant>I would rather not<tool>seen"

    def test_and_no_tool_calls_beside_content(self, render):
        """As clients send back what they got: every field of the answer's message, most of them null."""
        for none in (None, []):
            assert render({"role": "assistant", "content": "yes", "tool_calls": none}) == (
                "<user>hello<assistant>yes<tool>seen"
            )


class TestErrors:
    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ("hello", "messages must be a list of dicts, or a list of such lists, got str"),
            ({"role": "user", "content": "a"}, "messages must be a list.*got dict"),
            (["hello"], r"messages\[0\] must be a dict with role and content, got str"),
            ([HELLO[0], 5], r"messages\[1\] must be a dict.*got int"),
            ([{"content": "a"}], r"messages\[0\] has no role"),
            ([{"role": 5, "content": "a"}], r"messages\[0\] has no role"),
            ([{"role": "user"}], r"messages\[0\] has no content"),
            ([HELLO[1], {"role": "user", "content": None}], r"messages\[1\] has no content"),
            ([HELLO[1], {"role": "assistant"}], r"messages\[1\] has no content"),
            ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\] has no content"),
            ([{"role": "assistant", "function_call": "f"}], r"messages\[0\].function_call must be a dict"),
            ([{"role": "assistant", "refusal": 5}], r"messages\[0\].refusal must be a string, got int"),
            (
                [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}],
                r"messages\[0\].function_call.arguments is not JSON",
            ),
            ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string or a list of text parts"),
            ([{"role": "user", "content": [5]}], r"messages\[0\].content\[0\] must be a text part, got int"),
            (
                [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "x"}}]}],
                r"messages\[0\].content\[1\] is of type 'image_url'",
            ),
            ([{"role": "user", "content": [{"text": "a"}]}], r"content\[0\] is of type None"),
            ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string, got NoneType"),
            ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content holds a lone surrogate"),
            ([HELLO, []], r"messages\[1\] has no message"),
            ([HELLO, HELLO[0]], r"messages\[1\] must be a conversation.*got dict"),
            ([HELLO, [{"role": "user"}]], r"messages\[1\]\[0\] has no content"),
            ([HELLO, HELLO[::-1]], r"messages\[1\]: the chat template failed: system must be first"),
            ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\].tool_calls must be a list of dicts"),
            (
                [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
                r"tool_calls\[0\].function.arguments is not JSON",
            ),
        ],
    )
    def test_malformed_messages(self, tiny, messages, message):
        with pytest.raises(VLLMValidationError, match=message) as caught:
            chat(tiny, messages)
        assert caught.value.parameter.startswith("messages")
        assert is_empty(tiny)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"continue_final_message": True}, "continue_final_message needs add_generation_prompt=False"),
            ({"add_generation_prompt": "yes"}, "add_generation_prompt must be a bool, got str"),
            ({"continue_final_message": 1}, "continue_final_message must be a bool, got int"),
            ({"chat_template": 5}, "chat_template must be a Jinja template as a string, got int"),
            ({"chat_template": "{% for %}"}, "messages: the chat template failed: "),
            ({"chat_template": "{{ 1 / 0 }}"}, "messages: the chat template failed: division by zero"),
            ({"chat_template": "{{ '' }}"}, "messages: the chat template made an empty prompt"),
            ({"tools": {}}, "tools must be a list of dicts, got dict"),
            ({"tools": ["look"]}, "tools must be a list of dicts"),
            ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict, got list"),
            ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs cannot set 'tokenize'"),
            ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs cannot set 'tools'"),
            ({"priority": [1, 2]}, "priority has 2 entries for 1 prompts"),
        ],
    )
    def test_bad_arguments(self, tiny, options, message):
        with pytest.raises(VLLMValidationError, match=message):
            chat(tiny, HELLO, **options)
        assert is_empty(tiny)

    def test_no_template(self, tmp_path):
        tokenizer = make_byte_tokenizer(tmp_path)
        with pytest.raises(VLLMValidationError, match="no chat template; pass one as chat_template"):
            render_conversations(HELLO, tokenizer)
        (prompt,) = render_conversations(HELLO, tokenizer, chat_template="{{ messages[1].content }}")
        assert prompt == {"prompt": "hello", "prompt_token_ids": tokenizer.encode("hello")}

    def test_no_tokenizer(self):
        with pytest.raises(VLLMValidationError, match="chat needs a tokenizer"):
            render_conversations(HELLO, None)

    def test_a_prompt_that_is_too_long(self, tiny):
        with pytest.raises(VLLMValidationError, match=r"prompts\[1\].*max_model_len=128"):
            chat(tiny, [HELLO, [{"role": "user", "content": "a b " * 60}]])
        assert is_empty(tiny)


def test_only_chat_imports_transformers(tiny):
    code = f"""
import sys
from vllm import LLM, SamplingParams
llm = LLM({str(tiny.llm_engine.model_config.path)!r}, max_model_len=64)
llm.score_labels(["a"], ["b", "cd"], use_tqdm=False)
assert "transformers" not in sys.modules and "jinja2.environment" not in sys.modules
llm.chat([{{"role": "user", "content": "a"}}], SamplingParams(max_tokens=1), use_tqdm=False)
assert "transformers" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.skipif(embedded_model_path() is None, reason=NO_EMBEDDED_MODEL)
def test_the_embedded_model_answers(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=3)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert output.prompt_token_ids == hf_ids(llm, messages)
    # Left to itself it begins in English or in French, a tie within the rounding of bfloat16.
    begun = [*messages, {"role": "assistant", "content": "The capital of France is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(begun, params, use_tqdm=False, **options)
    assert output.outputs[0].text.startswith(" Paris")
