"""FlexibleArgumentParser takes flags as upstream's does."""

from __future__ import annotations

import argparse
import json

import pytest

from vllm.utils import FlexibleArgumentParser
from vllm.utils.argparse_utils import FlexibleArgumentParser as SameParser
from vllm.utils.argparse_utils import human_readable_int, human_readable_int_or_auto


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser()
    made.add_argument("--model-name")
    made.add_argument("--batch-size", type=int)
    made.add_argument("--hf-overrides", type=json.loads)
    made.add_argument("-cc", "--compilation-config", type=json.loads)
    made.add_argument("--optimization-level", type=int)
    return made


def test_one_class_at_both_paths():
    assert FlexibleArgumentParser is SameParser


@pytest.mark.parametrize("flags", [["--batch_size", "3"], ["--batch-size=3"], ["--batch_size=3"]])
def test_underscores_are_hyphens(parser, flags):
    assert parser.parse_args(flags).batch_size == 3


def test_underscores_in_values_stay(parser):
    assert parser.parse_args(["--model_name=a_b"]).model_name == "a_b"
    assert parser.parse_args(["--model_name", "--a_b"[2:]]).model_name == "a_b"


@pytest.mark.parametrize("flags", [["-O2"], ["-O=2"], ["-O", "2"], ["--optimization_level", "2"]])
def test_levels(parser, flags):
    assert parser.parse_args(flags).optimization_level == 2


def test_values_of_json_objects(parser):
    args = parser.parse_args(
        [
            "--hf_overrides.rope_scaling.factor", "2.0", "--hf-overrides.text=a.b", "--hf-overrides.none", "null",
            "-cc.custom_ops+", "-quant_fp8", "-cc.custom_ops+=+silu,-norm", "-cc.flag=true", "--model-name=m",
        ]
    )  # fmt: skip
    assert args.hf_overrides == {"rope_scaling": {"factor": 2.0}, "text": "a.b", "none": None}
    assert args.compilation_config == {"custom_ops": ["-quant_fp8", "+silu", "-norm"], "flag": True}
    assert args.model_name == "m"


def test_the_last_of_two_values_counts_and_says_so(parser, vllm_log):
    args = parser.parse_args(["--hf-overrides.key", "1", "--hf-overrides.key", "2"])
    assert args.hf_overrides == {"key": 2}
    assert "duplicate of --hf-overrides.key" in vllm_log.text


@pytest.fixture
def server() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser()
    made.add_argument("command")
    made.add_argument("model_tag", nargs="?")
    made.add_argument("--model")
    made.add_argument("--port", type=int)
    made.add_argument("--names", nargs="*")
    made.add_argument("--trust", action="store_true")
    made.add_argument("--chunked", action=argparse.BooleanOptionalAction)
    made.add_argument("--overrides", type=json.loads)
    return made


CONFIG = "port: 1234\nnames: [a, b]\ntrust: true\nchunked: false\noverrides:\n  key: {inner: 1}\n"


def test_a_file_of_flags(server, tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text(CONFIG)
    args = server.parse_args(["serve", "m", "--config", str(path)])
    assert (args.model_tag, args.port, args.names, args.trust) == ("m", 1234, ["a", "b"], True)
    assert (args.chunked, args.overrides) == (False, {"key": {"inner": 1}})
    for flags in (["--config", str(path), "--port", "1"], ["--port", "1", f"--config={path}"]):
        assert server.parse_args(["serve", "m", *flags]).port == 1


def test_a_file_that_cannot_be_used(server, tmp_path):
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ValueError, match="name: value"):
        server.parse_args(["serve", "m", "--config", str(tmp_path / "list.yaml")])
    with pytest.raises(ValueError, match="YAML file"):
        server.parse_args(["serve", "m", "--config", "flags.json"])
    with pytest.raises(ValueError, match="needs the path"):
        server.parse_args(["serve", "m", "--config", "--port", "1"])
    with pytest.raises(FileNotFoundError):
        server.parse_args(["serve", "m", "--config", str(tmp_path / "none.yaml")])
    (tmp_path / "flags.yaml").write_text("port: 1\n")
    with pytest.raises(ValueError, match="No model specified"):
        server.parse_args(["serve", "--config", str(tmp_path / "flags.yaml")])


def test_a_model_by_flag_is_the_positional_one(server):
    args = server.parse_args(["serve", "--port", "1", "--model", "m", "--trust"])
    assert (args.model_tag, args.model, args.port, args.trust) == ("m", None, 1, True)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--enable-x", "--disable-logs"], (True, True)),
        (["--disable_x", "--enable-logs"], (False, False)),
        (["--no-enable-x", "--no-disable-logs"], (False, False)),
    ],
)
def test_pairs_of_flags(flags, expected):
    parser = FlexibleArgumentParser()
    group = parser.add_subparsers().add_parser("serve").add_argument_group("g", description="Short.\n\nLong.")
    group.add_argument("--enable-x", action=argparse.BooleanOptionalAction)
    group.add_argument("--disable-logs", action=argparse.BooleanOptionalAction)
    args = parser.parse_args(["serve", *flags])
    assert (args.enable_x, args.disable_logs) == expected


def test_help_shows_the_first_paragraph():
    parser = FlexibleArgumentParser()
    parser.add_argument_group("g", description="Short.\n\nLong.").add_argument("--x")
    assert "Short." in parser.format_help() and "Long." not in parser.format_help()


def test_a_deprecated_flag_is_a_warning(vllm_log):
    parser = FlexibleArgumentParser()
    parser.add_argument("--old", deprecated=True)
    parser.parse_args([])
    assert not vllm_log.text
    assert parser.parse_args(["--old=1"]).old == "1"
    assert "argument 'old' is deprecated" in vllm_log.text


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1M", 2**20), ("2g", 2 * 10**9), ("-1", -1)],
)
def test_sizes(text, number):
    assert human_readable_int(text) == number


@pytest.mark.parametrize("text", ["1.5K", "1.5", "k", "4kb", "", "x"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError):
        human_readable_int(text)


def test_auto_is_a_size_too():
    assert (human_readable_int_or_auto("AUTO"), human_readable_int_or_auto("1k")) == (-1, 1000)


def test_ports():
    parser = FlexibleArgumentParser()
    assert parser.check_port("8000") == 8000
    for text in ("80", "70000", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            parser.check_port(text)
