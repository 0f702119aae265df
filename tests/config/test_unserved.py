"""Configurations of what is not done: callers build them, neutral ones pass, the others are refused by name."""

from __future__ import annotations

from dataclasses import field

import pytest

import vllm.config as config
from vllm.config.unserved import UnservedConfig, as_config, check_neutral
from vllm.config.utils import config as dataclass_of
from vllm.config.utils import get_attr_docs, get_field, hash_factors
from vllm.exceptions import VLLMValidationError

KINDS = [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, UnservedConfig)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_defaults_ask_for_nothing(kind):
    assert kind().asked() == {}
    assert kind().is_neutral() is not kind.asks_always
    assert len(kind.instead) > 20
    assert kind.harmless <= {item for item in kind.__dataclass_fields__}
    for neutral in (None, False, {}, "", 0, "auto"):
        check_neutral("argument", kind, neutral)


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        (config.KVTransferConfig, {"kv_connector": "Nixl", "kv_role": "kv_both"}, "kv_connector='Nixl'"),
        (config.SpeculativeConfig, {"parallel_drafting": True}, "parallel_drafting=True"),
        (config.PoolerConfig, config.PoolerConfig(pooling_type="MEAN"), "pooling_type='MEAN'"),
        (config.StructuredOutputsConfig, {"reasoning_parser": "qwen3"}, "reasoning_parser='qwen3'"),
        (config.CompilationConfig, {"mode": 3}, "mode=<CompilationMode.VLLM_COMPILE"),
        (config.LoadConfig, {"load_format": "tensorizer"}, "load_format='tensorizer'"),
        (config.OffloadConfig, config.OffloadConfig(uva=config.UVAOffloadConfig(cpu_offload_gb=4)), "cpu_offload_gb"),
    ],
)
def test_what_is_asked_for_is_refused_by_name(kind, value, named):
    with pytest.raises(VLLMValidationError) as caught:
        check_neutral("the_argument", kind, value)
    assert caught.value.parameter == "the_argument"
    assert "the_argument" in str(caught.value) and named in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (config.LoadConfig, {"load_format": "safetensors", "download_dir": "/weights"}),
        (config.CompilationConfig, {"mode": 0, "cudagraph_mode": "none"}),
        (config.MultiModalConfig, {"limit_per_prompt": {"image": 0}, "mm_processor_cache_gb": 0}),
        (config.KVTransferConfig, {"kv_buffer_device": "cpu"}),
        (config.PoolerConfig, config.PoolerConfig(use_activation=False)),
    ],
)
def test_what_changes_nothing_passes(kind, value):
    check_neutral("the_argument", kind, value)


@pytest.mark.parametrize(
    ("kind", "fields", "parameter"),
    [
        (config.SpeculativeConfig, {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        (config.CompilationConfig, {"mode": 9}, "mode"),
        (config.CompilationConfig, {"cudagraph_mode": "SOME"}, "cudagraph_mode"),
        (config.KVTransferConfig, {"kv_connector": "Nixl"}, "kv_role"),
    ],
)
def test_bad_values_are_named(kind, fields, parameter):
    with pytest.raises(VLLMValidationError) as caught:
        kind(**fields)
    assert caught.value.parameter == parameter


def test_as_config():
    assert as_config("load_config", config.LoadConfig, None) is None
    assert as_config("load_config", config.LoadConfig, {"device": "cpu"}) == config.LoadConfig(device="cpu")
    with pytest.raises(VLLMValidationError, match="has no field 'rank'"):
        as_config("load_config", config.LoadConfig, {"rank": 8})
    with pytest.raises(VLLMValidationError, match="must be a LoadConfig or a dict of its fields, got int"):
        as_config("load_config", config.LoadConfig, 8)


def test_cuda_graph_modes():
    mode = config.CUDAGraphMode
    assert mode.FULL_AND_PIECEWISE.decode_mode() is mode.FULL
    assert mode.FULL_AND_PIECEWISE.mixed_mode() is mode.PIECEWISE
    assert mode.FULL_DECODE_ONLY.separate_routine() and not mode.FULL.separate_routine()
    assert mode.FULL_DECODE_ONLY.has_mode(mode.NONE) and mode.FULL_DECODE_ONLY.has_full_cudagraphs()
    assert not mode.PIECEWISE.has_full_cudagraphs()
    made = config.CompilationConfig(mode="vllm_compile", cudagraph_mode="full", pass_config={"eliminate_noops": False})
    assert (made.mode, made.cudagraph_mode) == (config.CompilationMode.VLLM_COMPILE, mode.FULL)
    assert made.pass_config == config.PassConfig(eliminate_noops=False)


def test_kv_roles():
    both = config.KVTransferConfig(kv_connector="Nixl", kv_role="kv_both", kv_connector_extra_config={"a": 1})
    assert both.is_kv_transfer_instance and both.is_kv_producer and both.is_kv_consumer
    assert both.get_from_extra_config("a", 0) == 1
    assert not config.KVTransferConfig().is_kv_transfer_instance
    assert not config.KVTransferConfig(kv_connector="Nixl", kv_role="kv_consumer").is_kv_producer


def test_copies_with_other_values():
    scheduler = config.SchedulerConfig(max_num_seqs=4)
    assert config.replace(scheduler, max_num_seqs=8).max_num_seqs == 8
    offload = config.update_config(config.OffloadConfig(), {"uva": {"cpu_offload_gb": 2}})
    assert offload.uva.cpu_offload_gb == 2
    with pytest.raises(ValueError, match="SchedulerConfig has no field 'seqs'"):
        config.update_config(scheduler, {"seqs": 8})


def test_the_current_configuration():
    with pytest.raises(AssertionError, match="set_current_vllm_config"):
        config.get_current_vllm_config()
    marker = object()
    with config.set_current_vllm_config(marker):  # type: ignore[arg-type]
        assert config.get_current_vllm_config() is marker
    assert config.get_current_vllm_config_or_none() is None


def test_fields_of_callers_configurations():
    @dataclass_of
    class Mine:
        size: int = 3
        """How large it is."""
        names: list[str] = field(default_factory=list)
        needed: int = field(kw_only=True)

    assert Mine(needed=1).size == get_field(Mine, "size").default == 3
    assert get_field(Mine, "names").default_factory is list
    assert get_attr_docs(Mine) == {"size": "How large it is."}
    with pytest.raises(ValueError, match="no default"):
        get_field(Mine, "needed")
    with pytest.raises(ValueError, match="no field 'other'"):
        get_field(Mine, "other")
    assert hash_factors({"a": 1, "b": 2}) == hash_factors({"b": 2, "a": 1}) != hash_factors({"a": 2, "b": 1})
