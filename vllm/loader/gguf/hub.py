"""GGUF files of hub repositories: "owner/name:Q4_K_M", or "owner/name/file.gguf"."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from vllm.config.checkpoint.hub import fetch
from vllm.config.checkpoint.local_model import first_parts

_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/\w[\w.-]*)"
_TYPE = re.compile(_REPOSITORY + r":(?P<kind>[\w.-]+)")
_FILE = re.compile(_REPOSITORY + r"/(?P<file>[^:]+\.gguf)")
# The part of a vision model that reads images: no model by itself.
_PROJECTOR = "mmproj"


def find_on_hub(
    model: str, revision: str | None = None, cache_dir: str | None = None, token: bool | str | None = None
) -> Path | None:
    """The local copy of the file that `model` names, of a split model the first one, downloaded if missing; None: it is
    not such a name, or begins with a folder of this machine.

    Args:
        model: "owner/name:TYPE", TYPE being the end of the file's name, whatever its case, or "owner/name/file.gguf".
        revision, cache_dir, token: as in `hub.download`.

    Raises:
        FileNotFoundError: no such repository or file, or it cannot be reached.
        ValueError: several files have that type.
    """
    if (match := _FILE.fullmatch(model)) is not None:
        if Path(match["repository"]).is_dir():
            return None
        patterns = [match["file"], re.sub(r"-\d{5}-of-", "-*-of-", match["file"])]
    elif (match := _TYPE.fullmatch(model)) is not None:
        kinds = {match["kind"], match["kind"].upper(), match["kind"].lower()}
        ends = [f"{kind}{end}.gguf" for kind in sorted(kinds) for end in ("", "-?????-of-?????")]
        patterns = [start + end for end in ends for start in ("", "*[-._/]")]
    else:
        return None
    try:
        folder = fetch(match["repository"], patterns, revision, cache_dir, token, [f"*{_PROJECTOR}*"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{model!r} is no file on this machine; as a name of the hub: {error}") from error
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
    named = [
        name
        for name in names
        if any(fnmatchcase(f"/{name}", f"/{pattern}" if match.re is _FILE else pattern) for pattern in patterns)
        and _PROJECTOR not in name
    ]
    files = first_parts([folder / name for name in named])
    if not files:
        raise FileNotFoundError(
            f"{model!r} is no file on this machine, and {match['repository']} on the Hugging Face hub has no file that "
            f"{model!r} names"
        )
    if len(files) > 1:
        several = ", ".join(file.relative_to(folder).as_posix() for file in files)
        raise ValueError(f"{match['repository']} has several files that {model!r} names: {several}")
    return files[0]
