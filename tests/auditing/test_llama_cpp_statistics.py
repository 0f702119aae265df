"""Statistics of texts: figures, names and digits of llama.cpp's `llama-perplexity --kl-divergence`.

The reference here follows that program's sums, position by position, in float64, on planted logits.
"""

from __future__ import annotations

import math
from pathlib import Path

import httpx
import numpy as np
import pytest

import vllm
from vllm.auditing.text_rows import llama_cpp_lines, text_statistics, text_table
from vllm.auditing.text_task import compared
from vllm.loader.resolve import embedded_model_path

TEXT = (
    "The kettle stood on the stove and nobody had looked at it for an hour. Outside, the rain had stopped, and a man "
    "with a bicycle waited at the gate for his sister."
)


def printed(base: list[np.ndarray], quantised: list[np.ndarray], following: list[np.ndarray]) -> list[str]:
    """Lines of numbers from logits, [positions, vocabulary] a piece of text; in the order that llama.cpp prints."""
    sums, kls, changes = dict.fromkeys(("q", "qq", "b", "bb", "qb", "k", "kk", "p", "pp", "pppp", "same"), 0.0), [], []
    for b_rows, q_rows, tokens in zip(base, quantised, following, strict=True):
        for b, q, token in zip(b_rows.astype(np.float64), q_rows.astype(np.float64), tokens, strict=True):
            lb, lq = (each - each.max() - math.log(np.exp(each - each.max()).sum()) for each in (b, q))
            loss_b, loss_q = -float(lb[token]), -float(lq[token])
            kl = float((np.exp(lb) * (lb - lq)).sum())
            change = math.exp(-loss_q) - math.exp(-loss_b)
            values = (loss_q, loss_q**2, loss_b, loss_b**2, loss_q * loss_b, kl, kl**2, change, change**2, change**4)
            for name, value in zip(list(sums)[:-1], values, strict=True):
                sums[name] += value
            sums["same"] += int(b.argmax()) == int(q.argmax())
            kls.append(kl)
            changes.append(change)
    n = len(kls)

    def mean(first: str, second: str) -> tuple[float, float]:
        value = sums[first] / n
        return value, math.sqrt((sums[second] / n - value**2) / (n - 1))

    (log_q, error_q), (log_b, error_b) = mean("q", "qq"), mean("b", "bb")
    covariance = (sums["qb"] / n - log_q * log_b) / (n - 1)
    ratio, ratio_error = log_q - log_b, math.sqrt(error_q**2 + error_b**2 - 2 * covariance)
    ppl_q, ppl_b = math.exp(log_q), math.exp(log_b)
    difference = math.sqrt((ppl_q * error_q) ** 2 + (ppl_b * error_b) ** 2 - 2 * ppl_q * ppl_b * covariance)
    squares = mean("pp", "pppp")
    rms, same = math.sqrt(squares[0]), sums["same"] / n
    kls.sort()
    changes.sort()

    def at(values: list[float], share: float) -> float:
        place = share * (n - 1)
        low = int(place)
        return (1 - (place - low)) * values[low] + (place - low) * values[min(low + 1, n - 1)]

    pairs = [
        *((ppl_q, ppl_q * error_q), (ppl_b, ppl_b * error_b)),
        *((ratio, ratio_error), (math.exp(ratio), math.exp(ratio) * ratio_error), (ppl_q - ppl_b, difference)),
    ]
    lines = [f"{value:10.6f} ± {error:10.6f}" for value, error in pairs]
    lines.insert(2, f"{100 * covariance / (error_q * error_b):6.2f}%")
    lines.append("{:10.6f} ± {:10.6f}".format(*mean("k", "kk")))
    shares = (1, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001, 0)
    lines += [f"{at(kls, share):10.6f}" for share in shares]
    lines.append("{:6.3f} ± {:5.3f} %".format(*(100 * each for each in mean("p", "pp"))))
    shares = (1, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 0)
    lines += [f"{100 * at(changes, share):6.3f}%" for share in shares]
    lines.append(f"{100 * rms:6.3f} ± {100 * squares[1] / (2 * rms):5.3f} %")
    lines.append(f"{100 * same:6.3f} ± {100 * math.sqrt(same * (1 - same) / (n - 1)):5.3f} %")
    return lines


def ours(base: list[np.ndarray], quantised: list[np.ndarray], following: list[np.ndarray]) -> list[str]:
    """Lines of an audit, from the same logits."""
    return lines_of([_log_softmax(each) for each in base], [_log_softmax(each) for each in quantised], following)


