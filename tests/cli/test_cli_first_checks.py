"""Errors of a command line are said before anything slow is imported: here torch cannot be."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import contextlib, io, json, os, sys
sys.modules["torch"] = None  # importing it is an error
from vllm.cli import main as cli
parser = cli.build_parser()
cli.build_parser = lambda: parser
said = []
for arguments in json.load(sys.stdin):
    named = arguments[0].partition("=")
    if named[1]:
        os.environ[named[0]] = named[2]
        del arguments[0]
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
    said.append([code, error.getvalue()])
    if named[1]:
        del os.environ[named[0]]
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of folders and files that are no models, and one, `good`, that could be."""
    root = tmp_path_factory.mktemp("first")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64, **sizes}
    for name, files in {
        "empty": {},
        "no_weights": {"config.json": json.dumps(config)},
        "no_json": {"config.json": "{", "model.safetensors": ""},
        "several": {"a.gguf": "GGUF", "b.gguf": "GGUF"},
        "cut": {"m-00001-of-00002.gguf": "GGUF"},
        "good": {"config.json": json.dumps(config), "model.safetensors": ""},
    }.items():
        (root / name).mkdir()
        for file, text in files.items():
            (root / name / file).write_text(text)
    (root / "a.jsonl").write_text('"hello"\n')
    (root / "some.gguf").write_text("GGUF")
    (root / "other.gguf").write_text("PK")
    (root / "bad.jinja").write_text("{% for m in messages %}{{ m }}")
    return root


def test_what_is_wrong_is_said_without_torch(folders: Path) -> None:
    drafts = json.dumps({"method": "draft_model", "model": "/no/draft", "num_speculative_tokens": 2})
    good = ["serve", str(folders / "good"), "--port", "0"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        rows: list[tuple[list[str], str]] = [
            ([*good[:2], "--port", port], f"--host 127.0.0.1 --port {port}: Address already in use"),
            ([*good[:2], "--host", "192.0.2.1"], "--host 192.0.2.1"),
            (["serve", "/no/model"], "model '/no/model' is neither a folder nor a .gguf file"),
            (["serve", "./no/model.gguf"], "is neither a folder nor a .gguf file"),
            (["serve", str(folders / "empty")], "empty has neither model.safetensors nor"),
            (["serve", str(folders / "no_weights")], "no_weights has neither model.safetensors nor"),
            (["serve", str(folders / "empty"), "--load-format", "dummy"], "empty has no config.json"),
            (["serve", str(folders / "no_json")], "config.json"),
            (["serve", str(folders / "several")], "holds several .gguf files"),
            (["serve", str(folders / "cut" / "m-00001-of-00002.gguf")], "m-00002-of-00002.gguf"),
            (["serve", str(folders / "other.gguf")], "other.gguf is not a GGUF file"),
            ([*good, "--max-model-len", "65"], "max_model_len must be at most the model's max_position_embeddings=64"),
            ([*good, "--max-model-len", "0"], "max_model_len must be a positive integer, got 0"),
            ([*good, "--dtype", "float8"], "dtype must be one of auto, float32"),
            ([*good, "--quantization", "int9"], "quantization must be one of"),
            ([*good, "--quantization", "hqq"], "quantization='hqq' is not implemented"),
            ([*good, "--kv-cache-dtype", "int9"], "kv_cache_dtype must be auto, fp8"),
            ([*good, "--load-format", "zip"], "load_format must be one of auto"),
            ([*good, "--gpu-memory-utilization", "2"], "gpu_memory_utilization must be in (0, 1]"),
            ([*good, "--block-size", "-1"], "block_size must be an integer of at least 1"),
            ([*good, "--max-num-seqs", "0"], "max_num_seqs must be an integer of at least 1"),
            ([*good, "--max-logprobs", "-2"], "max_logprobs must be an integer of at least -1"),
            ([*good, "--seed", "-1"], "seed must be an integer in"),
            ([*good, "--tensor-parallel-size", "0"], "tensor_parallel_size must be"),
            ([*good, "--enable-lora", "--max-loras", "0"], "max_loras must be"),
            ([*good, "--enable-lora", "--lora-modules", "a=/no"], "'a': there is no adapter_config.json in /no"),
            ([*good, "--tokenizer", "/no/tokenizer"], "tokenizer '/no/tokenizer' is neither a folder"),
            ([*good, "--speculative-config", drafts], "speculative_config: model '/no/draft' is neither"),
            ([*good, "--speculative-config", '{"method": "x"}'], "speculative_config"),
            ([*good, "--logits-processors", "no_module:A"], "there is no module 'no_module'"),
            ([*good, "--worker-extension-cls", "no_module.A"], "there is no module 'no_module'"),
            ([*good, "--pooler-config", '{"x": 1}'], "pooler_config has no field 'x'"),
            ([*good, "--convert", "x"], "convert must be 'auto'"),
            ([*good, "--attention-config", '{"x": 1}'], "attention_config has no field 'x'"),
            (["serve", str(folders / "some.gguf"), "--quantization", "gptq"], "some.gguf is a GGUF file"),
            ([*good, "--generation-config", "/no"], "generation_config must be"),
            ([*good, "--override-generation-config", '{"heat": 1}'], "override_generation_config must hold"),
            ([*good, "--chat-template", "/no.jinja"], "cannot read /no.jinja"),
            ([*good, "--chat-template", str(folders / "bad.jinja")], "--chat-template: line 1"),
            ([*good, "--score-labels", "yes"], "the labels of a score must be two"),
            ([*good, "--score-template", "/no.jinja"], "/no.jinja"),
            ([*good, "--ssl-keyfile", "/no.pem"], "--ssl-keyfile: there is no file /no.pem"),
            ([*good, "--served-model-name", ""], "--served-model-name must not be empty"),
            ([*good, "--tool-call-parser", "none"], "tool parser 'none' is not known"),
            ([*good, "--reasoning-parser", "none"], "reasoning parser 'none' is not known"),
            (["VLLM_CPU_KVCACHE_SPACE=x", *good], "VLLM_CPU_KVCACHE_SPACE must be a positive number of GiB"),
            (["VLLM_BATCH_INVARIANT=x", *good], "VLLM_BATCH_INVARIANT must be one of 0, 1"),
            (["chat", "/no/model", "-q", "hi"], "model '/no/model' is neither"),
            (["bench", "latency", "--model", "/no/model"], "model '/no/model' is neither"),
            (["run-batch", "-i", __file__, "-o", "/tmp/x", "--model", "/no/model"], "model '/no/model' is neither"),
            (
                ["score", str(folders / "a.jsonl"), "--labels", "a", "--model", "/no/model"],
                "model '/no/model' is neither",
            ),
        ]
        result = subprocess.run(
            [sys.executable, "-c", CODE],
            input=json.dumps([arguments for arguments, _ in rows]),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 0, result.stderr
    for (arguments, message), (code, said) in zip(rows, json.loads(result.stdout), strict=True):
        assert code == 2 and message in said and said.count("\n") == 1, (arguments, code, said)
