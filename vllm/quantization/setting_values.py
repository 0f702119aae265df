"""Values of a checkpoint's settings, checked as they are read: every ValueError names the setting."""

from __future__ import annotations

import re
from typing import Any

from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

# By method, the settings that are read, and those that say how the checkpoint was made or how other programs run it.
_KNOWN = {
    "awq": """
        bits w_bit group_size q_group_size zero_point version format checkpoint_format modules_to_not_convert backend
        do_fuse modules_to_fuse fuse_max_seq_len exllama_config desc_act sym lm_head pack_dtype meta
    """,
    "bitsandbytes": """
        load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
        bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
        llm_int8_skip_modules llm_int8_threshold
    """,
    "compressed-tensors": """
        config_groups format ignore quantization_status global_compression_ratio kv_cache_scheme sparsity_config
        version
    """,
    "fp8": """
        activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers scale_fmt dequantize
        is_checkpoint_fp8_serialized kv_cache_scheme weight_per_tensor act_per_tensor activation_scale_ub
    """,
    "gptq": """
        act_group_aware adapter backend base_model_name_or_path batch_size bits block_name_to_quantize
        cache_block_outputs checkpoint_format damp_auto_increment damp_percent dataset desc_act device disable_exllama
        dynamic exllama_config fail_safe format group_size hyb_act is_marlin_format lm_head max_input_length meta
        model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
        modules_in_block_to_quantize mse pack_dtype pad_token_id parallel_packing quantizer static_groups sym
        task_type tokenizer true_sequential uri use_cuda_fp16 use_exllama v2 version
    """,
    "modelopt": """
        quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules ignore producer has_zero_point
        pre_quant_scale quantized_layers config_groups
    """,
    "mxfp4": "modules_to_not_convert dequantize",
    "squeezellm": "wbits bits",
    "torchao": """
        quant_type quant_type_kwargs modules_to_not_convert include_input_output_embeddings untie_embedding_weights
    """,
}
# What weights were multiplied with when they were quantised: activations would have to be, too.
_TRANSFORMS = ("rotation", "rotation_config", "hadamard_config", "transform_config")


def read_flag(settings: dict[str, Any], name: str, usual: bool) -> bool:
    """true or false; `usual` where it is null or not there."""
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return usual if value is None else value


def read_one(settings: dict[str, Any], names: tuple[str, ...], usual: Any) -> Any:
    """The value that has one of `names`, or several of them; `usual` where none is there, or not null.
    ValueError: they differ."""
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise ValueError(f"{' and '.join(f'{name}={value!r}' for name, value in given.items())} are one setting")
    return values[0] if values else usual


def refuse_transforms(settings: dict[str, Any]) -> None:
    """ValueError: activations must be transformed before they are multiplied."""
    for own in (settings, settings.get("meta")):
        for name in _TRANSFORMS if isinstance(own, dict) else ():
            value = own.get(name)  # type: ignore[union-attr]
            wanted = value.get("config_groups", value) if isinstance(value, dict) else value
            if wanted and str(wanted).lower() != "none":
                raise ValueError(
                    f"{name} is not implemented, got {value!r}: inputs of some weights would have to be rotated"
                )


def read_names(settings: dict[str, Any], name: str) -> list[str]:
    """Names of modules or of their classes, or expressions for them ("re:..."); none where it is null or not there."""
    value = settings.get(name)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name} must be a list of names, got {value!r}")
    for each in value:
        if each.startswith("re:"):
            check_pattern(name, each.removeprefix("re:"))
    return list(value)


def read_objects(settings: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Settings by name or pattern; none where it is null or not there."""
    value = settings.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(each, dict | None) for each in value.values()):
        raise ValueError(f"{name} must be an object of objects, got {value!r}")
    return {key: each or {} for key, each in value.items()}


def check_pattern(name: str, pattern: str) -> None:
    """ValueError: it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}") from None


def warn_of_unknown(method: str, settings: dict[str, Any], where: str) -> None:
    """Say which settings have no effect because nothing here knows them."""
    if method not in _KNOWN:
        return
    known = {"quant_method", *_TRANSFORMS, *_KNOWN[method].split()}
    # What is off, or empty, asks for nothing.
    unknown = sorted(name for name, value in settings.items() if name not in known and value)
    if unknown:
        warn_once(logger, "%s has settings that are not known here and have no effect: %s", where, ", ".join(unknown))