def lines_of(base: list[np.ndarray], quantised: list[np.ndarray], following: list[np.ndarray]) -> list[str]:
    """Lines of an audit, from logprobs."""
    rows = []
    for index, (b, q, tokens) in enumerate(zip(base, quantised, following, strict=True)):
        logprobs = [each.astype(np.float32) for each in (b, q)]
        own = {"index": index, "own_logprobs": logprobs[0][np.arange(len(tokens)), tokens]}
        other = {name: values.tolist() for name, values in compared(logprobs[0], logprobs[1], tokens).items()}
        rows.append((own, other))
    table = text_table(iter(rows))
    assert table is not None
    return llama_cpp_lines(text_statistics(table))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    return values - np.logaddexp.reduce(values, axis=1, keepdims=True)


def float32_log_softmax(logits: np.ndarray) -> np.ndarray:
    """As llama.cpp and our sampler have it: normaliser and difference are float32."""
    greatest = logits.max(1, keepdims=True)
    exponentials = np.exp((logits - greatest).astype(np.float64)).astype(np.float32)
    return logits - (greatest + np.log(exponentials.sum(1, dtype=np.float64, keepdims=True)).astype(np.float32))


def check(found: list[str], expected: list[str]) -> None:
    """The same lines; a last digit may be rounded the other way, as an audit keeps logprobs in float32."""
    lines = numbers(found)
    assert len(lines) == len(expected) == 34
    for own, other in zip(lines, expected, strict=True):
        for a, b in zip(own.replace("%", "").split("±"), other.replace("%", "").split("±"), strict=True):
            digits = len(b.strip().partition(".")[2])
            assert len(a.strip().partition(".")[2]) == digits
            assert abs(float(a) - float(b)) < 1.5 * 10**-digits, (own, other)


def numbers(lines: list[str]) -> list[str]:
    return [line.rpartition(": ")[2].strip() for line in lines if line and "=====" not in line]


def test_figures_on_planted_logits() -> None:
    generator = np.random.default_rng(11)
    base = [generator.normal(size=(count, 300)).astype(np.float32) * 3 for count in (90, 61)]
    quantised = [(each + generator.normal(size=each.shape) * 0.2).astype(np.float32) for each in base]
    following = [each.argsort(1)[:, -generator.integers(1, 5)] for each in base]
    check(ours(base, quantised, following), printed(base, quantised, following))


def test_names_are_llama_cpps() -> None:
    generator = np.random.default_rng(12)
    base = [generator.normal(size=(120, 20)).astype(np.float32)]
    lines = ours(base, [base[0] + 0.1 * generator.normal(size=base[0].shape).astype(np.float32)], [base[0].argmax(1)])
    names = [line.partition(":")[0].rstrip() if ":" in line else line for line in lines if line]
    assert names == [
        "====== Perplexity statistics ======", "Mean PPL(Q)", "Mean PPL(base)", "Cor(ln(PPL(Q)), ln(PPL(base)))",
        "Mean ln(PPL(Q)/PPL(base))", "Mean PPL(Q)/PPL(base)", "Mean PPL(Q)-PPL(base)",
        "====== KL divergence statistics ======", "Mean    KLD", "Maximum KLD", "99.9%   KLD", "99.0%   KLD",
        "95.0%   KLD", "90.0%   KLD", "Median  KLD", "10.0%   KLD", " 5.0%   KLD", " 1.0%   KLD", " 0.1%   KLD",
        "Minimum KLD",
        "====== Token probability statistics ======", "Mean    Δp", "Maximum Δp", "99.9%   Δp", "99.0%   Δp",
        "95.0%   Δp", "90.0%   Δp", "75.0%   Δp", "Median  Δp", "25.0%   Δp", "10.0%   Δp", " 5.0%   Δp", " 1.0%   Δp",
        " 0.1%   Δp",
        "Minimum Δp", "RMS Δp", "Same top p",
    ]  # fmt: skip


def test_what_is_the_same_has_no_spread() -> None:
    base = [np.random.default_rng(13).normal(size=(40, 30)).astype(np.float32)]
    found = ours(base, base, [base[0].argmax(1)])
    assert "Mean    KLD:   0.000000 ±   0.000000" in found and "Same top p: 100.000 ± 0.000 %" in found
    assert "Mean PPL(Q)/PPL(base)         :   1.000000 ±   0.000000" in found


