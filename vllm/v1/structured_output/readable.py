"""Whether a form can be read beside the answer that it binds."""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.finite_values import MAX_VALUES, longest_enum
from vllm.v1.structured_output.grammar import schema_of
from vllm.v1.structured_output.matcher import grammars_of


def check_readable(config: ModelConfig, params: SamplingParams, prompt_len: int) -> None:
    """Raises VLLMValidationError where `choice_readings` or `field_readings` of valid parameters cannot be honoured:
    for too many values, and for choices without a token or that the context does not hold."""
    form = params.structured_outputs
    if form is None or not (params.choice_readings or params.field_readings):
        return
    name = "choice_readings" if params.choice_readings else "field_readings"
    choices = form.choice or []
    count = len(choices) if params.choice_readings else longest_enum(schema_of(form))
    if count > MAX_VALUES:
        raise VLLMValidationError(f"{name} are of at most {MAX_VALUES} values, got {count}", name, count)
    spell = grammars_of(config).spell
    for text in choices:
        num_tokens = len(spell(text))
        if not num_tokens:
            raise VLLMValidationError(f"{name}: an empty choice has no token to read", name, text)
        if prompt_len + num_tokens - 1 > config.max_model_len:
            message = (
                f"{name}: the prompt has {prompt_len} tokens and choice {text!r} {num_tokens}; all but its last must "
                f"fit within max_model_len={config.max_model_len}"
            )
            raise VLLMValidationError(message, name, num_tokens)
