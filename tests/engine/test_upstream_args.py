"""Upstream's engine arguments: taken at their neutral values, refused by name where they ask for more."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields

import pytest
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import EngineArgs, SamplingParams
from vllm.config import CompilationConfig, PoolerConfig, ProfilerConfig, WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.arguments import is_neutral
from vllm.engine.upstream_args import UpstreamArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int_or_auto

REFUSED = [item for item in fields(UpstreamArgs) if item.metadata["refused"]]
UNUSED = [item for item in fields(UpstreamArgs) if not item.metadata["refused"]]


def asks_for_something(default):
    """A value of the default's type that is neither it nor neutral."""
    if isinstance(default, bool):
        return True
    if isinstance(default, (int, float)):
        return default + 2
    return "something"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("item", REFUSED, ids=lambda item: item.name)
def test_refused_by_name_before_the_model_is_read(item):
    value = asks_for_something(item.default)
    with pytest.raises(ValueError, match=rf"^{item.name}=.*not supported: ."):
        EngineArgs(model="no/such/folder", **{item.name: value}).create_engine_config()


def test_neutral_values_change_nothing(folder, caplog):
    plain = EngineArgs(model=folder).create_engine_config()
    neutral = {item.name: value for item in fields(UpstreamArgs) for value in (None, item.default)}
    for value in (None, False, 0, "", "auto", {}, []):
        assert is_neutral(value, default="some")
    caplog.clear()
    assert EngineArgs(model=folder, **neutral).create_engine_config() == plain
    assert not caplog.records


def test_what_changes_nothing_says_so_once(folder, caplog):
    caplog.set_level(logging.WARNING, "vllm")
    given = {item.name: asks_for_something(item.default) for item in UNUSED if item.default is not True}
    plain = EngineArgs(model=folder).create_engine_config()
    assert EngineArgs(model=folder, **given).create_engine_config() == plain
    said = [record.getMessage().partition("=")[0] for record in caplog.records]
    assert sorted(said) == sorted(given)


def test_how_weights_come(folder):
    plain = EngineArgs(model=folder).create_engine_config()
    for given in (None, {}, {"backend": "nccl"}, WeightTransferConfig("ipc")):
        config = EngineArgs(model=folder, weight_transfer_config=given).create_engine_config()
        assert config == plain and config.weight_transfer_config is given  # /server_info shows it
    with pytest.raises(ValueError, match="backend must be one of nccl, ipc, got 'sharded_rdt'"):
        EngineArgs(model=folder, weight_transfer_config={"backend": "sharded_rdt"}).create_engine_config()
    with pytest.raises(ValueError, match="backend must be one of nccl, ipc, got 'nccl_m2n'"):
        WeightTransferConfig("nccl_m2n")


def test_configuration_objects(folder):
    plain = EngineArgs(model=folder).create_engine_config()
    assert EngineArgs(model=folder, pooler_config=PoolerConfig()).create_engine_config() == plain
    assert EngineArgs(model=folder, compilation_config=CompilationConfig(mode=3)).create_engine_config() == plain
    with pytest.raises(ValueError, match="pooler_config"):
        EngineArgs(model=folder, pooler_config=PoolerConfig(pooling_type="MEAN")).create_engine_config()


@pytest.mark.parametrize("kind", [dict, ProfilerConfig])
def test_a_profilers_folder(folder, kind):
    given = kind(profiler="torch", torch_profiler_dir="traces")
    assert EngineArgs(model=folder, profiler_config=given).create_engine_config().torch_profiler_dir == "traces"


