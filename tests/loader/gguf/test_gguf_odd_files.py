"""GGUF files with unusual headers: read as they mean, or refused by name."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from models_util import make_hf_model
from safetensors.torch import load_file
from test_gguf import write_gguf

from vllm import LLM
from vllm.loader import resolve_model
from vllm.loader.gguf.convert import converted_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    write_gguf(path, "llama", make_hf_model("llama", "small"))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


def changed(base: Path, path: Path, header: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """`base` with other values of keys (None: without the key), and further tensors."""
    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment := header.pop("general.alignment", None):
        writer.add_custom_alignment(alignment)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and name not in header:
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    for name, value in header.items():
        if value is not None:
            kinds[type(value)](name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array.astype(np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


ROPE = "llama.rope.scaling."
LONG, FREQS = "rope_factors_long.weight", "rope_freqs.weight"


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"general.type": "adapter"}, {}, "general.type must be model, got 'adapter'"),
        ({"llama.context_length": 0}, {}, "llama.context_length must be a positive integer, got 0"),
        ({"llama.context_length": "long"}, {}, "llama.context_length must be a positive integer, got 'long'"),
        ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count must be the size of a head, 16, got 8"),
        ({"llama.rope.freq_base": 0.0}, {}, "bad.gguf: .* rope_theta must be a positive number, got 0.0"),
        ({f"{ROPE}type": "dynamic"}, {}, "scaling.type must be one of none, linear, yarn, longrope, got 'dynamic'"),
        ({f"{ROPE}type": "longrope"}, {}, f"has rope.scaling.type=longrope, but no tensor {LONG}"),
        ({}, {FREQS: np.ones(3)}, r"tensor rope_freqs.weight must have 8 positive values, got 3: \[1.0, 1.0"),
        ({}, {FREQS: np.zeros(8)}, r"tensor rope_freqs.weight must have 8 positive values, got 8: \[0.0, 0.0"),
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, {}, r"eos_token_id must be the number of a token, got \[1, 2\]"),
        ({"tokenizer.ggml.token_type": [1]}, {}, "token_type must have a value for each of 199 tokens, got 1"),
        ({"tokenizer.ggml.pre": "what"}, {}, "got 'what'; tokenizer= may name a folder with the model's own"),
        ({"tokenizer.ggml.tokens": None}, {}, "bad.gguf holds no tokenizer"),
        ({"tokenizer.chat_template.a/b": "x"}, {}, "tokenizer.chat_template.a/b must have a name of letters"),
        ({"tokenizer.chat_template.tool": 3}, {}, "tokenizer.chat_template.tool must be a text, got 3"),
        ({"tokenizer.chat_template": 3}, {}, "tokenizer.chat_template must be a text, got 3"),
        ({"llama.made_up": 3}, {}, "bad.gguf: entries of the header that are not supported: llama.made_up=3"),
        (
            {"tokenizer.ggml.made_up": 3},
            {},
            "tokenizer.ggml.made_up=3 is not supported for tokenizer.ggml.model 'gpt2'",
        ),
        ({"tokenizer.ggml.add_space_prefix": True}, {}, "tokenizer.ggml.add_space_prefix=True is not supported for"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, {}, "remove_extra_whitespaces=True is not supported for"),
        ({"tokenizer.ggml.precompiled_charsmap": [1]}, {}, r"precompiled_charsmap=\[1\] is not supported for"),
        ({"tokenizer.ggml.normalizer.lowercase": True}, {}, "normalizer.lowercase=True is not supported for"),
        ({"tokenizer.ggml.added_tokens": ["<new>"]}, {}, r"added_tokens has tokens that .*lacks: \['<new>'\]"),
    ],
)
def test_refusals(header: Any, tensors: Any, message: str, base: Path, tmp_path: Path) -> None:
    path = changed(base, tmp_path / "bad.gguf", header, tensors)
    with pytest.raises(ValueError, match=message):
        resolve_model(str(path), "float32")


def test_big_endian_files(base: Path, tmp_path: Path) -> None:
    data = base.read_bytes()
    (tmp_path / "big.gguf").write_bytes(data[:4] + struct.pack(">I", 3) + data[8:])
    with pytest.raises(ValueError, match="big.gguf is big-endian, and only little-endian GGUF files are supported"):
        resolve_model(str(tmp_path / "big.gguf"), "float32")


@pytest.mark.parametrize("place", ["pairs", "tensors", "key", "array", "dimensions"])
def test_lengths_that_no_file_has(place: str, base: Path, tmp_path: Path) -> None:
    data = bytearray(base.read_bytes())
    name, vocabulary = data.index(b"general.architecture"), data.index(b"tokenizer.ggml.tokens") + 21
    shape = data.index(b"blk.0.attn_q.weight") + 19
    places = {"pairs": 16, "tensors": 8, "key": name - 8, "array": vocabulary + 8, "dimensions": shape}
    form = "<I" if place == "dimensions" else "<Q"
    struct.pack_into(form, data, places[place], 2**31 if place == "dimensions" else 2**62)
    (tmp_path / "cut.gguf").write_bytes(data)
    with pytest.raises(ValueError, match="cut.gguf is cut short: expected at least"):
        resolve_model(str(tmp_path / "cut.gguf"), "float32")


def rope_of(path: Path) -> dict[str, Any]:
    return json.loads((converted_folder(path, "float32") / "config.json").read_text())["rope_parameters"]


def test_scaling_of_positions(base: Path, tmp_path: Path) -> None:
    none = {f"{ROPE}type": "linear", f"{ROPE}factor": 0.0}
    assert rope_of(changed(base, tmp_path / "none.gguf", none))["rope_type"] == "default"
    long = {LONG: np.arange(2, 10), "rope_factors_short.weight": np.arange(1, 9)}
    assert rope_of(changed(base, tmp_path / "long.gguf", {f"{ROPE}type": "longrope"}, long)) == {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": list(range(2, 10)),
        "short_factor": list(range(1, 9)),
        "original_max_position_embeddings": 256,
    }


def test_what_splits_no_text(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("add_space_prefix", "remove_extra_whitespaces", "normalizer.lowercase")
    header: dict[str, Any] = {f"tokenizer.ggml.{name}": False for name in names}
    header |= {"tokenizer.ggml.fim_pre_token_id": 5, "tokenizer.ggml.suppress_tokens": [3]}
    resolve_model(str(changed(base, tmp_path / "m.gguf", header)), "float32")
    assert "tokenizer.ggml.suppress_tokens is not applied: logit_bias or allowed_token_ids" in caplog.text


def test_how_the_publisher_samples(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "temp": 0.25,
        "top_k": 40,
        "top_p": 0.5,
        "min_p": 0.0,
        "penalty_repeat": 1.5,
        "mirostat": 2,
        "sequence": "k",
    }
    path = changed(base, tmp_path / "m.gguf", {f"general.sampling.{name}": value for name, value in given.items()})
    config = json.loads((converted_folder(path, "float32") / "generation_config.json").read_text())
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    assert [config[name] for name in names] == [0.25, 40, 0.5, 0.0, 1.5]
    assert "m.gguf: general.sampling.mirostat are not applied" in caplog.text


def test_a_model_that_chats_is_sampled_as_its_card_says(base: Path, tmp_path: Path) -> None:
    def sampling(name: str, header: dict[str, Any]) -> list[Any]:
        path = changed(base, tmp_path / f"{name}.gguf", header)
        config = json.loads((converted_folder(path, "float32") / "generation_config.json").read_text())
        return [config.get(field) for field in ("temperature", "top_p")]

    card = {"general.basename": "SmolLM2", "tokenizer.chat_template": "{{ messages }}"}
    assert sampling("card", card) == [0.2, 0.9]
    assert sampling("own", {**card, "general.sampling.temp": 0.5}) == [0.5, None]
    assert sampling("base", {"general.basename": "SmolLM2"}) == [None, None]
    assert sampling("other", {**card, "general.basename": "other"}) == [None, None]


def test_other_alignments_and_old_tensors(base: Path, tmp_path: Path) -> None:
    rotations = {"blk.0.attn_rot_embd.inv_freq": np.ones(8)}
    want = load_file(converted_folder(base, "float32") / "model.safetensors")
    path = changed(base, tmp_path / "m.gguf", {"general.alignment": 256}, rotations)
    got = load_file(converted_folder(path, "float32") / "model.safetensors")
    assert got.keys() == want.keys() and all((got[name] == want[name]).all() for name in want)


def test_special_tokens_that_are_not_there(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header = {"tokenizer.ggml.padding_token_id": 199, "tokenizer.ggml.bos_token_id": 2**32 - 1}
    resolved = resolve_model(str(changed(base, tmp_path / "m.gguf", header)), "float32")
    assert resolved.hf_config.eos_token_ids == (1,)
    raw = json.loads((resolved.path / "config.json").read_text())
    assert "pad_token_id" not in raw and "bos_token_id" not in raw


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|im_end|>"], [1, 197]),
        (["<|end|>", "<|return|>"], [1, 198]),
        (["<|end|>"], [1, 197]),
        (["<|other|>"], 1),
    ],
)
def test_ends_of_turns(names: list[str], ends: Any, base: Path, tmp_path: Path) -> None:
    tokens = gguf.GGUFReader(base).fields["tokenizer.ggml.tokens"].contents()
    tokens[197 : 197 + len(names)] = names
    kinds = [3, 3, *[1] * 195, 3, 4]
    header = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    folder = converted_folder(changed(base, tmp_path / "m.gguf", header), "float32")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


def test_chat_templates_with_names(base: Path, tmp_path: Path) -> None:
    header = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    path = changed(base, tmp_path / "m.gguf", header)
    for dtype in ("float32", "float16"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(converted_folder(path, dtype))
        assert tokenizer.chat_template == {"default": "plain", "tool_use": "with tools"}


def test_a_tokenizer_from_elsewhere(base: Path, tmp_path: Path) -> None:
    """A file whose own cannot be read runs with another, or with none."""
    path = changed(base, tmp_path / "m.gguf", {"tokenizer.ggml.pre": "what"})
    prompt = {"prompt_token_ids": [1, 5, 9]}
    assert LLM(str(path), dtype="float32", skip_tokenizer_init=True).generate([prompt], use_tqdm=False)
    other = converted_folder(base, "float32")
    uneven = changed(base, tmp_path / "u.gguf", {"tokenizer.ggml.token_type": [1], "tokenizer.ggml.scores": [1.0]})
    assert resolve_model(str(uneven), "float32", needs_tokenizer=False).hf_config.eos_token_ids == (1,)
    own = LLM(str(path), dtype="float32", tokenizer=str(other)).get_tokenizer()
    assert list(own.encode("ab")) == [92]
    with pytest.raises(ValueError, match="tokenizer.ggml.pre must be one of .* got 'what'"):
        LLM(str(path), dtype="float32")
    # A folder that did without a tokenizer gets one where the file has it.
    converted_folder(base, "float16", needs_tokenizer=False)
    folder = converted_folder(base, "float32")
    (folder / "tokenizer.json").unlink()
    assert (converted_folder(base, "float32") / "tokenizer.json").is_file()


FILES = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "sub/m-q6_k.gguf", "mmproj-Q8_0.gguf", "a-F16.gguf", "b-F16.gguf")
FILES += ("m.mmproj-Q8_0.gguf", "Q5_0.gguf")


@pytest.fixture
def hub(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A repository, of which a copy has the files that were asked for; what is asked of it."""
    asked: list[Any] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"], options["revision"]))
        folder = tmp_path / f"hub{len(asked)}"
        folder.mkdir()
        for file in huggingface_hub.utils.filter_repo_objects(
            FILES, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        ):
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(base, folder / file)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return asked


