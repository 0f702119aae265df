"""Peak memory of reading a long prompt over a large vocabulary, above that of the loaded model.

    python benchmarks/peak_memory.py                              # 8,192 tokens x 151,936 entries
    python benchmarks/peak_memory.py --tokens 2048 --vocab 50000
    python benchmarks/peak_memory.py --ids 256 --top-k 0 --a-position    # other ids at each position, as a matrix

The model is small and random: logits, readings, hidden states, keys, values and activations do not depend on its
weights. Measures in a subprocess; prints one JSON line. Linux only: the peak is VmHWM, reset once the model is loaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import add_counts, make_parser, print_result, status_kib, use_all_cores

_LAYERS, _HIDDEN = 4, 512


def main() -> None:
    """Make the model, measure in a fresh process, print its line."""
    parser = make_parser("Peak memory of prompt readings, above the model's.", model=False)
    add_counts(parser, tokens=(8192, "prompt length"), vocab=(151936, "vocabulary"))
    add_counts(parser, ids=(20, "ids read at every position"), top_k=(5, "top-k entries a position"))
    parser.add_argument("--a-position", action="store_true", help="read other ids at each position, as one matrix")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        _measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        _make_model(Path(folder), args.vocab, args.tokens)
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    print(ran.stdout.splitlines()[-1])


def _make_model(folder: Path, vocab_size: int, max_position: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": _HIDDEN, "intermediate_size": 2 * _HIDDEN, "num_hidden_layers": _LAYERS}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=max_position, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _measure(args: argparse.Namespace) -> None:
    use_all_cores()
    import numpy as np

    from vllm import LLM, SamplingParams

    llm = LLM(args.folder, skip_tokenizer_init=True, max_logprobs=args.top_k or 20, max_logprob_token_ids=-1)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, args.vocab, args.tokens).tolist()
    ids = rng.choice(args.vocab, args.ids, replace=False).tolist()
    if args.a_position:
        ids = rng.integers(0, args.vocab, (args.tokens - 1, args.ids), dtype=np.int32)
        short = SamplingParams(max_tokens=0, prompt_logprob_token_ids=ids[:63])
    params = SamplingParams(max_tokens=0, prompt_logprobs=args.top_k, prompt_logprob_token_ids=ids)
    # Threads, scratch memory and one short request count as the loaded engine.
    llm.generate([prompt[:64]], short if args.a_position else params, use_tqdm=False)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib(os.getpid())["VmRSS"]
    began = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    readings = output.prompt_token_id_logprobs if args.a_position else output.prompt_logprobs.logprobs
    assert len(output.prompt_logprobs) == args.tokens and np.isfinite(readings).all()
    print_result(
        tokens=args.tokens,
        vocab=args.vocab,
        ids=args.ids,
        top_k=args.top_k,
        model_mib=round(before / 1024),
        peak_above_mib=round((status_kib(os.getpid())["VmHWM"] - before) / 1024),
        all_logits_mib=round(4 * args.tokens * args.vocab / 2**20),
        seconds=round(time.perf_counter() - began, 2),
    )


if __name__ == "__main__":
    main()