def test_none_is_the_default_of_every_argument(folder):
    given = {item.name: None for item in fields(AsyncEngineArgs) if item.name != "model"}
    assert (
        AsyncEngineArgs(model=folder, **given).create_engine_config() == EngineArgs(model=folder).create_engine_config()
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("convert", "rank", "convert must be"),
        ("model_impl", "theirs", "model_impl must be"),
        ("config_format", "mistral", "config_format must be"),
        ("load_format", "tensorizer", "load_format must be one of"),
        ("override_generation_config", {"seed": 3}, "got 'seed'"),
        ("generation_config", "/no/such/folder", "generation_config must be"),
        ("profiler_config", {"profiler": "cuda"}, "profiler='cuda'"),
        ("kv_cache_memory_bytes", 0, "kv_cache_memory_bytes must be"),
    ],
)
def test_done_arguments_refuse_what_they_cannot_do(folder, name, value, problem):
    with pytest.raises(ValueError, match=problem):
        EngineArgs(model=folder, **{name: value}).create_engine_config()


def test_sampling_defaults(folder, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "max_new_tokens": 9}')
    args = EngineArgs(model=folder, generation_config=str(tmp_path), override_generation_config={"top_k": 3})
    assert args.create_engine_config().model_config.default_sampling_params == {
        "temperature": 0.5, "top_k": 3, "max_tokens": 9
    }  # fmt: skip
    args = EngineArgs(model=folder, generation_config="vllm", override_generation_config={"max_new_tokens": 4})
    assert args.create_engine_config().model_config.default_sampling_params == {"max_tokens": 4}


@pytest.mark.parametrize("value", ["auto", -1, None])
def test_the_context_is_the_models_own(folder, value):
    config = EngineArgs(model=folder, max_model_len=value).create_engine_config()
    assert config.model_config.max_model_len == config.model_config.hf_config.max_context_len


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TORCH_SDPA", "XFORMERS"])
def test_another_engines_attention_is_a_warning(folder, name, caplog):
    for given in ({"attention_backend": name}, {"attention_config": {"backend": name}}):
        config = EngineArgs(model=folder, device="cpu", **given).create_engine_config()
        assert config.model_config.attention_backend == "auto"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("-1", -1),
        ("4k", 4000),
        ("4K", 4096),
        ("1M", 2**20),
        ("1.5m", 1_500_000),
        ("auto", -1),
        ("2g", 2 * 10**9),
    ],
)
def test_sizes(text, number):
    assert human_readable_int_or_auto(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "4kk", "many", "0.0001k"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError):
        human_readable_int_or_auto(text)


def test_flags():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = EngineArgs.from_cli_args(
        parser.parse_args(
            '-tp 2 --max-model-len 4k --compilation-config {"mode":3} -O 2 --enable-lora --no-enable-prefix-caching '
            '--cudagraph-capture-sizes 1 2 --hf-overrides {"a":1} --limit-mm-per-prompt {"image":0}'.split()
        )
    )
    assert (args.tensor_parallel_size, args.max_model_len, args.enable_lora) == (2, 4000, True)
    assert (args.compilation_config, args.enable_prefix_caching) == ({"mode": 3}, False)
    assert (args.cudagraph_capture_sizes, args.hf_overrides) == ([1, 2], {"a": 1})
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()


def test_arguments_of_other_versions(folder):
    # Neutral ones are taken whatever they are called; the others only if it is known what they asked for.
    llm = make_tiny_llm(folder, use_v2_block_manager=True, disable_log_requests=True, never_heard_of=None, other="auto")
    assert llm.generate("a", SamplingParams(max_tokens=1, guided_decoding=None))[0].finished
    with pytest.raises(TypeError, match="never_heard_of"):
        make_tiny_llm(folder, never_heard_of=3)


def test_flags_of_a_callers_parser_stay_its_own():
    parser = FlexibleArgumentParser()
    parser.add_argument("--log-level", default="debug", choices=["debug"])
    args = AsyncEngineArgs.add_cli_args(parser).parse_args(["--model", "x", "--enable-log-requests", "-tp", "2"])
    args.reasoning_parser = "qwen3"
    given = AsyncEngineArgs.from_cli_args(args)
    assert given.reasoning_parser == "", "the server's flag"
    assert (args.log_level, given.enable_log_requests, given.tensor_parallel_size) == ("debug", True, 2)
    assert (
        not AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(), async_args_only=True)
        .parse_args([])
        .enable_log_requests
    )
