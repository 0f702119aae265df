"""llama.cpp in an efficient use of its C interface, through llama_cpp.

    ENVIRONMENT/bin/python benchmarks/llama_cpp_adapter.py IN.gguf OUT.gguf     # the same weights in bfloat16

Batches of many sequences, with logits of the read tokens only; a shared prefix is computed once in a common cache.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

try:
    import llama_cpp
except ModuleNotFoundError:
    raise SystemExit(f"{__file__} needs an environment with llama-cpp-python") from None
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from structured_forms import GBNF
from workloads import LABEL_IDS, STARTUP_PROMPT, EngineOptions, Workload

BATCH_TOKENS = 2048
SEQUENCES = 64
PROMPT_ROWS = 512


class _Entry(NamedTuple):
    """One token of a batch."""

    token: int
    position: int
    sequence: int
    wants_logits: bool


class LlamaCppAdapter:
    """A model, and a context for each way of using it."""

    def __init__(self, options: EngineOptions) -> None:
        self.version = llama_cpp.__version__
        self.notes = {
            "score": f"batches of {SEQUENCES} sequences",
            "score_prefix": "prefix computed once, its cache shared",
            "questions": "as score_prefix",
            "fullvocab": "log-softmax over the vocabulary",
            "prompt_logprobs": f"one prompt at a time, {PROMPT_ROWS} positions at once",
        }
        self._lookups = options.speculative
        self._threads = len(options.cores)
        # Referenced here, as the library keeps calling it.
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        assert options.model is not None
        defaults = llama_cpp.llama_model_default_params()
        began = time.perf_counter()
        self._model = llama_cpp.llama_model_load_from_file(options.model.encode(), defaults)
        self.file_seconds = time.perf_counter() - began
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {options.model}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._compiled: list[Any] = []
        self._rng = np.random.default_rng(0)
        self._contexts: dict[tuple[int, int, bool], Any] = {}
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        # Usable for requests of the model's full length, as ours is.
        self._context(1, llama_cpp.llama_model_n_ctx_train(self._model), False)
        self.load_seconds = time.perf_counter() - began
        self._free_contexts()

    def run(self, work: Workload) -> np.ndarray | None:
        if work.one_by_one:
            for prompt in work.prompts:
                self.run(replace(work, prompts=[prompt], one_by_one=False))
            return None
        if work.max_tokens > 1:
            return self._generate(work) if self._lookups is None else self._generate_with_lookups(work)
        if work.reads_prompt:
            return self._read_prompts(work)
        return self._score(work)

    def score_text(self) -> list[float]:
        text = STARTUP_PROMPT.encode()
        ids = (llama_cpp.llama_token * len(text))()
        count = llama_cpp.llama_tokenize(self._vocab, text, len(text), ids, len(text), True, False)
        return self._score(Workload([list(ids[:count])], 1, "req/s", read_ids=LABEL_IDS))[0, 0].tolist()

    def _score(self, work: Workload) -> np.ndarray:
        longest = max(map(len, work.prompts))
        context = self._context(SEQUENCES, work.shared + SEQUENCES * longest, work.shared > 0)
        memory = llama_cpp.llama_get_memory(context)
        readings = np.empty((len(work.prompts), 1, len(work.read_ids)), np.float32)
        if work.shared:
            # Sequence 0 is the prefix.
            self._decode(context, list(_entries(work.prompts[0][: work.shared], 0, 0, wants_last=False)))
        first = 1 if work.shared else 0
        for group in _groups(work, SEQUENCES - first):
            entries: list[_Entry] = []
            for sequence, index in enumerate(group, start=first):
                if work.shared:
                    llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
                    llama_cpp.llama_memory_seq_cp(memory, 0, sequence, 0, work.shared)
                entries += _entries(work.prompts[index][work.shared :], work.shared, sequence, wants_last=True)
            if not work.shared:
                llama_cpp.llama_memory_clear(memory, False)
            logits = self._decode(context, entries)
            readings[group, 0] = (
                _log_softmax(logits)[:, work.read_ids] if work.full_vocabulary else _chosen(logits, work)
            )
        return readings

    def _read_prompts(self, work: Workload) -> np.ndarray:
        context = self._context(1, max(map(len, work.prompts)), False)
        means = []
        for prompt in work.prompts:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
            chosen = []
            for start in range(0, len(prompt), PROMPT_ROWS):
                part = prompt[start : start + PROMPT_ROWS]
                logits = self._decode(context, [_Entry(token, start + i, 0, True) for i, token in enumerate(part)])
                targets = prompt[start + 1 : start + 1 + len(part)]
                rows = logits[: len(targets)]
                chosen.append(rows[np.arange(len(targets)), targets] - _logsumexp(rows))
            means.append(np.concatenate(chosen).mean())
        return np.array(means, np.float32)[:, None, None]

    def _generate(self, work: Workload) -> np.ndarray | None:
        count = len(work.prompts)
        context = self._context(count, count * (max(map(len, work.prompts)) + work.max_tokens), False)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        entries = [
            entry
            for number, prompt in enumerate(work.prompts)
            for entry in _entries(prompt, 0, number, wants_last=True)
        ]
        tokens = np.empty((count, work.max_tokens), np.int32)
        readings = np.empty((count, work.max_tokens, len(work.read_ids)), np.float32)
        grammars = self._grammars(count) if work.has_form else []
        for step in range(work.max_tokens):
            logits = self._decode(context, entries)
            tokens[:, step] = self._drawn(logits, work, grammars)
            if work.read_ids:
                readings[:, step] = _chosen(logits, work)
            entries = [
                _Entry(int(token), len(prompt) + step, number, True)
                for number, (token, prompt) in enumerate(zip(tokens[:, step], work.prompts, strict=True))
            ]
        for row in tokens:
            self._text(row)
        return readings if work.read_ids else None

    def _generate_with_lookups(self, work: Workload) -> None:
        """As llama.cpp's lookup decoding: a draft is what followed the last tokens before, and a token that was drawn
        ends it unless it is the draft's next; its cache entries are removed."""
        assert self._lookups is not None
        count, most = len(work.prompts), self._lookups["num_speculative_tokens"]
        context = self._context(count, count * (max(map(len, work.prompts)) + work.max_tokens + most), False)
        memory = llama_cpp.llama_get_memory(context)
        drafter = LlamaPromptLookupDecoding(self._lookups["prompt_lookup_max"], most)
        texts: list[list[int]] = [list(prompt) for prompt in work.prompts]
        drafts: list[list[int]] = [[] for _ in range(count)]
        ends = [len(prompt) + work.max_tokens for prompt in work.prompts]
        entries = [each for row, text in enumerate(texts) for each in _entries(text, 0, row, wants_last=True)]
        active = list(range(count))
        while active:
            drawn = iter(self._drawn(self._decode(context, entries), work, []).tolist())
            entries = []
            for row in active:
                text, draft = texts[row], drafts[row]
                rows = [next(drawn) for _ in range(len(draft) + 1)]
                num_right = next((i for i, token in enumerate(draft) if token != rows[i]), len(draft))
                llama_cpp.llama_memory_seq_rm(memory, row, len(text) + num_right, -1)
                text += rows[: num_right + 1]
                if len(text) < ends[row]:
                    drafts[row] = drafter(np.array(text)).tolist()[: ends[row] - len(text) - 1]
                    first = len(text) - 1
                    entries += [_Entry(t, first + i, row, True) for i, t in enumerate([text[-1], *drafts[row]])]
            active = [row for row in active if len(texts[row]) < ends[row]]
        for prompt, text in zip(work.prompts, texts, strict=True):
            self._text(np.array(text[len(prompt) :]))

    def _grammars(self, count: int) -> list[Any]:
        """The form's grammar at the beginning of each answer; compiled once."""
        if not self._compiled:
            self._compiled.append(llama_cpp.llama_sampler_init_grammar(self._vocab, GBNF.encode(), b"root"))
        while len(self._compiled) < count:
            self._compiled.append(llama_cpp.llama_sampler_clone(self._compiled[0]))
        for grammar in self._compiled[:count]:
            llama_cpp.llama_sampler_reset(grammar)
        return self._compiled[:count]

    def _drawn(self, logits: np.ndarray, work: Workload, grammars: list[Any]) -> np.ndarray:
        """A token of each row; as llama.cpp's own tools do, the whole vocabulary is tried only where a grammar does not
        allow the one that was drawn freely."""
        if work.temperature:
            logits = logits / work.temperature + self._rng.gumbel(size=logits.shape)
        tokens = logits.argmax(axis=1)
        for row, grammar in enumerate(grammars):
            if self._allowed(grammar, tokens[row : row + 1], logits[row])[0] == -np.inf:
                tokens[row] = self._allowed(grammar, np.arange(self._vocab_size), logits[row]).argmax()
            llama_cpp.llama_sampler_accept(grammar, int(tokens[row]))
        return tokens

    def _allowed(self, grammar: Any, ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Logits of `ids`, -inf where the grammar forbids them."""
        table = np.zeros(len(ids), dtype=[("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        table["id"], table["logit"] = ids, logits[ids]
        data = ctypes.cast(table.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data, len(ids), -1, False)
        llama_cpp.llama_sampler_apply(grammar, ctypes.byref(array))
        return table["logit"]

    def _decode(self, context: Any, entries: list[_Entry]) -> np.ndarray:
        """float32 [wanted, V], valid until the next call; the wanted tokens in the batch's order."""
        batch, wanted = self._batch, sum(entry.wants_logits for entry in entries)
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wants_logits
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(entries)} tokens gave {status}")
        if not wanted:
            return np.empty((0, self._vocab_size), np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (wanted, self._vocab_size))

    def _context(self, sequences: int, tokens: int, shared: bool) -> Any:
        """A context for `sequences` with `tokens` in all, with a common cache if `shared`."""
        rounded = -(-tokens // (256 * sequences)) * 256 * sequences
        key = (sequences, rounded, shared)
        if key not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = rounded, BATCH_TOKENS, sequences, shared
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[key] = llama_cpp.llama_init_from_model(self._model, params)
            if not self._contexts[key]:
                raise RuntimeError(f"llama.cpp makes no context of {rounded} tokens for {sequences} sequences")
        context = self._contexts[key]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        return context

    def _free_contexts(self) -> None:
        for context in self._contexts.values():
            llama_cpp.llama_free(context)
        self._contexts.clear()

    def _text(self, tokens: np.ndarray) -> str:
        ids = (llama_cpp.llama_token * len(tokens))(*map(int, tokens))
        buffer = ctypes.create_string_buffer(64 * len(tokens))
        size = llama_cpp.llama_detokenize(self._vocab, ids, len(tokens), buffer, len(buffer), False, True)
        return buffer.raw[: max(0, size)].decode(errors="replace")


def _entries(tokens: list[int], start: int, sequence: int, wants_last: bool) -> Iterator[_Entry]:
    last = len(tokens) - 1 if wants_last else -1
    for index, token in enumerate(tokens):
        yield _Entry(token, start + index, sequence, index == last)


def _groups(work: Workload, most: int) -> Iterator[list[int]]:
    """Indices of prompts that fit into a batch."""
    group: list[int] = []
    tokens = 0
    for index, prompt in enumerate(work.prompts):
        own = len(prompt) - work.shared
        if group and (len(group) == most or tokens + own > BATCH_TOKENS):
            yield group
            group, tokens = [], 0
        group.append(index)
        tokens += own
    yield group


def _chosen(logits: np.ndarray, work: Workload) -> np.ndarray:
    return logits[:, work.read_ids] - _logsumexp(logits)[:, None]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - _logsumexp(logits)[:, None]


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    highest = logits.max(axis=1)
    return highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))


def main() -> None:
    """Convert a file's weights to bfloat16."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file's weights to bfloat16.")
    parser.add_argument("source", help="GGUF file")
    parser.add_argument("target", help="GGUF file to write")
    args = parser.parse_args()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
    if llama_cpp.llama_model_quantize(args.source.encode(), args.target.encode(), params):
        raise SystemExit(f"llama.cpp cannot convert {args.source}")


if __name__ == "__main__":
    main()
