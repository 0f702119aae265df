"""Bases and shared types of all models."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema
from typing_extensions import Self

from vllm.exceptions import VLLMValidationError, shown
from vllm.params.sampling_fields import At
from vllm.sampling_params import FIELDS
from vllm.server.errors import ApiError
from vllm.utils.checks import asks_for_nothing, whole

_TOOLS = "tools are called in chat: /v1/chat/completions"

Refusals = dict[str, tuple[tuple[Any, ...], str]]
"""Fields of unsupported features: name -> (accepted neutral values, why others are refused)."""


def refused_at(at: At) -> Refusals:
    """The fields of SamplingParams that an endpoint refuses."""
    return {name: row.refusal for name, row in FIELDS.items() if row.refusal is not None and at not in row.at}


_SAMPLING = refused_at(At.TEXTS)

# OpenAI's fields without effect here.
ACCEPTED_FIELDS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "session_id",
)  # fmt: skip

REFUSED_FIELDS: Refusals = {
    **_SAMPLING,
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "guided_decoding_backend": (("auto", "guidance"), "grammars run by llguidance"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "with speculative_config, drafts are copied from the prompt: put the text there"),
    "reasoning_effort": (("none",), "the model has no reasoning effort to set"),
    "reasoning": ((), "the model has no reasoning effort to set"),
    "include_reasoning": ((False, True), "the model's reasoning, if it does any, is in its text"),
    "verbosity": (("medium",), "the model has no verbosity to set"),
    "web_search_options": ((), "this server searches nothing"),
    "suffix": (("",), "the models here only continue texts"),
    "prompt_embeds": (([],), "/v1/completions takes embeddings"),
    "documents": (([],), "pass them in chat_template_kwargs or in a message"),
    "media_io_kwargs": (({},), "pictures are decoded as transformers does"),
    "mm_payload": (("tensors", "none"), "prompts are texts, token ids and pictures"),
    "return_mm_kwargs": ((False, True), "prompts are texts, token ids and pictures"),
    "kv_transfer_params": (({},), "the KV cache stays in this server"),
    "ec_transfer_params": (({},), "pictures are encoded in this server"),
    "truncation_side": (("left",), "prompts that are too long lose their beginning (truncate_prompt_tokens)"),
    "return_weight_versions": ((False,), "answers of completions and chat have them"),
    "return_token_offsets": ((False,), "/tokenize with return_token_strs shows the tokens' texts"),
    "return_prompt_text": ((False,), "the render routes answer with the prompt's text"),
    "lora_request": ((), "an adapter is named as the model"),
    "moderation": ((), "texts are not moderated"),
    "prompt_cache_options": (
        ({}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
        "prefixes are cached without marks; a cache_salt keeps them apart",
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Unread:
    """Marks a type that the schema describes in full but parsing checks only by `checked`: the engine checks the rest
    and names the first wrong entry, where pydantic would report each of a million."""

    checked: CoreSchema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Parsing uses the Python side, the schema is made from the JSON side.
        return core_schema.json_or_python_schema(json_schema=handler(source), python_schema=self.checked)


UNREAD = Unread(core_schema.any_schema())
UNREAD_TEXT = Unread(core_schema.str_schema())
UNREAD_LIST = Unread(core_schema.list_schema())
UNREAD_OBJECT = Unread(core_schema.dict_schema())

NOT_EMPTY = Field(min_length=1)
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], UNREAD_LIST]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], UNREAD_LIST]
NpyText = Annotated[str, Field(description="A .npy file of two dimensions, in base64.")]
IdRows = Annotated[list[TokenId] | list[list[Annotated[int, Field(ge=-1)]]] | NpyText, UNREAD]
"""Token ids for all positions, or rows of ids with -1 as padding."""
Object = Annotated[dict[str, Any], UNREAD_OBJECT]
PictureOptions = Annotated[
    Object | None,
    Field(description="Options of the model's picture processor, with --trust-request-mm-kwargs."),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,20}$")], float],
    Field(description="Cut to 100 and -100.", json_schema_extra={"additionalProperties": False}),
    UNREAD_OBJECT,
]

_NULL = {"type": "null"}
_NOTHING: list[Any] = [None, False, "", [], {}]

# Lower ratios are of other names that share a word: prompt and prompt_ranks, options and stream_options.
_IS_A_MISSPELLING = 0.75

# No known field's name is longer.
_LONGEST_NAME = 64

DOORS = {
    "messages": "/v1/chat/completions or /v1/messages",
    "prompt": "/v1/completions",
    "input": "/v1/responses or /v1/embeddings",
    "query": "/v1/rerank or /generative_scoring",
    "text_1": "/score",
    "questions": "/v1/decisions",
    "tokens": "/detokenize",
}
"""Where a body goes, by the field that says what it is about."""

# Fields of other engines' clients, and of other routes: what they are called here.
_OTHER_NAMES = {
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_probs": "logprobs",
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs",
    "stop_sequences": "stop",
    "format": "response_format",
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "grammar": "structured_outputs.grammar",
    "ebnf": "structured_outputs.grammar",
    "think": "chat_template_kwargs.enable_thinking",
    "system": "instructions",
    "instructions": "system",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "thinking": "chat_template_kwargs.thinking",
}
# And what there is instead of those that have no counterpart.
_INSTEAD = {
    "num_ctx": "--max-model-len sets the context's length",
    "keep_alive": "the model stays loaded",
    "typical_p": "top_p, top_k and min_p leave unlikely tokens out",
    "options": "its entries are fields of the body itself",
    "parameters": "its entries are fields of the body itself",
    "sampling_params": "its entries are fields of the body itself",
    "extra_body": "its entries are fields of the body itself: clients put them there",
    "do_sample": "temperature=0 takes the most likely token",
    "system": "in chat it is a message whose role is system",
    "instructions": "in chat they are a message whose role is system",
    "cache_prompt": "prefixes are cached in any case",
    "thread": "no conversation is kept: send all of its messages",
    "previous_response_id": "/v1/responses keeps answers",
}

# False is a wish, too.
_ASKED_BY_FALSE = {"do_sample", "think", "thinking", "enable_thinking"}

# Routers write SGLang's fields into every body, at their defaults.
_WRITTEN_BY_ROUTERS: Refusals = {
    "separate_reasoning": ((True,), "reasoning is apart from the content wherever --reasoning-parser finds it"),
    "stream_reasoning": ((True,), "reasoning is streamed as it comes"),
    "no_stop_trim": ((False,), "include_stop_str_in_output keeps stop strings"),
    "return_hidden_states": ((False,), "/pooling of a pooling model returns hidden states"),
}

# Names in SamplingParams of fields that differ.
_SAMPLING_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}


def _document(schema: dict[str, Any], model: type[RequestModel]) -> None:
    """Add to the schema what pydantic does not check: SamplingParams' limits, other fields' values that ask for
    nothing, one of ONE_OF."""
    schema["additionalProperties"] = {"enum": _NOTHING, "description": "A field that asks for nothing."}
    properties = schema["properties"]
    for name, own in properties.items():
        row = FIELDS.get(_SAMPLING_NAMES.get(name, name))
        limits = None if row is None else row.limits
        for branch in own.get("anyOf", [own]):
            if limits is not None and branch.get("type") in ("integer", "number"):
                # A field of the same name and another meaning has limits of its own.
                if "minimum" not in branch:
                    branch["exclusiveMinimum" if limits.open_low else "minimum"] = limits.low
                branch.setdefault("maximum", limits.high)
                if name == "truncate_prompt_tokens":
                    branch["not"] = {"const": 0}
    for name in model.ACCEPTED:
        if name in model.model_fields:
            continue
        properties[name] = {"title": name, "description": "Accepted; changes nothing here."}
    for name, (neutral, reason) in model.REFUSED.items():
        description = f"Only as a value that asks for nothing: {reason}."
        others = [
            each for each in _NOTHING if not (_asks(each, neutral) or any(_is_same(each, own) for own in neutral))
        ]
        properties[name] = {"title": name, "enum": [*neutral, *others], "description": description}
    if model.ONE_OF:
        kinds = {
            name: next(kind for kind in properties[name].get("anyOf", [properties[name]]) if kind != _NULL)
            for name in model.ONE_OF
        }
        schema["oneOf"] = [{"required": [name], "properties": {name: kind}} for name, kind in kinds.items()]


def check_names(
    fields: dict[str, Any], model: type[RequestModel], ignore_unknown: bool = False, within: str = ""
) -> None:
    """Refuse unknown and unsupported fields that ask for something, also of objects inside.

    Args:
        ignore_unknown: let unknown fields pass.
        within: the outer field and a dot.

    Raises:
        ApiError: 400 that names the first such field.
    """
    known_fields = model.model_fields
    for name, value in fields.items():
        if name in known_fields:
            if isinstance(value, dict) and (inner := nested_model(known_fields[name].annotation)) is not None:
                check_names(value, inner, ignore_unknown, f"{name}.")
        elif name in model.ACCEPTED:
            continue
        elif (refusal := model.REFUSED.get(name) or _WRITTEN_BY_ROUTERS.get(name)) is not None:
            neutral, reason = refusal
            if _asks(value, neutral):
                message = f"{name} cannot be honoured: {reason}; got {shown(value)}"
                raise ApiError(400, message, name, "unsupported_field", details=model.REFUSAL_DETAILS.get(name))
        elif not ignore_unknown and (not asks_for_nothing(value) or (value is False and name in _ASKED_BY_FALSE)):
            hint = _hint(name, [*known_fields, *model.ACCEPTED], within)
            message = f"unknown field {shown(within + name)}{hint}; --ignore-unknown-fields lets such fields pass"
            raise ApiError(400, message, within + name[:_LONGEST_NAME], "unknown_field")


def _hint(name: str, known: list[str], within: str) -> str:
    """Advice for an unknown field."""
    if not within and name in DOORS:
        own = next((each for each in DOORS if each in known), None)
        return f"; {DOORS[name]} takes it{'' if own is None else f', and this route {own}'}"
    near = _OTHER_NAMES.get(name, "")
    if near.partition(".")[0] not in known:
        if name in _INSTEAD:
            return f"; {_INSTEAD[name]}"
        spelled = {_letters(each): each for each in known}
        found = difflib.get_close_matches(_letters(name), spelled, n=1, cutoff=_IS_A_MISSPELLING)
        near = spelled[found[0]] if found else ""
    return f"; did you mean {within + near!r}?" if near else ""


def _letters(name: str) -> str:
    return name[:_LONGEST_NAME].replace("_", "").lower()


def _asks(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is not neutral; False is a wish where True is none, and an empty object may turn something on."""
    if any(_is_same(value, each) for each in neutral):
        return False
    return not asks_for_nothing(value) or value == {} or (value is False and any(each is True for each in neutral))


