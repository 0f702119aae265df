"""What all request models share."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from vllm.sampling_params import LIMITS

_TOOLS = "this server calls no tools"
_GUIDED = "this server does not constrain what is generated (allowed_token_ids, logit_bias and bad_words do)"

# Of OpenAI's clients: what changes nothing here.
ACCEPTED_FIELDS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip

# What asks for something that is not done here: field -> (values that ask for nothing, why it is refused).
REFUSED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "response_format": (({"type": "text"},), "answers are text"),
    "structured_outputs": ((), _GUIDED),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "guided_choice": ((), f"{_GUIDED}; `labels` reads the probability of each choice"),
    "guided_grammar": ((), _GUIDED),
    "guided_decoding_backend": ((), _GUIDED),
    "guided_whitespace_pattern": ((), _GUIDED),
    "structural_tag": ((), _GUIDED),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "there is no speculative decoding"),
    "reasoning_effort": (("none",), "the model has no reasoning effort to set"),
    "reasoning": ((), "the model has no reasoning effort to set"),
    "include_reasoning": ((False, True), "the model's reasoning, if it does any, is in its text"),
    "thinking_token_budget": ((), "the model has no reasoning effort to set"),
    "verbosity": (("medium",), "the model has no verbosity to set"),
    "web_search_options": ((), "this server searches nothing"),
    "suffix": (("",), "the models here only continue texts"),
    "use_beam_search": ((False,), "beam search runs offline only, by LLM.beam_search"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which runs offline only"),
    "early_stopping": ((False,), "it belongs to beam search, which runs offline only"),
    "prompt_embeds": ((), "prompts are texts or token ids"),
    "documents": (([],), "pass them in chat_template_kwargs or in a message"),
    "mm_processor_kwargs": (({},), "prompts are texts or token ids"),
    "kv_transfer_params": ((), "the KV cache stays in this server"),
    "repetition_detection": ((), "it is not built"),
    "lora_request": ((), "there are no adapters"),
}  # fmt: skip


Object = Annotated[dict[Any, Any], WithJsonSchema({"type": "object"})]
"""Whatever it holds: pydantic would note everything in it that is wrong."""

# Fields that SamplingParams knows by another name.
_SAMPLING_NAMES = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}


def _document(schema: dict[str, Any], model: type[RequestModel]) -> None:
    """Say in the schema what is not pydantic's to check: nothing but the known fields is taken, and numbers have
    SamplingParams' limits."""
    schema["additionalProperties"] = False
    properties = schema["properties"]
    for name, own in properties.items():
        limits = LIMITS.get(_SAMPLING_NAMES.get(name, name))
        for branch in own.get("anyOf", [own]):
            if limits is not None and branch.get("type") in ("integer", "number"):
                branch["exclusiveMinimum" if limits.open_low else "minimum"] = limits.low
                branch["maximum"] = limits.high
                if name == "truncate_prompt_tokens":
                    branch["not"] = {"const": 0}
    for name in model.ACCEPTED:
        properties[name] = {"title": name, "description": "Accepted; changes nothing here."}
    for name, (neutral, reason) in model.REFUSED.items():
        description = f"Only as a value that asks for nothing: {reason}."
        properties[name] = {"title": name, "enum": [*neutral, None], "description": description}


def nested_model(annotation: Any) -> type[RequestModel] | None:
    """The model among a field's types, if there is one."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, RequestModel)), None)


@cache
def nested_models(model: type[RequestModel]) -> dict[str, type[RequestModel]]:
    """The fields of a model that can hold models, with those."""
    found = {name: nested_model(field.annotation) for name, field in model.model_fields.items()}
    return {name: inner for name, inner in found.items() if inner is not None}


class RequestModel(BaseModel):
    """A request's body. Types are taken as they are: no string is a number, no bool an integer.

    Fields beyond the declared ones are looked at before parsing: ACCEPTED ones are ignored, REFUSED ones too if they
    ask for nothing.
    """

    ACCEPTED: ClassVar[tuple[str, ...]] = ()
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=_document, protected_namespaces=())


class ResponseModel(BaseModel):
    """An answer's body, for the schema: answers are made as plain dicts."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
