"""Settings of adapters: limits, neutral values, and the engine arguments that they come from."""

from __future__ import annotations

import pytest

from vllm.config import LoRAConfig
from vllm.engine.arg_utils import EngineArgs


def test_as_many_are_kept_as_a_step_has_unless_more_are_asked_for():
    assert LoRAConfig(max_loras=3).max_cpu_loras == 3
    assert LoRAConfig(max_loras=3, max_cpu_loras=7).num_kept == 7


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_lora_rank": 0}, "max_lora_rank must be an integer of at least 1, got 0"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_loras": True}, "max_loras"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras must be at least max_loras=4"),
        ({"lora_dtype": "int8"}, "lora_dtype must be one of"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"default_mm_loras": {"image": "/a"}}, "default_mm_loras"),
        ({"enable_tower_connector_lora": True}, "enable_tower_connector_lora"),
    ],
)
def test_bad_values_are_named(fields, named):
    with pytest.raises(ValueError, match=named):
        LoRAConfig(**fields)


def test_neutral_values_of_upstreams_pass():
    config = LoRAConfig(lora_dtype=None, target_modules=[], default_mm_loras={}, fully_sharded_loras=True)
    assert config.lora_dtype == "auto"
    config.check_dtype("float32")
    with pytest.raises(ValueError, match="lora_dtype must be auto or the model's dtype, bfloat16, got 'float32'"):
        LoRAConfig(lora_dtype="float32").check_dtype("bfloat16")


def test_arguments_make_one_only_where_adapters_are_enabled(caplog):
    made = EngineArgs(enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=None).create_lora_config()
    assert made == LoRAConfig(max_lora_rank=8, max_loras=2, max_cpu_loras=2)
    assert EngineArgs().create_lora_config() is None
    assert EngineArgs(max_loras=2).create_lora_config() is None
    with pytest.raises(ValueError, match="lora_target_modules|target_modules"):
        EngineArgs(enable_lora=True, lora_target_modules=["q_proj"]).create_lora_config()