def _is_same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) is isinstance(other, bool)


def _takes_integers(annotation: Any) -> bool:
    """Whether a field's values may be integers."""
    if get_origin(annotation) is Annotated:
        return _takes_integers(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return any(map(_takes_integers, get_args(annotation)))
    return annotation is int


def nested_model(annotation: Any) -> type[RequestModel] | None:
    """The model among a field's types, if any."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, RequestModel)), None)


class RequestModel(BaseModel):
    """A request's body. Types are strict: no string is a number, no bool an integer. A float without a fraction is an
    integer where one is expected, but not in lists, which hold ids.

    TASK is what the model must be able to do; None: any model will do. Of fields that are not declared, ACCEPTED ones
    are ignored and REFUSED ones allow their neutral values only; REFUSAL_DETAILS are what clients read of these errors.
    Exactly one field of ONE_OF must be given.

    Raises:
        VLLMValidationError: a field that is refused or not known, of a request that is made in Python.
        pydantic.ValidationError: a field of a wrong type.
    """

    TASK: ClassVar[str | None] = "generate"
    ACCEPTED: ClassVar[tuple[str, ...]] = ACCEPTED_FIELDS
    REFUSED: ClassVar[Refusals] = {}
    REFUSAL_DETAILS: ClassVar[dict[str, dict[str, Any]]] = {}
    ONE_OF: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=_document, protected_namespaces=())

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        # Bodies come through model_validate, after read_body has checked their names, and without fields here.
        try:
            check_names(fields, cls)
        except ApiError as error:
            raise VLLMValidationError(error.message, error.param, fields.get(error.param or "")) from None
        return super().__new__(cls)

    @model_validator(mode="before")
    @classmethod
    def _read_whole_numbers(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = cls.model_fields
        floats = [name for name, value in fields.items() if type(value) is float and name in known]
        integers = {name: whole(fields[name]) for name in floats if _takes_integers(known[name].annotation)}
        return {**fields, **integers} if integers else fields

    def given_field(self) -> str:
        """The only given field of ONE_OF. Raises ApiError if none or several are given."""
        given = [name for name in self.ONE_OF if getattr(self, name) is not None]
        if not given:
            raise ApiError(400, f"{' or '.join(self.ONE_OF)} is required", self.ONE_OF[0], "missing_field")
        if len(given) > 1:
            message = f"{' and '.join(given)} exclude each other: give one of them"
            raise ApiError(400, message, given[1], "invalid_value")
        return given[0]


class EngineRequestModel(RequestModel):
    """A body that becomes requests of the engine."""

    model: str | None = Field(None, description="One of the names in /v1/models; the server has only one model.")
    cache_salt: str | None = Field(None, min_length=1, description="Shares cached prefixes with equal salts only.")
    priority: int | None = Field(None, description="Lower runs earlier, under --scheduling-policy priority.")
    request_id: str | None = Field(None, min_length=1, description="In place of one that the server makes.")


class ResponseModel(BaseModel):
    """An answer's body, for the schema only: answers are made as plain dicts."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ListResponse(ResponseModel):
    """Results with OpenAI's frame of a list; `data` holds them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
