"""Layers after the pooling, from the folders that sentence-transformers writes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vllm.config import PoolerConfig
from vllm.model_executor.layers.pooler import Pooler
from vllm.pooling_params import PoolingParams
from vllm.transformers_utils.sentence_transformers import read_pooling, sentence_length


def make_pooler(folder) -> Pooler:
    hf_config = SimpleNamespace(raw={})
    config = SimpleNamespace(
        pooler_config=PoolerConfig(), pooling=read_pooling(folder), hf_config=hf_config, convert=""
    )
    return Pooler(config, torch.device("cpu"))


SIZES = {"in_features": 4, "out_features": 3, "bias": True}


def make_folder(folder, *kinds):
    modules = []
    for index, kind in enumerate(["Transformer", "Pooling", *kinds]):
        path = f"{index}_{kind}"
        (folder / path).mkdir()
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


def test_layers_after_normalize_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Dense after Normalize"):
        read_pooling(make_folder(tmp_path, "Normalize", "Dense"))


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_the_longest_text_under_older_names(tmp_path, kind):
    assert sentence_length(tmp_path) is None
    (tmp_path / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 75}')
    assert sentence_length(tmp_path) == 75
