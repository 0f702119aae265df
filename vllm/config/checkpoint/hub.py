"""Downloads from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from vllm.config.checkpoint.sentence_files import first_module, read_modules

_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# BGE-M3's, which are there in no other format.
_LAYERS = ["sparse_linear.pt", "colbert_linear.pt"]
_WITH_WEIGHTS = ("Dense", "LayerNorm")


def download(
    name: str,
    revision: str | None = None,
    weights: bool = True,
    cache_dir: str | None = None,
    token: bool | str | None = None,
) -> Path:
    """The local copy of the hub repository "owner/name": configuration, tokenizer and, with `weights`, safetensors, or
    pytorch_model.bin where there are none, and so of each of sentence-transformers' modules. `cache_dir` and `token`:
    of the hub's client; None = its own.

    Missing files are downloaded; a complete copy needs no network (HF_HUB_OFFLINE=1 prevents the attempt).

    Args:
        revision: branch, tag or commit; None = the default branch.

    Raises:
        FileNotFoundError: no such repository or revision, or neither reachable nor cached.
    """

    def get(*patterns: str) -> Path:
        return fetch(name, [*_SMALL_FILES, *patterns], revision, cache_dir, token)

    if not weights:
        return get()
    folder = get("*.safetensors", *_LAYERS)
    inner = first_module(folder)
    older = [] if any(inner.glob("*.safetensors")) else [f"{(inner / 'pytorch_model').relative_to(folder)}*.bin"]
    for module in read_modules(folder) or ():
        if module.kind in _WITH_WEIGHTS and not (module.folder / "model.safetensors").is_file():
            older.append((module.folder / "pytorch_model.bin").relative_to(folder).as_posix())
    return get(*older) if older else folder


def fetch(
    name: str,
    patterns: list[str],
    revision: str | None,
    cache_dir: str | None,
    token: bool | str | None,
    ignored: list[str] | None = None,
) -> Path:
    """The local copy of a repository's files whose names fit one of `patterns` and none of `ignored`.
    FileNotFoundError: see `download`."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                cache_dir=cache_dir,
                token=token,
            )
        )
    except Exception as error:  # the client's errors have no common base over its versions and HTTP libraries
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FileNotFoundError(
            f"{name!r} is not a folder or file on this machine, and it could not be had from the "
            f"Hugging Face hub: {reason}"
        ) from error
