"""Model repositories of the Hugging Face hub, through its client and its cache."""

from __future__ import annotations

from pathlib import Path

_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


def download(
    name: str,
    revision: str | None = None,
    weights: bool = True,
    cache_dir: str | None = None,
    token: bool | str | None = None,
) -> Path:
    """The local copy of a hub repository: configuration, tokenizer and safetensors, downloaded if missing.

    Works without a network when the copy is complete (HF_HUB_OFFLINE=1 keeps the client from trying).

    Args:
        name: "owner/name".
        revision: branch, tag or commit; None = the default branch.
        weights: take the safetensors, too.
        cache_dir: of the client; None = its own default.
        token: for the hub; None or True = the one that the client has stored.

    Raises:
        FileNotFoundError: there is no such repository or revision, or it cannot be reached and is not in the
            cache.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, cache_dir=cache_dir, token=token)
        )
    except Exception as error:  # the client's errors have no common base over its versions and HTTP libraries
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FileNotFoundError(
            f"{name!r} is not a folder or file on this machine, and it could not be had from the "
            f"Hugging Face hub: {reason}"
        ) from error