@pytest.mark.parametrize(("own", "ratio"), [([-5e3, -4e3, -3e3], math.inf), ([-6e2, -5e2, -4e2], math.exp(498))])
def test_a_figure_beyond_the_largest_float_is_infinite(own: list[float], ratio: float) -> None:
    """A server may give any logprobs."""
    candidate = {"own_logprobs": own, "same_top": [None] * 3}
    table = text_table([({"index": 0, "own_logprobs": [-1.0, -2.0, -3.0]}, candidate)])
    assert table is not None
    found = text_statistics(table)
    assert found.perplexity_ratio == pytest.approx(ratio) and found.perplexity_difference_error == math.inf


PRINTED = Path(__file__).parents[1] / "data" / "llama_perplexity.npz"


def base_logprobs(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Ids, int32 [pieces, n], and logprobs, float32 [pieces, n - 1 - n // 2, vocabulary], of a file that
    --kl-divergence-base wrote: 16 bits each, with a scale and the least one of each position. Those of -16 and below
    count as minus infinity there."""
    assert content[:8] == b"_logits_"
    size, vocabulary, pieces = np.frombuffer(content, np.int32, 3, 8)
    ids = np.frombuffer(content, np.int32, pieces * size, 20).reshape(pieces, size)
    width = 4 + vocabulary + vocabulary % 2
    rows = np.frombuffer(content, np.uint16, -1, 20 + ids.nbytes).reshape(pieces, -1, width)
    scale, least = np.moveaxis(rows[..., :4].copy().view(np.float32), -1, 0)[..., None]
    values = scale * rows[..., 4 : 4 + vocabulary] + least
    return ids, np.where(values > -16, values, -np.inf)


def test_figures_that_llama_perplexity_has_printed() -> None:
    """The file is of llama.cpp 0c1e570 (0.5.0, in llama-cpp-python 0.3.36): what --kl-divergence-base wrote of a random
    model of 110 tokens, the logits of the same in Q4_0 beside it, and what --kl-divergence printed."""
    kept = np.load(PRINTED)
    ids, base = base_logprobs(kept["base"].tobytes())
    first = ids.shape[1] // 2
    quantised = [float32_log_softmax(each) for each in kept["logits"].reshape(base.shape)]
    found = lines_of(list(base), quantised, list(ids[:, first + 1 :]))
    assert found == str(kept["printed"]).splitlines()


PIECE = 16


def llama_cpp_logprobs(file: Path, pieces: list[list[int]]) -> list[np.ndarray]:
    """llama.cpp's, float32 [PIECE / 2 - 1, vocabulary] a piece, after each token of its second half but the last."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port, params.warmup = str(file), 256, 0, False
    params.n_parallel, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 1, 2, 2
    server = xllamacpp.Server(params)
    found = []
    for piece in pieces:
        rows = []
        for end in range(PIECE // 2 + 1, PIECE):
            body = {"prompt": piece[:end], "max_tokens": 1, "temperature": 0, "logprobs": 1_000_000}
            answer = httpx.post(f"{server.listening_address}/v1/completions", json=body, timeout=120).json()
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            row = np.full(len(entries), np.nan, dtype=np.float32)
            row[[each["id"] for each in entries]] = [each["logprob"] for each in entries]
            assert not np.isnan(row).any()
            rows.append(row)
        found.append(np.stack(rows))
    return found


@pytest.mark.peer
def test_figures_on_llama_cpps_own_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines from its logits of two files; an audit of the same files and text, by our engine, is near them:
    llama.cpp rounds activations to 8 bits."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from gguf_types import rewrite

    files = [Path(str(embedded_model_path())), tmp_path / "q4_0.gguf"]
    rewrite(*files, "Q4_0")
    ids = vllm.LLM(str(files[0]), max_model_len=256).get_tokenizer().encode(TEXT)
    pieces = [ids[start : start + PIECE] for start in range(0, len(ids) - PIECE + 1, PIECE)][:1]
    base, quantised = (llama_cpp_logprobs(file, pieces) for file in files)
    following = [np.asarray(piece[PIECE // 2 + 1 :]) for piece in pieces]
    check(ours(base, quantised, following), printed(base, quantised, following))
    audited = vllm.audit(
        [TEXT], reference=f"{files[0]}:float32", candidates=f"{files[1]}:float32", chunk_tokens=PIECE,
        max_model_len=256, readings=tmp_path / "r",
    ).candidates[0].text  # fmt: skip
    theirs = float(printed(base, quantised, following)[6].partition("±")[0])
    assert audited.positions >= len(following[0])
    assert audited.kl_mean == pytest.approx(theirs, rel=0.5)
