"""A command's task for each text of a file: it is all that differs between the kinds of rows."""

from __future__ import annotations

import argparse
import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import CliError
from vllm.scoring.files import Item, TextFile
from vllm.scoring.media import RowMedia, media_fields
from vllm.scoring.report import PICTURE_FORMATS, RowReport
from vllm.scoring.server import Server
from vllm.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

    from vllm.entrypoints.llm import LLM
    from vllm.scoring.columns import FieldKinds
    from vllm.scoring.scorers import EngineScorer


class Task(ABC):
    """From a command's arguments. Picklable where they name a Ray cluster.

    Attributes:
        command: of `vllm`.
        suffix: of the default output's name, between FILE's stem and the format.
        has_tables: whether the output may be CSV or Parquet, by its suffix; else it is JSONL.
        has_parts: whether the output is a folder of parts, each of a batch, without Ray, too.
        part_form: the usual format of parts.
        batch_rows: texts of a batch; None: BATCH_ROWS.
        dropped: fields of the input that no row has.
        takes_ids: whether the field of the text may hold token ids instead.
        spread: see Columns.
        more_deciding: engine arguments that decide the rows beside those of all tasks.
        server_kind: of the server at --url.
        output: file of the rows, or folder of its parts.
        made_from: what decides the rows beside texts and model; JSON values.
        media: the rows' pictures and videos; None: they have none.
        inputs, outputs: further files, with their flags; None: there is none.
    """

    command: str
    suffix: str
    has_tables = True
    has_parts = False
    part_form = "jsonl"
    batch_rows: int | None = None
    dropped: frozenset[str] = frozenset()
    takes_ids = False
    spread: str | None = None
    more_deciding: tuple[str, ...] = ()
    server_kind: type[Server] = Server

    def __init__(self, args: argparse.Namespace) -> None:
        """CliError: what no text can be asked."""
        self.input_name: str = args.file.name
        form = ".jsonl" if args.backend is None and not self.has_parts else ""
        self.output: Path = args.output or Path(f"{args.file.stem}.{self.suffix}{form}")
        self.made_from: dict[str, Any] = {}
        self.media = RowMedia.of(media_fields(args), args.file, args.allowed_local_media_path)
        self.inputs: list[tuple[str, Path | None]] = [("FILE", args.file)]
        self.outputs: list[tuple[str, Path | None]] = []

    def check(self, item: Item) -> None:  # noqa: B027 - a kind may ask any text
        """CliError: it cannot be asked. Called with all texts before a model loads."""

    def check_all(self) -> None:  # noqa: B027
        """CliError: the texts that `check` saw cannot be used."""

    def read_texts(self, args: argparse.Namespace, kinds: FieldKinds | None) -> tuple[TextFile, dict[str, Any]]:
        """The file of texts, and what decides the rows beside the model; `kinds` gets the fields. Reads the file once,
        so that a bad line, or one that cannot be asked, is an error before a model loads."""
        texts = TextFile(args.file, args.text_field, args.limit, self.takes_ids, media_fields(args).values())
        digest, count = hashlib.sha256(), 0
        for item in texts:
            count += 1
            self.check(item)
            fields = item.fields
            if self.media is not None:
                self.media.check(self.input_name, item)
                fields = self.media.shown(fields)
            if kinds is not None:
                kinds.add({name: value for name, value in fields.items() if name not in self.dropped})
            digest.update(json.dumps([item.text, item.fields]).encode())
        self.check_all()
        decided = {"vllm": __version__, "num_texts": count, "texts_sha256": digest.hexdigest(), **self.made_from}
        return texts, {**decided, **{f"{kind}_field": name for kind, name in media_fields(args).items()}}

    @abstractmethod
    def engine_scorer(self, llm: LLM) -> EngineScorer:
        """CliError, ValueError: this model cannot be asked."""

    @abstractmethod
    def server_scorer(self, server: Server) -> Any:
        """A ServerScorer; CliError: the server cannot be asked."""

    @abstractmethod
    def schema(self, scorer: Any) -> pa.Schema:
        """The columns of the scorer's results."""

    @abstractmethod
    def report(self, scorer: Any) -> RowReport:
        """The report on the scorer's rows."""

    def picture_path(self, args: argparse.Namespace) -> Path | None:
        """Path of the chart; None: there is none."""
        if args.no_picture:
            return None
        picture: Path = args.picture or self.output.with_suffix(".png")
        if picture.suffix.lower().lstrip(".") not in PICTURE_FORMATS:
            raise CliError(f"--picture must end in .{', .'.join(PICTURE_FORMATS)}, got {picture.name}")
        return picture
