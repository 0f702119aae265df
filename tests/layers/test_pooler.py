"""Layers after the pooling, from the folders that sentence-transformers writes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vllm.config import PoolerConfig
from vllm.config.checkpoint.sentence_transformers import read_pooling, sentence_length
from vllm.layers.pooler import Pooler
from vllm.pooling_params import PoolingParams


def make_pooler(folder) -> Pooler:
    hf_config = SimpleNamespace(raw={})
    config = SimpleNamespace(
        pooler_config=PoolerConfig(),
        pooling=read_pooling(folder),
        hf_config=hf_config,
        convert="",
        path=str(folder),
        attn_type="decoder",
    )
    return Pooler(config, torch.device("cpu"))


SIZES = {"in_features": 4, "out_features": 3, "bias": True}


def make_folder(folder, *kinds):
    modules = []
    for index, kind in enumerate(["Transformer", "Pooling", *kinds]):
        path = f"{index}_{kind}"
        (folder / path).mkdir(parents=True)
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_dense_layers_are_read_from_either_kind_of_file(tmp_path, name):
    torch.manual_seed(0)
    folder = make_folder(tmp_path, "Dense", "Normalize")
    weights = {"linear.weight": torch.randn(3, 4), "linear.bias": torch.randn(3)}
    (save_file if name.endswith("safetensors") else torch.save)(weights, folder / "2_Dense" / name)
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(SIZES | activation))
    pooler = make_pooler(folder)
    hidden = torch.randn(5, 4)
    dense = torch.tanh(hidden.mean(0) @ weights["linear.weight"].T + weights["linear.bias"])
    with torch.inference_mode():
        vector = pooler(hidden, range(5), PoolingParams(task="embed"))
    torch.testing.assert_close(vector, dense / dense.norm())


def test_a_dense_layer_without_weights_is_named(tmp_path):
    folder = make_folder(tmp_path, "Dense")
    (folder / "2_Dense" / "config.json").write_text(json.dumps(SIZES))
    with pytest.raises(ValueError, match="2_Dense has neither"):
        make_pooler(folder)


def test_layers_keep_their_order(tmp_path):
    folder = make_folder(tmp_path, "Normalize", "LayerNorm", "Dropout", "Normalize")
    weights = {"norm.weight": torch.randn(4), "norm.bias": torch.randn(4)}
    save_file(weights, folder / "3_LayerNorm" / "model.safetensors")
    hidden = torch.randn(5, 4)
    vector = make_pooler(folder)(hidden, range(5), PoolingParams(task="embed"))
    mean = torch.nn.functional.normalize(hidden.mean(0), dim=-1)
    normed = torch.nn.functional.layer_norm(mean, (4,), weights["norm.weight"], weights["norm.bias"])
    torch.testing.assert_close(vector, normed / normed.norm())
    with pytest.raises(ValueError, match="WordWeights is not supported"):
        read_pooling(make_folder(tmp_path / "other", "WordWeights"))


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_the_longest_text_under_older_names(tmp_path, kind):
    assert sentence_length(tmp_path) is None
    (tmp_path / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 75}')
    assert sentence_length(tmp_path) == 75


@pytest.mark.parametrize(("given", "length"), [(16, 16), (1e30, None), (None, None)])
def test_the_longest_text_by_the_tokenizer(tmp_path, given, length):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": given}))
    assert sentence_length(tmp_path) is None
    (tmp_path / "modules.json").write_text("[]")
    assert sentence_length(tmp_path) == length