def test_files_of_the_hub(hub: list[Any]) -> None:
    for name, stem in (
        ("owner/name:Q4_K_M", "m-Q4_K_M"),
        ("owner/name:q8_0", "m-Q8_0"),
        ("owner/name:Q6_K", "m-q6_k"),
        ("owner/name:Q5_0", "Q5_0"),
        ("owner/name/sub/m-q6_k.gguf", "m-q6_k"),
        ("owner/name/m-Q8_0.gguf", "m-Q8_0"),
    ):
        assert resolve_model(name, "float32", revision="r").name == stem
        assert hub[-1][0] == "owner/name" and hub[-1][2] == "r"
    assert "*[-._/]Q4_K_M-?????-of-?????.gguf" in hub[0][1]
    with pytest.raises(ValueError, match="owner/name has several files that 'owner/name:F16' names: a-F16.gguf, b-F16"):
        resolve_model("owner/name:F16", "float32")
    for name in ("owner/name:Q2_K", "owner/name/other.gguf"):
        with pytest.raises(FileNotFoundError, match=f"owner/name on the Hugging Face hub has no file that '{name}'"):
            resolve_model(name, "float32")


@pytest.mark.parametrize("name", ["models/foo/typo.gguf", "./foo/typo.gguf", "../foo/typo.gguf", "../foo", ".foo/bar"])
def test_files_that_are_not_here(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any]) -> None:
    (tmp_path / "models/foo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="is neither a folder nor a .gguf file on this machine"):
        resolve_model(name, "float32")
    assert not hub


def test_what_may_be_here_or_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **options: Any) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match="'owner/name/m.gguf' is no file on this machine; .* hub: offline"):
        resolve_model("owner/name/m.gguf", "float32")
