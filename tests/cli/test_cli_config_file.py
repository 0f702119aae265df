"""--config: flags from a YAML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from vllm.cli.main import build_parser, main

FILE = ["score", "a.jsonl", "--labels", "x"]


@pytest.fixture
def parse(tmp_path: Path):
    def parse(content: str, arguments: list[str] = FILE) -> argparse.Namespace:
        path = tmp_path / "flags.yaml"
        path.write_text(content, encoding="utf-8")
        return build_parser().parse_args([*arguments, "--config", str(path)])

    return parse


@pytest.mark.parametrize(
    ("content", "name", "value"),
    [
        ("max-model-len: 64", "max_model_len", 64),
        ("max_model_len: 64", "max_model_len", 64),
        ("gpu_memory_utilization: 1e-1", "gpu_memory_utilization", 0.1),
        ("model: some/folder", "model", "some/folder"),
        ("model: ~", "model", None),
        ("text-field: -x", "text_field", "-x"),
        ("quiet: true", "quiet", True),
        ("quiet: false", "quiet", False),
        ("enable_prefix_caching: false", "enable_prefix_caching", False),
        ("enforce-eager: true", "enforce_eager", True),
        ("hf_overrides: {rope_theta: 5, deep: {a: [1]}}", "hf_overrides", {"rope_theta": 5, "deep": {"a": [1]}}),
        ("logits_processors: [a.b:C, d.e:F]", "logits_processors", ["a.b:C", "d.e:F"]),
        ("scheduling-policy: priority", "scheduling_policy", "priority"),
        ("", "quiet", False),
    ],
)
def test_values_are_those_of_the_flags(parse: Any, content: str, name: str, value: Any) -> None:
    assert getattr(parse(content), name) == value


def test_the_command_line_wins(parse: Any) -> None:
    content = "max-model-len: 64\nblock_size: 32\nquiet: true\nlabels: [y, z]\nenforce_eager: true"
    args = parse(content, [*FILE, "--max-model-len", "128", "--no-enforce-eager"])
    assert (args.max_model_len, args.block_size, args.quiet) == (128, 32, True)
    assert (args.labels, args.enforce_eager) == (["x"], False)
    assert parse("model: a", ["serve", "b"]).model == parse("model: a", ["serve", "--model", "b"]).model == "b"


def test_a_flag_overrules_those_it_excludes(parse: Any) -> None:
    args = parse("labels: [y]\npicture: a.png", ["score", "a.jsonl", "--label-ids", "1", "--no-picture"])
    assert (args.labels, args.label_ids, args.picture, args.no_picture) == (None, [1], None, True)


def test_required_flags_may_come_from_the_file(parse: Any) -> None:
    """A list there ends there: the positional argument that follows is none of it."""
    args = parse('labels: [" yes", " no"]', ["score", "a.jsonl"])
    assert (args.labels, args.file) == ([" yes", " no"], Path("a.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-modle-len: 64", "unknown key 'max-modle-len'; the nearest known one is 'max-model-len'"),
        ("5: 64", "unknown key 5"),
        ("config: other.yaml", "unknown key 'config'"),
        ("file: a.jsonl", "unknown key 'file'"),
        ("no_enforce_eager: true", "unknown key 'no_enforce_eager'; the nearest known one is 'enforce-eager'"),
        ("max-model-len: 64\nmax_model_len: 64", "'max_model_len' and 'max-model-len' are the same flag"),
        ("max-model-len: many", "argument --max-model-len: must be an integer such as 4096, 4k or 4K, got 'many'"),
        ("max-model-len: true", "max-model-len must be a text or a number, got True"),
        ("max-model-len: [1, 2]", "max-model-len must be one value, got [1, 2]"),
        ("logits_processors: []", "logits_processors must be a list of values, got []"),
        ("logits_processors: [no]", "logits_processors must be a text or a number, got False"),
        ("quiet: 1", "quiet must be true or false, got 1"),
        ("enforce_eager: 'no'", "enforce_eager must be true or false, got 'no'"),
        ("device: tpu", "argument --device: invalid choice: 'tpu'"),
        ("- a", "must hold `name: value` lines, not a list"),
        ("a: b\nc: [", "line 2: not YAML"),
        ("label_ids: [1]\nlabels: [y]", "not allowed with"),
    ],
)
def test_bad_files(parse: Any, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(content, ["score", "a.jsonl"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm score: error: ") and message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("name", "message"), [("none.yaml", "No such file"), ("latin.yaml", "is not UTF-8")])
def test_files_that_cannot_be_read(tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(SystemExit) as end:
        main([*FILE, f"--config={tmp_path / name}"])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_what_follows_a_double_dash_is_no_flag(tmp_path: Path) -> None:
    args = build_parser().parse_args(["score", "--labels", "x", "--", "--config"])
    assert (args.file, args.config) == (Path("--config"), None)
