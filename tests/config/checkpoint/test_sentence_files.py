"""Folders of sentence-transformers with odd, damaged or contradictory files: errors name the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from vllm.config.checkpoint.hub import download
from vllm.config.checkpoint.late_interaction import read_late_interaction
from vllm.config.checkpoint.sentence_transformers import (
    PoolingLayer,
    check_settings,
    default_prompt,
    read_pair_messages,
    read_pooling,
    sentence_length,
)
from vllm.layers.pooler import _load_layer

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"}
USUAL = {
    "modules.json": [TRANSFORMER, POOLING, DENSE, NORMALIZE],
    "1_Pooling/config.json": {"pooling_mode": "cls", "embedding_dimension": 8},
    "2_Dense/config.json": {"in_features": 8, "out_features": 4},
}
SCORE = {"type": "sentence_transformers.cross_encoder.modules.LogitScore", "path": "1_Score"}
CROSS = {
    "modules.json": [TRANSFORMER, SCORE],
    "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
    "sentence_bert_config.json": {"modality_config": {"message": {"format": "flat"}}},
    "1_Score/config.json": {"true_token_id": 5, "false_token_id": 6},
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    """A text is written as it is, None leaves a file out."""
    for name, content in files.items():
        if content is None:
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_usual_folders(tmp_path: Path) -> None:
    pooling = read_pooling(write(tmp_path / "embeds", USUAL))
    assert pooling is not None and pooling.modes == ("cls",) and pooling.normalize and pooling.size(8) == 4
    pooling.check(8, "embeds")
    nested = {**USUAL, "modules.json": [TRANSFORMER, {**POOLING, "path": "a/b"}], "a/b/config.json": {}}
    pooling = read_pooling(write(tmp_path / "nested", nested))
    assert pooling is not None and pooling.modes == ("mean",) and not pooling.layers
    both = {**USUAL, "1_Pooling/config.json": {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}}
    pooling = read_pooling(write(tmp_path / "both", both))
    assert pooling is not None and pooling.modes == ("cls", "max") and pooling.size(8) == 4
    with pytest.raises(ValueError, match="both/2_Dense/config.json: in_features must be 16, what comes before, got 8"):
        pooling.check(8, "both")
    nulls = {**USUAL["2_Dense/config.json"], "bias": None, "use_residual": None}
    pooling = read_pooling(write(tmp_path / "nulls", {**USUAL, "2_Dense/config.json": nulls}))
    assert pooling is not None and pooling.layers[0].bias and not pooling.layers[0].is_residual
    messages = read_pair_messages(write(tmp_path / "cross", CROSS))
    assert messages is not None and messages.token_ids == (5, 6) and not messages.gives_logits
    assert read_pooling(tmp_path) is None and read_pair_messages(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("modules.json", "[{", "m/modules.json is not JSON: "),
        ("modules.json", {"0": TRANSFORMER}, "m/modules.json must be a list of objects with type and path, got"),
        ("modules.json", ["Transformer"], "m/modules.json must be a list of objects"),
        ("modules.json", [], "m/modules.json: the first module, and no other, must be a Transformer"),
        ("modules.json", [POOLING, TRANSFORMER], "the first module, and no other, must be a Transformer"),
        ("modules.json", [TRANSFORMER, TRANSFORMER], "the first module, and no other, must be a Transformer"),
        ("modules.json", [{"path": ""}], "m/modules.json: type of module 0 must be a text, got None"),
        ("modules.json", [TRANSFORMER, {**POOLING, "path": None}], "path of module 1 must be a text, got None"),
        ("modules.json", [TRANSFORMER, DENSE, POOLING], "Dense before the pooling is not supported"),
        ("modules.json", [TRANSFORMER, POOLING, POOLING], "Pooling before the pooling is not supported"),
        ("modules.json", [TRANSFORMER, {"type": "x.LSTM", "path": "1"}], "the module x.LSTM is not supported"),
        ("1_Pooling/config.json", None, "m/1_Pooling/config.json is missing: modules.json has a Pooling there"),
        ("1_Pooling/config.json", [], r"1_Pooling/config.json must be an object, got \[\]"),
        ("1_Pooling/config.json", {"pooling_mode": "middle"}, "pooling_mode 'middle' is not supported: it must be of"),
        ("1_Pooling/config.json", {"pooling_mode": []}, r"pooling_mode \[\] is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": 3}, "pooling_mode 3 is not supported"),
        ("1_Pooling/config.json", {"pooling_mode_min_tokens": True}, "pooling_mode_min_tokens is not supported"),
        ("2_Dense/config.json", None, "m/2_Dense/config.json is missing: modules.json has a Dense there"),
        ("2_Dense/config.json", {"out_features": 4}, "in_features must be an integer of at least 1, got None"),
        ("2_Dense/config.json", {"in_features": 8, "out_features": "4"}, "out_features must be .* 1, got '4'"),
        ("2_Dense/config.json", {"in_features": 8, "out_features": 4, "bias": 1}, "bias must be true or false, got 1"),
        (
            "2_Dense/config.json",
            {"in_features": 8, "out_features": 4, "activation_function": None},
            "activation_function must be a class's name, got None",
        ),
        (
            "2_Dense/config.json",
            {"in_features": 8, "out_features": 4, "module_input_name": "token_embeddings"},
            "module_input_name='token_embeddings' is not supported after a pooling",
        ),
        ("3_Normalize/config.json", {"module_output_name": "a"}, "3_Normalize/config.json: module_output_name='a' is"),
        (
            "config_sentence_transformers.json",
            {"model_type": "CrossEncoder"},
            "m/modules.json: a cross-encoder with a pooling of its own",
        ),
    ],
)
def test_what_cannot_be_pooled(name: str, content: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        read_pooling(write(tmp_path / "m", {**USUAL, name: content}))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("1_Score/config.json", None, "m/1_Score/config.json is missing: modules.json has a LogitScore there"),
        ("1_Score/config.json", {"false_token_id": 6}, "true_token_id must be an integer of at least 0, got None"),
        ("1_Score/config.json", {"true_token_id": "yes"}, "true_token_id must be an integer of at least 0, got 'yes'"),
        ("1_Score/config.json", {"true_token_id": 5, "false_token_id": -1}, "false_token_id must be .* 0, got -1"),
        ("1_Score/config.json", {"true_token_id": 5, "false_token_id": 5}, "false_token_id are both 5"),
        ("config_sentence_transformers.json", "", "m/config_sentence_transformers.json is not JSON"),
        (
            "config_sentence_transformers.json",
            {"model_type": "CrossEncoder", "activation_fn": "torch.nn.Tanh"},
            "activation_fn tanh of a LogitScore is not supported",
        ),
        ("sentence_bert_config.json", [1], r"m/sentence_bert_config.json must be an object, got \[1\]"),
        ("sentence_bert_config.json", {"modality_config": []}, "modality_config must be an object, got"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"message": {}}, "processing_kwargs": {"common": {"stride": 3}}},
            "m/sentence_bert_config.json: stride=3 in common of processing_kwargs is not supported; 0 is",
        ),
    ],
)
def test_what_cannot_score_pairs(name: str, content: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        read_pair_messages(write(tmp_path / "m", {**CROSS, name: content}))


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_seq_length": 75, "processing_kwargs": {"text": {"max_length": 60}, "common": {"max_length": 50}}}, 60),
        ({"max_seq_length": 75, "processing_kwargs": {"common": {"max_length": 50}}}, 50),
        ({"max_seq_length": 75, "processing_kwargs": {"chat_template": {"max_length": 40}}}, 75),
        ({"modality_config": {"message": {}}, "processing_kwargs": {"chat_template": {"max_length": 40}}}, 40),
        ({"max_seq_length": None, "processing_kwargs": {"text": {"max_length": None}}}, None),
    ],
)
def test_the_longest_text(settings: dict[str, Any], length: int | None, tmp_path: Path) -> None:
    assert sentence_length(write(tmp_path, {"sentence_bert_config.json": settings})) == length


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_seq_length": "512"}, "max_seq_length must be a positive integer, got '512'"),
        ({"max_seq_length": True}, "max_seq_length must be a positive integer, got True"),
        (
            {"processing_kwargs": {"text": {"max_length": -3}}},
            "max_length in text of processing_kwargs must be a positive integer, got -3",
        ),
    ],
)
def test_what_is_no_length(settings: dict[str, Any], field: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"sentence_bert_config.json": settings})
    with pytest.raises(ValueError, match=f"m/sentence_bert_config.json: {field}"):
        sentence_length(folder)


NEUTRAL = {"add_special_tokens": True, "return_attention_mask": True, "verbose": False, "truncation_side": "right"}
NEUTRAL |= {"padding": True, "truncation": True, "return_tensors": "pt", "return_token_type_ids": True, "stride": 0}


def test_settings_of_texts_that_would_be_ignored(tmp_path: Path) -> None:
    def given(own: dict[str, Any], text: dict[str, Any]) -> Path:
        files = {"config_sentence_transformers.json": own}
        return write(tmp_path / "m", files | {"sentence_bert_config.json": {"processing_kwargs": {"text": text}}})

    cross = {"model_type": "CrossEncoder"}
    check_settings(given({}, {**NEUTRAL, "return_token_type_ids": False}))
    check_settings(given(cross, NEUTRAL))
    for own, name, value in (
        ({}, "add_special_tokens", False),
        ({}, "truncation_side", "left"),
        ({}, "return_attention_mask", False),
        # It changes the second text's types of pairs.
        (cross, "return_token_type_ids", False),
        ({}, "text_pair", "a"),
    ):
        with pytest.raises(ValueError, match=f"{name}={value!r} in text of processing_kwargs is not supported"):
            check_settings(given(own, {**NEUTRAL, name: value}))
    message = {"modality_config": {"message": {"format": "flat"}}}
    folder = write(tmp_path / "m", {"config_sentence_transformers.json": {}, "sentence_bert_config.json": message})
    with pytest.raises(ValueError, match="message in modality_config, .* trained on plain texts, remove message there"):
        check_settings(folder)
    with pytest.raises(ValueError, match="m/config_sentence_transformers.json: prompts must be an object, got"):
        default_prompt(write(folder, {"config_sentence_transformers.json": {"prompts": ["a"]}}))
    mask = [TRANSFORMER, {"type": "x.MultiVectorMask", "path": "1"}]
    folder = write(tmp_path / "late", {"modules.json": mask, "1/config.json": "nonsense"})
    with pytest.raises(ValueError, match="1/config.json is not JSON"):
        read_late_interaction(folder, {})


@pytest.mark.parametrize(
    ("kind", "weights", "activation", "problem"),
    [
        ("Dense", {"linear.weight": (4, 8)}, "Identity", "2_Dense/model.safetensors has weights .*, but a Dense has"),
        ("Dense", {"linear.weight": (8, 4), "linear.bias": (4,)}, "Identity", r"linear.weight': \(8, 4\)"),
        ("LayerNorm", {"weight": (4,)}, "Identity", "has weights .*, but a LayerNorm has .*norm.weight"),
        ("Dense", {}, "Softplus2", "2_Dense/config.json: the activation Softplus2 is not supported"),
        ("Dense", {}, "Linear", "the activation Linear is not supported"),
        ("Dense", {}, "PReLU", "the activation PReLU is not supported"),
    ],
)
def test_layers_that_do_not_fit(
    kind: str, weights: dict[str, Any], activation: str, problem: str, tmp_path: Path
) -> None:
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    save_file({name: torch.zeros(shape) for name, shape in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=problem):
        _load_layer(PoolingLayer(kind, folder, 8, 4, True, activation))


@pytest.mark.parametrize(
    ("stored", "older"),
    [
        (["model.safetensors", "2_Dense/model.safetensors"], []),
        (["model.safetensors"], ["2_Dense/pytorch_model.bin"]),
        ([], ["pytorch_model*.bin", "2_Dense/pytorch_model.bin"]),
    ],
)
def test_older_weights_are_downloaded_where_there_are_no_others(
    stored: list[str], older: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "m", USUAL | dict.fromkeys(stored, ""))
    asked: list[list[str]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append([each for each in options["allow_patterns"] if each.endswith(".bin")])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert download("owner/name") == folder
    assert asked == [[], older] if older else asked == [[]]
