"""llama.cpp's mmproj files beside text decoders, laid out as its converter lays them out, against the folders that
they were made from. Names are the gguf library's own table; what the converter does to weights and headers is written
here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_vision import EDGE, FAMILIES, draw, make_vision_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 4
IDS = [5, 17, 64, 100]
# The decoder's architecture in GGUF, the projector, and entries of both headers beside the usual ones.
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3", "gemma3",
        {"attention.sliding_window_pattern": [True, False] * 2},
        {"clip.vision.projector.scale_factor": 1, "clip.use_gelu": True},
    ),
    "idefics3": (
        "llama", "idefics3", {},
        {"clip.vision.projector.scale_factor": 2, "clip.vision.preproc_image_size": 2 * EDGE, "clip.use_gelu": True},
    ),
    "qwen2_vl": ("qwen2vl", "qwen2vl_merger", {"rope.dimension_sections": [1, 2, 1, 0]}, {}),
    "qwen2_5_vl": (
        "qwen2vl", "qwen2.5vl_merger", {"rope.dimension_sections": [1, 2, 1, 0]},
        {"clip.vision.n_wa_pattern": 2, "clip.vision.window_size": 16, "clip.use_silu": True},
    ),
}  # fmt: skip
# Files do not say this of tiny pictures.
OPTIONS = {"size": FAMILIES["qwen2_vl"].image_processor[1]["size"]}


def write(writer: gguf.GGUFWriter, header: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in header.items():
        (kinds | {str: writer.add_string})[type(value)](key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def write_decoder(path: Path, arch: str, config: Any, state: dict[str, Any], tokenizer: Any, own: Any) -> None:
    writer = gguf.GGUFWriter(str(path), arch)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ĠĠ", "<1>", "<2>", "<3>", "<4>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens or index > 258 else 1
                            for index, token in enumerate(tokens)])  # fmt: skip
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    ropes = config.rope_parameters
    header = {
        "block_count": LAYERS,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": ropes.get("full_attention", ropes)["rope_theta"],
        "attention.sliding_window": getattr(config, "sliding_window", None),
    }
    tensors = {}
    for name, value in state.items():
        name = name.replace("language_model.model.", "model.").replace("model.language_model.", "model.")
        name = name.replace("model.text_model.", "model.")
        found = names.get_name(name, (".weight", ".bias"))
        if found is None or (arch == "gemma3" and name == "lm_head.weight"):
            continue
        if arch == "gemma3" and "norm" in name:
            value = value + 1
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        tensors[found] = value.numpy()
    write(writer, {f"{arch}.{key}": value for key, value in (header | own).items() if value is not None}, tensors)


def write_tower(path: Path, projector: str, config: Any, state: dict[str, Any], own: dict[str, Any]) -> None:
    vision, names = config.vision_config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    is_qwen = projector.endswith("merger")
    header = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": projector,
        "clip.vision.projection_dim": config.get_text_config().hidden_size,
        "clip.vision.image_size": getattr(vision, "image_size", 560),
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": getattr(vision, "embed_dim", vision.hidden_size),
        # Files of Qwen2-VL do not have the width here that they should have.
        "clip.vision.feed_forward_length": getattr(vision, "intermediate_size", vision.hidden_size),
        "clip.vision.block_count": getattr(vision, "depth", None) or vision.num_hidden_layers,
        "clip.vision.attention.head_count": getattr(vision, "num_heads", None) or vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        **own,
    }
    tensors = {}

    def add(name: str, value: Any) -> None:
        # The table has the names of checkpoints before transformers' fifth version.
        name = name.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        tensors[found] = value.numpy()

    for name, value in state.items():
        if not any(part in name for part in ("visual.", "vision_", "multi_modal", "connector.")) or ".head." in name:
            continue
        if is_qwen and ".qkv." in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                add(name.replace("qkv", part), rows)
        elif is_qwen and "patch_embed.proj.weight" in name:
            tensors["v.patch_embd.weight"], tensors["v.patch_embd.weight.1"] = (
                value[:, :, at].numpy() for at in (0, 1)
            )
        else:
            add(name, value + 1 if "soft_emb_norm" in name else value)
    write(gguf.GGUFWriter(str(path), "clip"), header, tensors)


class Files(NamedTuple):
    name: str
    folder: Path
    decoder: Path
    tower: Path
    state: dict[str, Any]
    config: Any


def make_files(name: str, folder: Path) -> Files:
    """A tiny model as a folder and as the two files of llama.cpp's."""
    model, tokenizer = make_vision_model(name, folder)
    arch, projector, text_header, vision_header = KINDS[name]
    state = load_file(folder / "model.safetensors")
    if name == "gemma3":
        head, embedding = (next(key for key in state if part in key) for part in ("lm_head", "embed_tokens"))
        state[head] = state[embedding].clone()  # GGUF's are tied
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["query_pre_attn_scalar"] = model.config.text_config.head_dim  # as in all but one model
        (folder / "config.json").write_text(json.dumps(config))
    images = json.loads((folder / "preprocessor_config.json").read_text())
    images |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    decoder, tower = folder / "text.gguf", folder / "mmproj.gguf"
    write_decoder(decoder, arch, model.config.get_text_config(), state, tokenizer, text_header)
    write_tower(tower, projector, model.config, state, vision_header)
    decoder, tower = (each.rename(folder.parent / f"{name}-{each.name}") for each in (decoder, tower))
    return Files(name, folder, decoder, tower, state, model.config)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def files(cache: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    found = {}
    for name in KINDS:
        (folder := tmp_path_factory.mktemp(name) / "hf").mkdir()
        found[name] = make_files(name, folder)
    return found


def readings(llm: LLM, name: str) -> Any:
    placeholder = FAMILIES[name].placeholder
    prompts = [
        {"prompt": f"look {placeholder} here", "multi_modal_data": {"image": draw(40, 30, 1)}},
        {
            "prompt": f"{placeholder}{placeholder} both",
            "multi_modal_data": {"image": [draw(64, 24, 2), draw(20, 50, 3)]},
        },
    ]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprob_token_ids=IDS, prompt_logprobs=0)
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("name", KINDS)
def test_readings_are_those_of_the_folder(name: str, files: dict[str, Files]) -> None:
    own = files[name]
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 400, "enable_prefix_caching": False}
    if name.startswith("qwen"):
        options["mm_processor_kwargs"] = OPTIONS
    want = readings(LLM(str(own.folder), **options), name)
    got = readings(LLM(str(own.decoder), mmproj=str(own.tower), **options), name)
    for one, other in zip(got, want, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        rows = zip([*one.prompt_logprobs[1:], *one.outputs[0].logprobs],
                   [*other.prompt_logprobs[1:], *other.outputs[0].logprobs], strict=True)  # fmt: skip
        for entries, wanted in rows:
            assert entries.keys() == wanted.keys()
            for token, entry in entries.items():
                # A norm's weight is stored as one more than it is.
                assert entry.logprob == pytest.approx(wanted[token].logprob, abs=1e-4 if name == "gemma3" else 0)


def test_the_first_converters_names_are_known(files: dict[str, Files], tmp_path: Path) -> None:
    from vllm.loader.gguf.file import GGUFFile
    from vllm.loader.gguf.mmproj import whole_model

    own = files["gemma3"]
    swapped = {}
    for key, value in own.state.items():
        other = key.replace("fc1", "?").replace("fc2", "fc1").replace("?", "fc2") if "vision_tower" in key else key
        swapped[other] = value
    write_tower(path := tmp_path / "old.gguf", "gemma3", own.config, swapped, KINDS["gemma3"][3])
    text = {"hidden_size": own.config.get_text_config().hidden_size}
    for weight in whole_model(GGUFFile(path), GGUFFile(own.decoder), text).weights:
        np.testing.assert_allclose(weight.load(GGUFFile(path)), own.state[weight.name], atol=2e-7)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"clip.projector_type": "ldp"}, "clip.projector_type must be one of gemma3, idefics3, .*got 'ldp'"),
        ({"clip.projector_type": "gemma3"}, "the tower is one of gemma3, and idefics3-text.gguf is llama"),
        ({"clip.vision.projection_dim": 48}, "makes rows of 48, and idefics3-text.gguf takes 32"),
        ({"clip.use_silu": True}, "clip.use_silu is not the activation of idefics3"),
        ({"clip.has_audio_encoder": True}, "clip.has_audio_encoder is not known for this projector"),
        ({"clip.vision.patch_size": 0}, "clip.vision.patch_size must be a positive integer, got 0"),
        ({"clip.projector_type": ["idefics3"]}, "clip.projector_type must be one of"),
        ({"clip.vision.image_std": [1.0]}, "clip.vision.image_std must be three numbers"),
    ],
)
def test_what_is_not_known_is_refused(
    own: dict[str, Any], message: str, files: dict[str, Files], tmp_path: Path
) -> None:
    made = files["idefics3"]
    write_tower(path := tmp_path / "other.gguf", "idefics3", made.config, made.state, KINDS["idefics3"][3] | own)
    with pytest.raises(ValueError, match=message):
        LLM(str(made.decoder), mmproj=str(path), dtype="float32", max_model_len=64)


def test_files_in_the_wrong_places_are_refused(files: dict[str, Files]) -> None:
    own = files["idefics3"]
    with pytest.raises(ValueError, match="got 'mmproj'; it is passed as mmproj, beside its text decoder"):
        LLM(str(own.tower))
    with pytest.raises(ValueError, match="mmproj must be llama.cpp's file of a picture tower"):
        LLM(str(own.decoder), mmproj=str(own.decoder))
    with pytest.raises(ValueError, match="mmproj is for models that are .gguf files"):
        LLM(str(own.folder), mmproj=str(own.tower))
    with pytest.raises(FileNotFoundError, match="'nothing.gguf' is no file"):
        LLM(str(own.decoder), mmproj="nothing.gguf")
