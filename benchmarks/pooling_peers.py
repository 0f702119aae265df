"""Runs one of benchmarks/pooling.py's engines: reads texts, then embeds them once for each line of its input.

    python pooling_peers.py KIND FOLDER    # by the interpreter that has it

Input: a line of JSON with the texts, then a line a round. Output: a line of JSON a round, {"seconds", "first"}: of all
texts, and the first text's vector.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH_SIZE = 32


def own(folder: str, dtype: str) -> Callable[[list[str]], Any]:
    """This engine."""
    from vllm import LLM

    llm = LLM(folder, dtype=dtype)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]  # type: ignore[union-attr]


def sentence_transformer(folder: str, dtype: str) -> Callable[[list[str]], Any]:
    """encode, which sorts by length itself."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False)


def onnx_runtime(folder: str) -> Callable[[list[str]], Any]:
    """The exported model on sorted batches, padded to their longest; pooled as the folder says."""
    import onnxruntime
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    session = onnxruntime.InferenceSession(str(export(folder)), options, providers=["CPUExecutionProvider"])
    is_mean = json.loads(Path(folder, "1_Pooling/config.json").read_text()).get("pooling_mode_mean_tokens", False)

    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), BATCH_SIZE):
            places = order[start : start + BATCH_SIZE]
            encoded = tokenizer.encode_batch([texts[place] for place in places])
            mask = np.array([each.attention_mask for each in encoded], dtype=np.int64)
            ids = np.array([each.ids for each in encoded], dtype=np.int64)
            inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            (hidden,) = session.run(None, inputs)
            pooled = hidden[:, 0]
            if is_mean:
                pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
            for place, vector in zip(places, pooled, strict=True):
                vectors[place] = vector
        return np.array(vectors)

    return embed


def fast_embed(folder: str) -> Callable[[list[str]], Any]:
    """The exported model by fastembed, which does not sort: the texts come sorted."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    pooling = json.loads(Path(folder, "1_Pooling/config.json").read_text())
    kind = PoolingType.MEAN if pooling.get("pooling_mode_mean_tokens", False) else PoolingType.CLS
    TextEmbedding.add_custom_model(
        model="own",
        pooling=kind,
        normalization=True,
        sources=ModelSource(url="none"),
        dim=pooling["word_embedding_dimension"],
        model_file=export(folder).name,
    )
    model = TextEmbedding("own", specific_model_path=folder, threads=int(os.environ["OMP_NUM_THREADS"]))

    def embed(texts: list[str]) -> list[Any]:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        found = model.embed([texts[place] for place in order], batch_size=BATCH_SIZE)
        for place, vector in zip(order, found, strict=True):
            vectors[place] = vector
        return vectors

    return embed


def export(folder: str) -> Path:
    """The folder's model as ONNX, made once."""
    path = Path(folder) / "exported.onnx"
    if path.exists():
        return path
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            own = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
            return self.model(input_ids, **own).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    sample = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "hidden"]}
    # Two peers export at the same time.
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.onnx.export(
        Hidden(), sample, str(unfinished), input_names=names, output_names=["hidden"], dynamic_axes=axes, dynamo=False
    )
    return unfinished.replace(path)


Make = Callable[[str], Callable[[list[str]], Any]]
OWN: dict[str, Make] = {
    "vllm float32": lambda folder: own(folder, "float32"),
    "vllm bfloat16": lambda folder: own(folder, "bfloat16"),
}
PEERS: dict[str, Make] = {
    "sentence-transformers float32": lambda folder: sentence_transformer(folder, "float32"),
    "sentence-transformers bfloat16": lambda folder: sentence_transformer(folder, "bfloat16"),
    "onnxruntime float32": onnx_runtime,
    "fastembed float32": fast_embed,
}


def main() -> None:
    """Load, and answer."""
    parser = argparse.ArgumentParser(description="The process of one engine; pooling.py starts it.")
    parser.add_argument("kind", choices=OWN | PEERS)
    parser.add_argument("folder", help="of the model")
    args = parser.parse_args()
    # Libraries try to import a module `kernels`, which must not be the script here.
    del sys.path[0]
    embed = (OWN | PEERS)[args.kind](args.folder)
    texts = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    for _ in sys.stdin:
        began = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "first": np.asarray(vectors[0], dtype=float).tolist()}), file=answers)
        answers.flush()


if __name__ == "__main__":
    main()
