"""The table of bodies that are refused: what a good body is changed by, and which field the error names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from byte_tokenizer import VOCAB_SIZE

MAX_MODEL_LEN = 128
MAX_LOGPROBS = 20
MAX_IDS = 8
"""The limit of the engine that the table is for."""

LEFT_OUT = object()
"""In place of a value: the field is not there."""

SURROGATE = "\ud800"

COMPLETION = {"model": "tiny", "prompt": "ab", "max_tokens": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1}
SCORING = {"model": "tiny", "query": "ab", "items": ["c", "d"], "labels": ["x", "y"]}
DECISION = {"model": "tiny", "input": "ab", "questions": [{"type": "predicate", "instructions": "c"}]}
SYSTEM_ONE = {"model": "tiny", "state": "ab", "questions": {"q": {"type": "noul", "instructions": "c"}}}
MESSAGE = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1}
RESPONSE = {"model": "tiny", "input": "ab", "max_output_tokens": 1}
TOKENIZE = {"model": "tiny", "prompt": "ab"}
DETOKENIZE = {"model": "tiny", "tokens": [70, 71]}


@dataclass(frozen=True)
class Bad:
    """A body that is refused.

    Attributes:
        fields: over those of a good body.
        param: what the error names.
        says: what the message holds.
        status: of the answer.
    """

    fields: dict[str, Any]
    param: str | None
    says: str
    status: int = 400

    def over(self, good: dict[str, Any]) -> dict[str, Any]:
        """The whole body."""
        return {name: value for name, value in {**good, **self.fields}.items() if value is not LEFT_OUT}

    def __str__(self) -> str:
        text = ",".join(f"{name}={'LEFT_OUT' if value is LEFT_OUT else value!r}" for name, value in self.fields.items())
        return ascii(text if len(text) < 60 else text[:60] + "...")[1:-1]


def bad(field: str, *values: Any, says: str | None = None, param: str | None = None, **others: Any) -> list[Bad]:
    """A row for each wrong value of one field, beside `others`; it is what the error names unless `param` is."""
    name = param or field
    return [Bad({field: value, **others}, name, says or name) for value in values]


def _wrong_types(names: tuple[str, ...], *values: Any) -> list[Bad]:
    return [row for name in names for row in bad(name, *values)]


_INTEGERS = ("n", "best_of", "max_tokens", "min_tokens", "top_k", "seed", "truncate_prompt_tokens", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_FLAGS = (
    "stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "add_special_tokens", "return_tokens_as_token_ids", "return_token_ids", "logprob_entropy",
    "logprob_ranks", "prompt_ranks",
)  # fmt: skip
_IDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logits_indices")
_HUGE = (2**63, -(2**70), int("9" * 400))

# Bodies of completions and chat.
GENERATION = [
    *bad("model", 7, ["tiny"], True),
    Bad({"model": "other"}, "model", "'other'", 404),
    Bad({"model": ""}, "model", "''", 404),
    Bad({"model": SURROGATE}, "model", r"\ud800", 404),
    Bad({"model": "/etc/passwd"}, "model", "'/etc/passwd'", 404),
    *_wrong_types(_INTEGERS, "1", True, 1.5, 1e300, [1], {}, *_HUGE),
    *_wrong_types(_NUMBERS, "1", True, [0.5], {}, int("9" * 400)),
    *_wrong_types(_FLAGS, "true", 1, 0, [], {}),
    # Ids: nothing is read as an integer that is none.
    *_wrong_types(_IDS, 7, "7", True, {}, {"7": 7}, ["7"], [7.0], [True], [None], [[7]], [{}], [-1], [7, -1]),
    *_wrong_types(_IDS, [VOCAB_SIZE], [2**31], [2**70], [7, VOCAB_SIZE]),
    *bad("allowed_token_ids", []),
    *bad("logprob_token_ids", list(range(MAX_IDS + 1)), says=f"{MAX_IDS}"),
    *bad("logits_indices", list(range(MAX_IDS + 1)), says=f"{MAX_IDS}"),
    *bad("logits_indices", [8, 9, 10, 11, 12], logprob_token_ids=[1, 2, 3, 4], says="logprob_token_ids"),
    # Ranges.
    *bad("n", 0, -1, says="n must be between 1 and 16384"),
    *bad("n", 16385, says="n must be at most 16384"),
    *bad("best_of", 0, -1, 16385),
    *bad("best_of", 1, n=2),
    *bad("best_of", 2, stream=True),
    *bad("max_tokens", -1),
    *bad("min_tokens", -1),
    *bad("min_tokens", 2, max_tokens=1),
    *bad("temperature", -0.1, 1e31, -5),
    *bad("top_p", 0, 1.01, -1),
    *bad("top_k", -2, 2**31, 2**70),
    *bad("min_p", -0.1, 1.1),
    *bad("presence_penalty", -2.1, 2.1),
    *bad("frequency_penalty", -2.1, 2.1),
    *bad("repetition_penalty", 0, -1, 2e6),
    *bad("truncate_prompt_tokens", 0, -2, MAX_MODEL_LEN + 1),
    *bad("prompt_logprobs", -2, MAX_LOGPROBS + 1),
    *bad("prompt_logprob_token_ids", 7, "7", {}, ["7"], [7.0], [True], [-1], [VOCAB_SIZE], [[7], "7"], [["7"]], [[-2]]),
    *bad("prompt_logprob_token_ids", list(range(MAX_IDS + 1)), says=f"{MAX_IDS}"),
    *bad("prompt_logprob_token_ids", [[7]] * 100, says="100 lists"),
    *bad("prompt_logprob_start", "0", True, 1.5, -1, 2**63, 120, prompt_logprobs=1),
    *bad("prompt_logprob_start", 0),
    *bad("logprobs_mode", "raw", "", 1, ["raw_logits"]),
    # Texts.
    *_wrong_types(("stop", "bad_words"), 7, True, {}, [7], [None], [["a"]], "", [""], ["a", ""], SURROGATE),
    *_wrong_types(("stop", "bad_words"), ["a", SURROGATE]),
    *bad("stop", ["a"] * 1025, says="1024"),
    *bad("labels", "a", 7, {}, [7], [None], [""], [["a"]], [SURROGATE]),
    *bad("labels", ["ab"], says="2 tokens"),
    *bad("labels", ["a", "b", "a"], says="same token"),
    *bad("labels", list("abcdefghi"), says=f"{MAX_IDS}"),
    # Objects.
    *bad("logit_bias", [], "x", 7, {"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"٣": 1}, {SURROGATE: 1}, {"9" * 5000: 1}),
    *bad("logit_bias", {"7": "1"}, {"7": True}, {"7": None}, {str(VOCAB_SIZE): 1}),
    *bad("vllm_xargs", [], "x", 7, {"a": SURROGATE}, {SURROGATE: 1}, {"a": [2**70]}),
    *bad("stream_options", [], "x", 7, True, stream=True),
    *bad("stream_options", {"include_usage": 1}, param="stream_options.include_usage", stream=True),
    *bad("stream_options", {"continuous_usage_stats": "yes"}, param="stream_options.continuous_usage_stats"),
    *bad("stream_options", {"include_usage": True}, says="unless stream is true"),
    *bad("stream_options", {"include_usag": 1}, param="stream_options.include_usag", says="options.include_usage'"),
    # Fields that are neither the prompt's matter nor sampling's.
    *bad("priority", "1", True, 1.5, 2**70),
    *bad("request_id", "", "a b", "a\n", "é", "a" * 129, 7, SURROGATE),
    *bad("cache_salt", "", 7, [], SURROGATE),
    # Fields that are not served here: the reason is given.
    *bad("tools", [{"type": "function"}], [1]),
    *bad("tool_choice", "required", {"type": "function"}),
    *bad("functions", [{}]),
    *bad("function_call", {"name": "f"}),
    # The answer's form.
    *bad("response_format", "text", {}, {"type": "xml"}, {"type": "json_schema"}, says="response_format"),
    *bad("response_format", {"type": "json_schema", "json_schema": {"schema": "x"}}, says="response_format"),
    *bad("response_format", {"type": "json_schema"}, says="json_schema must be provided"),
    *bad("response_format", {"type": "structural_tag", "format": {}}, says="Invalid response_format structural_tag"),
    *bad("structured_outputs", "x", [], {"choice": []}, {"choice": "a"}, {"regex": 7}, {"regex": "("}, {"xml": "a"}),
    *bad("structured_outputs", {"choice": ["a"], "regex": "a"}, says="exactly one"),
    *bad("structured_outputs", {"json": {"unevaluatedProperties": False}}, says="unevaluatedProperties"),
    *bad("structured_outputs", {"json": "{"}, {"grammar": "root ::= other"}, {"structural_tag": "{}"}),
    *bad("guided_choice", "ab", 7),
    *bad("guided_whitespace_pattern", " ", says="without a schema"),
    *bad("guided_regex", "a", param="guided_choice", says="exclude each other", guided_choice=["a"]),
    *bad("audio", {"voice": "alloy"}, says="answers are text"),
    *bad("modalities", ["text", "audio"], says="answers are text"),
    *bad("prediction", {"type": "content"}, says="speculative"),
    *bad("use_beam_search", 0, 1, "yes"),
    *bad("length_penalty", 1.5, True, says="length_penalty"),
    *bad("length_penalty", 101, -101, use_beam_search=True),
    *bad("early_stopping", True, "never", "x", 7, says="early_stopping"),
    *bad("suffix", "x", says="suffix"),
    *bad("prompt_embeds", "AAAA", says="prompt_embeds"),
    # Names that nobody knows: the nearest one is given.
    *bad("tempratur", 1, says="'temperature'"),
    *bad("top_logprob_token_ids", [1], says="'logprob_token_ids'"),
    *bad("maxTokens", 1, says="'max_tokens'"),
    *bad("zzz", 0, True, says="unknown field 'zzz'; --ignore-unknown-fields lets"),
    *bad("repeat_penalty", 1.1, says="mean 'repetition_penalty'?; --ignore-unknown-fields lets"),
    *bad("num_ctx", 4096, says="'num_ctx'; --max-model-len sets the context's length; --ignore-unknown-fields lets"),
    *bad("keep_alive", "5m", says="the model stays loaded; --ignore-unknown-fields lets"),
    *bad("options", {"seed": 1}, says="'options'; its entries are fields of the body itself; --ignore"),
    *bad("typical_p", 1.0, says="min_p leave unlikely tokens out; --ignore-unknown-fields lets"),
    *bad("num_predict", 5, says="did you mean 'max_tokens'?"),
    *bad("", 1, says="unknown field ''"),
    Bad({SURROGATE: 1}, r"\ud800", r"unknown field '\ud800'"),
    Bad({"x" * 100_000: 1}, "x" * 64, "unknown field"),
    Bad({"prompt_token_ids": [1]}, "prompt_token_ids", "unknown field"),
]  # fmt: skip

_TOO_LONG = [70] * (MAX_MODEL_LEN + 1)

COMPLETIONS = [
    *bad("prompt_embeds", "AAAA", ["AAAA"], says="--enable-prompt-embeds"),
    *bad("prompt", LEFT_OUT, says="prompt is required"),
    Bad({"prompt": LEFT_OUT, "promt": "a"}, "promt", "'prompt'"),
    *bad("prompt", None, 7, 1.5, True, {}, {"prompt": "a"}, {"prompt_token_ids": [70]}),
    *bad("prompt", "", [], [[]], [""], ["a", ""], [[70], []]),
    *bad("prompt", [70, "a"], ["a", 70], ["a", [70]], [[70], "a"], [[70], 70], [None], [{}], [[[70]]], ["a", None]),
    *bad("prompt", [70.0], ["70", 70], [True], [[70, True]], [-1], [VOCAB_SIZE], [2**70], [[70], [-1]]),
    *bad("prompt", SURROGATE, "a" + SURROGATE, ["a", SURROGATE]),
    *bad("prompt", _TOO_LONG, [70] * MAX_MODEL_LEN, "a" * (MAX_MODEL_LEN + 1), says="128", param="prompt"),
    *bad("prompt", ["a", "a" * 1000], says="1000"),
    *bad("prompt", ["a"] * 65, says="--max-prompts-per-request"),
    *bad("max_tokens", MAX_MODEL_LEN - 1, 10**9, 2**62, says="leave max_tokens out"),
    *bad("max_tokens", MAX_MODEL_LEN - 15, prompt=[70] * 16),
    *bad("logprobs", True, "1", 1.5, -2, MAX_LOGPROBS + 1),
    *bad("logprobs", MAX_LOGPROBS + 1, echo=True),
    *bad("echo", "yes", 1),
    *bad("prompt_logprobs", 3, echo=True, logprobs=1),
    *bad("messages", [{}], says="/v1/chat/completions or /v1/messages takes it, and this route prompt; --ignore"),
    *bad("top_logprobs", 1, says="logprobs"),
]  # fmt: skip

_MESSAGE = {"role": "user", "content": "a"}
_IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def _message(param: str, *messages: Any) -> list[Bad]:
    """Rows for a second message that is wrong."""
    return [Bad({"messages": [_MESSAGE, message]}, param, "messages") for message in messages]


CHATS = [
    *bad("messages", LEFT_OUT, None, [], "hello", 7, {}, _MESSAGE, [[]], [[_MESSAGE]], [_MESSAGE, [_MESSAGE]]),
    *_message("messages", "hello", 7, None),
    *_message("messages[1].role", {}, {"content": "a"}, {"role": None, "content": "a"}, {"role": 7, "content": "a"}),
    *_message("messages[1].role", {"role": "", "content": "a"}),
    *_message("messages[1].content", {"role": "user"}, {"role": "user", "content": None}),
    *_message("messages[1].content", {"role": "user", "content": 7}, {"role": "user", "content": True}),
    *_message("messages[1].content", {"role": "user", "content": {}}, {"role": "user", "content": SURROGATE}),
    *_message("messages[1].content", {"role": "user", "content": [_IMAGE]}, {"role": "user", "content": [7]}),
    *_message("messages[1].content", {"role": "user", "content": [{}]}, {"role": "user", "content": [[]]}),
    *_message("messages[1].content[0].text", {"role": "user", "content": [{"type": "text"}]}),
    *_message("messages[1].content[0].text", {"role": "user", "content": [{"type": "text", "text": 7}]}),
    *_message("messages[1].tool_calls", {"role": "assistant", "tool_calls": "f"}),
    *_message("messages[1].tool_calls", {"role": "assistant", "tool_calls": [7]}),
    *_message(
        "messages[1].tool_calls[0].function.arguments",
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    ),
    *bad("messages", [{"role": "user", "content": "a" * 1000}], says="128"),
    *bad("messages", [{"role": "nobody", "content": "a"}], says="no such role"),
    *bad("max_tokens", MAX_MODEL_LEN, 10**9, says="leave max_tokens out"),
    *bad("max_completion_tokens", -1, "1", True, 1.5, MAX_MODEL_LEN, 2**62, max_tokens=LEFT_OUT),
    *bad("echo", "yes", 1),
    *bad("reasoning_effort", 3, ["high"]),
    *bad("verbosity", 3, ["low"]),
    *bad("reasoning", "high", 3),
    *bad("reasoning", {"effort": 3}, param="reasoning.effort"),
    *bad("reasoning", {"efort": "low"}, param="reasoning.efort", says="did you mean 'reasoning.effort'?"),
    *bad("prompt", "a", says="'prompt'; /v1/completions takes it, and this route messages; --ignore"),
    *bad("input", "a", says="/v1/responses or /v1/embeddings takes it"),
    *bad("max_output_tokens", 5, says="did you mean 'max_tokens'?"),
    *bad("system", "a", says="a message whose role is system"),
    *bad("previous_response_id", "a", says="/v1/responses"),
    *bad("tools", "x", [1], tool_choice="none"),
    *bad("tools", [{"type": "custom"}], [{"type": "function", "function": {"name": "f"}}], says="tools"),
    *bad("parallel_tool_calls", "yes", 1),
    *bad("include_reasoning", "yes", 1),
    *bad("thinking_token_budget", "5", True, 1.5, -2, 2**70),
    *bad("thinking_token_budget", 5, says="--reasoning-parser"),
    *bad("documents", "x", ["x"]),
    *bad("logprobs", 1, "true", 0),
    *bad("top_logprobs", 1, says="logprobs=true"),
    *bad("top_logprobs", "1", True, 1.5, -2, MAX_LOGPROBS + 1, 2**70, logprobs=True),
    *bad("chat_template", 7, [], SURROGATE, "{% if", "{{ nothing.at.all }}", "{{ 1 / 0 }}"),
    *bad("chat_template", "{{ raise_exception('no') }}", says="no"),
    *bad("chat_template", "{{ '\\ud800' }}", "{{ '' }}"),
    *bad("chat_template", "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}"),
    *bad("chat_template", "{% for x in range(10**9) %}{% endfor %}"),
    *bad("chat_template_kwargs", [], "x", {"tokenize": True}, {"chat_template": "x"}, {"tools": []}),
    *bad("add_generation_prompt", "yes", 1),
    *bad("continue_final_message", "yes", True, add_generation_prompt=True),
    *bad("continue_final_message", True),
    *bad("prompt", "a", says="unknown field"),
    *bad("enable_thinking", False, says="'chat_template_kwargs.enable_thinking'?; --ignore-unknown-fields lets"),
    *bad("thinking", {"type": "disabled"}, says="'chat_template_kwargs.thinking'?; --ignore-unknown-fields lets"),
]  # fmt: skip

# Bodies of /generative_scoring and /v1/score.
SCORINGS = [
    Bad({"model": "other"}, "model", "'other'", 404),
    *bad("query", LEFT_OUT, None, 7, {}, ["a"], [70.0], [True], [-1], [VOCAB_SIZE], [[70]], SURROGATE),
    *bad("items", LEFT_OUT, None, 7, {}, [], [7], [None], [{}], [["a"]], [[True]], [[-1]], [[VOCAB_SIZE]], [SURROGATE]),
    *bad("items", ["a"] * 65, says="--max-prompts-per-request"),
    *bad("items", ["a" * 200], says="128"),
    *bad("items", [""], query="", says="empty"),
    *bad("items", ["a" * 60], truncate_prompt_tokens=20, says="truncate_prompt_tokens"),
    *bad("labels", 7, {}, [], [7], [""], [None], [SURROGATE], ["a", "a"], ["a" * 200]),
    *bad("label_token_ids", 7, {}, [], [7.0], [True], ["a"], [-1], [VOCAB_SIZE], [7, 7], [2**70], labels=LEFT_OUT),
    *bad("label_token_ids", [[]], labels=LEFT_OUT, says="no token"),
    Bad({"labels": LEFT_OUT}, "label_token_ids", "required"),
    Bad({"label_token_ids": [7]}, "labels", "exclude each other"),
    *bad("apply_softmax", "yes", 1),
    *bad("item_first", "yes", 1),
    *bad("add_special_tokens", "yes", 1),
    *bad("truncate_prompt_tokens", "1", True, 1.5, 0, -2, MAX_MODEL_LEN + 1, 2**70),
    *bad("cache_salt", "", 7, SURROGATE),
    *bad("priority", "1", True, 2**70),
    *bad("request_id", "", 7, SURROGATE),
    *bad("label", ["a"], says="'labels'"),
    *bad("temperature", 1, says="unknown field"),
]  # fmt: skip

_ASK = {"type": "predicate", "instructions": "c"}
_CHOOSE = {"type": "choice", "instructions": "c"}

DECISIONS = [
    Bad({"model": "other"}, "model", "'other'", 404),
    *bad("input", LEFT_OUT, None, 7, {}, [7], [None], ["a"], SURROGATE),
    *bad("input", [{"role": "user"}], param="input[0].content"),
    *bad("input", [{"content": "a"}], [{"role": "tool", "content": "a"}], [{"role": 7, "content": "a"}],
         param="input[0].role"),
    *bad("input", [{"type": "audio"}], [{"type": 7}], [{"type": []}], param="input[0].type"),
    *bad("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}],
         param="input[0].content", says="reads text only"),
    *bad("input", [{"role": "system", "content": [{"type": "input_json", "data": {}}]}],
         param="input[0].content[0].type"),
    *bad("input", [{"type": "function_call_output", "call_id": "x", "output": "y"}], param="input[0].call_id"),
    *bad("input", "a" * 200, param="questions", says="context length"),
    *bad("questions", LEFT_OUT, None, 7, "a", {}, [], [7], [None], [_ASK] * 201),
    *bad("questions", [{**_ASK, "kind": 1}], says="unknown field"),
    *bad("questions", [{"instructions": "c"}], [{**_ASK, "type": "yesno"}], [{**_ASK, "type": {}}],
         param="questions[0].type"),
    *bad("questions", [{"type": "predicate"}], [{**_ASK, "instructions": 7}], param="questions[0].instructions"),
    *bad("questions", [{**_ASK, "name": ""}], [{**_ASK, "name": None}], [{**_ASK, "name": "a" * 257}],
         param="questions[0].name"),
    *bad("questions", [_CHOOSE], [{**_CHOOSE, "choices": {}}], [{**_CHOOSE, "choices": [{"value": "a"}]}],
         [{**_CHOOSE, "choices": [{"value": "a"}, {"value": "a"}]}],
         [{**_CHOOSE, "choices": [{"value": True}, {"value": True}]}],
         [{**_CHOOSE, "choices": [{"value": str(each)} for each in range(256)]}], param="questions[0].choices"),
    *bad("questions", [{**_CHOOSE, "choices": [{"value": 1}, {"value": "a"}]}],
         [{**_CHOOSE, "choices": [{"value": ""}, {"value": "a"}]}], param="questions[0].choices[0].value"),
    *bad("questions", [{"type": "score", "instructions": "c", "levels": [{"label": "a"}]}],
         [{"type": "score", "instructions": "c", "levels": [{"label": "a"}] * 11}], param="questions[0].levels"),
    *bad("read", "letters", 7, ["labels"]),
    *bad("permutations", "1", True, -1, 65, 1.5),
    *bad("min_label_mass", "1", True, -0.1, 1.1),
    *bad("calibration", 7, "x", [], {"temp": 1}),
    *bad("calibration", {"temperature": 0}, {"temperature": "1"}, param="calibration.temperature"),
    *bad("calibration", {"types": {"x": {}}}, param="calibration.types"),
    *bad("chat_template_kwargs", [], "x", {"tokenize": True}),
    *bad("prompt_cache_options", 7),
    *bad("safety_identifier", 7, "a" * 129),
    *bad("truncate_prompt_tokens", "1", True, 1.5, 0, -2, MAX_MODEL_LEN + 1, 2**70),
    *bad("cache_salt", "", 7, SURROGATE),
    *bad("priority", "1", True, 1.5, 2**70),
    *bad("request_id", "", 7),
    *bad("stream", True),
    *bad("question", [_ASK], says="'questions'"),
]  # fmt: skip

SYSTEM_ONES = [
    Bad({"model": "other"}, "model", "'other'", 404),
    *bad("state", LEFT_OUT),
    *bad("questions", LEFT_OUT, None, 7, [], {}, [_ASK], {"q": {**_ASK, "name": "x"}}, {"": _ASK}),
    *bad("questions", {"q": _ASK}, param="questions.q.type", says="unknown question type"),
    *bad("questions", {"q": {"type": "choice"}}, {"q": {"type": "choice", "criteria": ["a"]}},
         {"q": {"type": "score", "criteria": ["a"]}}, {"q": {"type": "noul", "criteria": {"maybe": "x"}}},
         param="questions.q.criteria"),
    *bad("instructions", 7, []),
    *bad("joint", True, "true"),
    *bad("images", ["x"]),
    *bad("user", "x", says="unknown field"),
    *bad("chat_template_kwargs", {"enable_thinking": True}, says="thinking must be off"),
]  # fmt: skip

TOKENIZES = [
    Bad({"model": "other"}, "model", "'other'", 404),
    Bad({"prompt": LEFT_OUT}, "prompt", "required"),
    Bad({"messages": [_MESSAGE]}, "messages", "exclude each other"),
    *bad("prompt", 7, ["a"], [70], {}, SURROGATE),
    *bad("messages", 7, "a", [], [7], [[_MESSAGE]], prompt=LEFT_OUT),
    *bad("messages", [{"content": "a"}], param="messages[0].role", says="messages[0]", prompt=LEFT_OUT),
    *bad("add_special_tokens", "yes", 1),
    *bad("return_token_strs", "yes", 1),
    *bad("promt", "a", says="'prompt'"),
    *bad("tools", [{}], prompt=LEFT_OUT, messages=[_MESSAGE]),
    *bad("continue_final_message", True, add_generation_prompt=True, prompt=LEFT_OUT, messages=[_MESSAGE]),
]  # fmt: skip

DETOKENIZES = [
    Bad({"model": "other"}, "model", "'other'", 404),
    *bad("tokens", LEFT_OUT, None, 7, "7", {}, ["7"], [7.0], [True], [None], [[7]], [-1], [VOCAB_SIZE], [2**70]),
    *bad("token", [7], says="'tokens'"),
]

ROWS = [
    *(("/v1/completions", COMPLETION, row) for row in (*GENERATION, *COMPLETIONS)),
    *(("/v1/chat/completions", CHAT, row) for row in (*GENERATION, *CHATS)),
    *(("/generative_scoring", SCORING, row) for row in SCORINGS),
    *(("/v1/score", SCORING, row) for row in SCORINGS),
    *(("/v1/decisions", DECISION, row) for row in DECISIONS),
    *(("/v1/systemone", SYSTEM_ONE, row) for row in SYSTEM_ONES),
    *(("/tokenize", TOKENIZE, row) for row in TOKENIZES),
    *(("/detokenize", DETOKENIZE, row) for row in DETOKENIZES),
]
"""(route, good body, what is wrong with it)"""
