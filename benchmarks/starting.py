"""Seconds from a process's beginning to its first score, and the memory that processes of one model share.

    python benchmarks/starting.py                               # 1.5B and 3B parameters, bfloat16 and int8
    python benchmarks/starting.py --sizes 0.1B --kinds bfloat16

Models are random, of Qwen2.5's shapes, made in --folder (a temporary one, by default) and removed. Of each kind of
weights one process after another starts: without packed weights on disk ("without"), writing them ("first"), mapping
them ("second"), and mapping them with nothing of them in memory ("cold", beside the seconds of reading their file
once). Then two processes at once: their proportional set size (PSS), as a ratio to that of one; and that of a server
with as many replicas as --replicas says, to that of a server with one. Beside these stand the seconds of copying the
checkpoint's file. Prints one JSON line. Linux only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, make_parser, print_result, say, some_of, status_kib, use_all_cores
from servers import OURS, serve

# Hidden and intermediate size, layers, query and key heads, vocabulary.
SIZES = {
    "0.1B": (512, 2048, 12, 8, 2, 32000),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
}
_KINDS = ("bfloat16", "int8", "int4")
_CHUNK = 1 << 24


def main() -> None:
    """Make each model, start it, print the figures."""
    parser = make_parser("Seconds to the first score, with packed weights on disk and without.", model=False)
    sizes = some_of(SIZES, "size")
    parser.add_argument("--sizes", type=sizes, default=["1.5B", "3B"], help="names of sizes with commas between")
    parser.add_argument("--kinds", type=some_of(_KINDS, "kind"), default=["bfloat16", "int8"], help="of weights")
    parser.add_argument("--replicas", type=int, default=0, help="of a server whose memory is measured (default: none)")
    parser.add_argument("--folder", type=Path, help="where models and packed weights are made")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for size in args.sizes:
            model = Path(folder) / size
            make_model(model, *SIZES[size])
            rows += [measure(model, Path(folder) / "packed", size, kind, args.replicas) for kind in args.kinds]
            shutil.rmtree(model)
    print_result(benchmark="starting", rows=rows)


def make_model(folder: Path, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> None:
    """A random checkpoint in bfloat16 whose head is its embeddings."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    width = hidden // heads
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    fields = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": heads} | sizes
    fields |= {"num_key_value_heads": kv_heads, "tie_word_embeddings": True, "dtype": "bfloat16"}
    fields |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6}
    (folder / "config.json").write_text(json.dumps(fields))
    noise = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def values(*shape: int) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        return noise.repeat(-(-count // len(noise)))[:count].view(shape)

    tensors = {"model.embed_tokens.weight": values(vocab, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()}
    products = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for each, rows in products.items():
            tensors[f"{name}.self_attn.{each}_proj.weight"] = values(rows, hidden)
            tensors[f"{name}.self_attn.{each}_proj.bias"] = values(rows)
        tensors[f"{name}.self_attn.o_proj.weight"] = values(hidden, heads * width)
        for each in ("gate", "up"):
            tensors[f"{name}.mlp.{each}_proj.weight"] = values(inner, hidden)
        tensors[f"{name}.mlp.down_proj.weight"] = values(hidden, inner)
        for each in ("input", "post_attention"):
            tensors[f"{name}.{each}_layernorm.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, folder / "model.safetensors")


def measure(model: Path, packed: Path, size: str, kind: str, replicas: int) -> dict[str, Any]:
    """The figures of one model and kind of weights; what was packed is removed."""
    row: dict[str, Any] = {"size": size, "kind": kind, "file_gib": _gib((model / "model.safetensors").stat().st_size)}
    copy = model / "copy"
    row["copy_s"] = _seconds(lambda: shutil.copyfile(model / "model.safetensors", copy))
    copy.unlink()
    row["without"] = _start(model, kind, None).end()
    row["first"] = _start(model, kind, packed).end()
    (entry,) = packed.glob("*.packed")
    row["packed_gib"] = _gib(entry.stat().st_size)
    row["second"] = _start(model, kind, packed).end()
    _forget(entry)
    row["read_cold_s"] = _seconds(lambda: _read(entry))
    _forget(entry)
    row["cold"] = _start(model, kind, packed).end()
    one = _start(model, kind, packed)
    alone = one.pss()
    two = _start(model, kind, packed)
    row["pss_one_gib"] = _gib(alone)
    row["pss_two_as_ratio"] = round((one.pss() + two.pss()) / alone, 3)
    readings = {
        json.dumps(each["logits"]) for each in (row["without"], row["first"], row["second"], one.end(), two.end())
    }
    row["bits_are_equal"] = len(readings) == 1
    for each in ("without", "first", "second", "cold"):
        del row[each]["logits"]
    if replicas:
        row |= _replicas(model, kind, packed, replicas)
    shutil.rmtree(packed)
    say(json.dumps(row))
    return row


class _Start:
    """A process that has made its first score, and waits."""

    def __init__(self, process: subprocess.Popen[str], began: float) -> None:
        self._process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a process ended before its first score")
        self._result = json.loads(line)
        self._result["seconds"] = round(time.monotonic() - began, 2)
        self._result["peak_gib"] = _gib(status_kib(process.pid)["VmHWM"] * 1024)

    def pss(self) -> int:
        """In bytes."""
        return _pss(self._process.pid)

    def end(self) -> dict[str, Any]:
        """Let it end; its figures."""
        self._process.communicate("\n")
        return self._result


def _start(model: Path, kind: str, packed: Path | None) -> _Start:
    environment = os.environ | {"VLLM_PACKED_CACHE": "0" if packed is None else str(packed)}
    command = [sys.executable, __file__, str(model), kind]
    began = time.monotonic()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return _Start(subprocess.Popen(command, env=environment, **pipes), began)


def _pss(pid: int) -> int:
    """The proportional set size of a process, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _replicas(model: Path, kind: str, packed: Path, count: int) -> dict[str, Any]:
    """The memory of a server with one engine and of one with `count`, all of their processes together."""
    os.environ["VLLM_PACKED_CACHE"] = str(packed)
    flags = ["--skip-tokenizer-init", "--max-model-len", "1024"]
    flags += [] if kind == "bfloat16" else ["--quantization", kind]
    sums = []
    for each in (1, count):
        with serve(OURS, str(model.resolve()), *flags, "--data-parallel-size", str(each)) as server:
            sums.append(_settled(server.pid))
    return {"pss_server_gib": _gib(sums[0]), "replicas": count, "pss_replicas_as_ratio": round(sums[1] / sums[0], 3)}


def _settled(pid: int) -> int:
    """The memory of a process and its children in bytes, once it grows no more."""
    before, now = 0, 1
    while now > 1.001 * before:
        time.sleep(1)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        before, now = now, sum(map(_pss, [pid, *map(int, children)]))
    return now


def score(model: str, kind: str) -> None:
    """Make one score, say how long the engine took, and wait."""
    sys.path.insert(0, str(ROOT))
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    quantization = None if kind == "bfloat16" else kind
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=1024, quantization=quantization)
    loaded = time.monotonic() - began
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[5, 6, 7], detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(10, 42))}], params, use_tqdm=False)
    logits = output.outputs[0].logprobs.logits.tolist()
    print(json.dumps({"engine_s": round(loaded, 2), "logits": logits}), flush=True)
    sys.stdin.readline()


def _seconds(call: Any) -> float:
    began = time.monotonic()
    call()
    return round(time.monotonic() - began, 2)


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass


def _forget(path: Path) -> None:
    """Let the system drop a file's pages, which must have been written first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 3)


if __name__ == "__main__":
    use_all_cores()
    if len(sys.argv) == 3 and sys.argv[2] in _KINDS:
        score(sys.argv[1], sys.argv[2])
    else:
        main()
