"""docs/models.md: its table, made from the registry and from what the survey of transformers' architectures found.

`python tests/support/models_table.py` writes the document anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from survey_architectures import load  # noqa: E402

from vllm import ModelRegistry  # noqa: E402
from vllm.config.checkpoint.sentence_transformers import TOKEN_HEADS, is_sparse  # noqa: E402
from vllm.config.checkpoint.text_part import WITH_TEXT_PART  # noqa: E402
from vllm.loader.gguf.architectures import ARCHITECTURES  # noqa: E402
from vllm.models.registry import PAIRS, encoder_archs, pooling_kind  # noqa: E402

DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by tests/support/models_table.py -->", "<!-- made: end -->"


def table() -> list[str]:
    """The rows: every architecture that has a model here or a class in transformers."""
    found = load()
    rows = ["| architecture | runs | |", "|---|---|---|"]
    for name in sorted(
        {*ModelRegistry.get_supported_archs(), *found, *WITH_TEXT_PART}, key=lambda each: (each.lower(), each)
    ):
        status, reason = found.get(name, ("untried", ""))
        files = [f"`{each}`" for each, row in ARCHITECTURES.items() if row.name == name]
        from_files = [f"GGUF {', '.join(files)}"] if files else []
        if name in ModelRegistry.get_supported_archs():
            also = ["`transformers` too"] if status == "runs" else []
            rows.append(f"| {name} | `vllm` | {'; '.join(also + from_files)} |")
        elif name in WITH_TEXT_PART:
            rows.append(f"| {name} | `vllm` | its text decoder; pictures: [images.md](images.md) |")
        elif status == "runs":
            rows.append(" ".join([f"| {name} | `transformers` |", *from_files, "|"]))
        else:
            rows.append(f"| {name} | {'no' if status == 'refused' else 'not tried'} | {reason.replace('|', '/')} |")
    return rows


_GIVES = {
    "heads": "embeddings of texts and tokens, weights of tokens",
    "sparse": "sparse embeddings of texts: a weight of each word",
    "embed": "embeddings of texts and tokens",
    "pair": "embeddings of texts and of pictures",
    "token_embed": "embeddings of tokens",
    "classify": "classes of texts; with one label scores of pairs",
    "token_classify": "classes of tokens",
}


def _gives(name: str) -> str:
    if name == TOKEN_HEADS:
        return "heads"
    if name in PAIRS:
        return "pair"
    return "sparse" if is_sparse([name]) else pooling_kind([name]) or "embed"


def pooling_table() -> list[str]:
    """The rows of encoders, and of the heads of decoders."""
    rows = ["### That pool", "", "| architecture | runs | gives |", "|---|---|---|"]
    names = sorted(encoder_archs(), key=lambda each: (each.lower(), each))
    rows += [f"| {name} | `vllm`, as an encoder | {_GIVES[_gives(name)]} |" for name in names]
    heads = {"Model": "embed", "ForSequenceClassification": "classify", "ForTokenClassification": "token_classify"}
    for ending, kind in heads.items():
        rows.append(f"| *{ending} of any decoder above that runs | as the decoder | {_GIVES[kind]} |")
        rows.append(
            f"| *{ending} of other encoders that transformers has | `transformers`, as an encoder | {_GIVES[kind]} |"
        )
    rows.append("| *ForRewardModel, *ForProcessRewardModel of any such decoder | as the decoder | rewards of tokens |")
    return rows


def render(document: str) -> str:
    """The document with the table of now."""
    before, rest = document.split(BEGIN)
    after = rest.split(END)[1]
    return "\n".join([before + BEGIN, "", *table(), "", *pooling_table(), "", END + after])


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
