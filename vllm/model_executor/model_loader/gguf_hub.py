"""GGUF files of hub repositories: "owner/name:Q4_K_M", or "owner/name/file.gguf"."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from vllm.model_executor.model_loader.gguf_parts import first_parts
from vllm.transformers_utils.hub import fetch

_TYPE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")
_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[^:]+\.gguf)")


def find_on_hub(
    model: str, revision: str | None = None, cache_dir: str | None = None, token: bool | str | None = None
) -> Path | None:
    """The local copy of the file that `model` names, of a split model the first one, downloaded if missing; None: it is
    not such a name.

    Args:
        model: "owner/name:TYPE", TYPE being the end of the file's name, whatever its case, or "owner/name/file.gguf".
        revision, cache_dir, token: as in `hub.download`.

    Raises:
        FileNotFoundError: no such repository or file, or it cannot be reached.
        ValueError: several files have that type.
    """
    if (match := _FILE.fullmatch(model)) is not None:
        patterns = [match["file"], re.sub(r"-\d{5}-of-", "-*-of-", match["file"])]
    elif (match := _TYPE.fullmatch(model)) is not None:
        kinds = {match["kind"], match["kind"].upper(), match["kind"].lower()}
        patterns = [f"*[-._/]{kind}{end}.gguf" for kind in sorted(kinds) for end in ("", "-?????-of-?????")]
    else:
        return None
    folder = fetch(match["repository"], patterns, revision, cache_dir, token)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
    named = [
        name
        for name in names
        if any(fnmatchcase(f"/{name}", f"/{each}" if match.re is _FILE else each) for each in patterns)
        and not name.rpartition("/")[2].startswith("mmproj")
    ]
    files = first_parts([folder / name for name in named])
    if not files:
        raise FileNotFoundError(f"{match['repository']} on the Hugging Face hub has no file that {model!r} names")
    if len(files) > 1:
        several = ", ".join(file.relative_to(folder).as_posix() for file in files)
        raise ValueError(f"{match['repository']} has several files that {model!r} names: {several}")
    return files[0]
