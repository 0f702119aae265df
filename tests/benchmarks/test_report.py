"""Workloads, bounds, tables: the benchmark's parts that only compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from layouts import needs_kernels

Import = Callable[[str], ModuleType]


def test_workloads_are_seeded_and_differ_between_repeats(benchmark_module: Import) -> None:
    workloads = benchmark_module("workloads")
    first = workloads.make_workload("score", 0)
    assert first == workloads.make_workload("score", 0)
    assert first.digest == workloads.make_workload("score", 0).digest
    assert len(first.prompts) == 256 and all(30 <= len(prompt) <= 50 for prompt in first.prompts)
    other = workloads.make_workload("score", 1)
    assert {tuple(prompt) for prompt in other.prompts}.isdisjoint(map(tuple, first.prompts))
    assert other.digest != first.digest

    prefixed = workloads.make_workload("score_prefix", 0)
    assert len({tuple(prompt[: prefixed.shared]) for prompt in prefixed.prompts}) == 1
    assert len({tuple(prompt) for prompt in prefixed.prompts}) == 256
    questions = workloads.make_workload("questions", 0)
    assert (questions.shared, len(questions.prompts)) == (1000, 64)
    assert {len(prompt) - 1000 for prompt in questions.prompts} <= set(range(30, 41))
    assert workloads.make_workload("decode64", 0).amount == 64 * 64
    with pytest.raises(ValueError, match="unknown row 'startup'"):
        workloads.make_workload("startup", 0)


def test_the_paired_rows_have_prompts_of_equal_lengths(benchmark_module: Import) -> None:
    make = benchmark_module("workloads").make_workload
    plain, ids = make("decode64", 3), make("decode64_ids", 3)
    assert [len(prompt) for prompt in plain.prompts] == [len(prompt) for prompt in ids.prompts]
    assert {tuple(prompt) for prompt in plain.prompts}.isdisjoint(map(tuple, ids.prompts))
    assert [len(prompt) for prompt in plain.prompts] != [len(prompt) for prompt in make("decode64", 4).prompts]


# Two layers; every weight has its own size.
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 100,
}


def _counted(bounds: ModuleType, work: Any) -> dict[str, int]:
    counted: dict[str, int] = {}
    for product, rows in bounds.count_work(work, bounds.ModelShape(**SHAPE)).rows.items():
        counted[product.matrix] = counted.get(product.matrix, 0) + rows
    return counted


def test_scoring_computes_the_last_layer_for_read_rows_alone(benchmark_module: Import) -> None:
    bounds, workloads = benchmark_module("bounds"), benchmark_module("workloads")
    work = workloads.Workload([[1] * 10, [2] * 30], 1, "req/s", read_ids=(1, 2))
    assert _counted(bounds, work) == {"qkv": 2 * 40, "o": 40 + 2, "gate_up": 40 + 2, "down": 40 + 2, "head": 2}
    shared = workloads.Workload([[1] * 10 + [2] * 5, [1] * 10 + [3] * 5], 1, "req/s", shared=10)
    assert _counted(bounds, shared)["qkv"] == 2 * 20
    whole = workloads.Workload([[1] * 10, [2] * 30], 1, "req/s", reads_prompt=True)
    assert _counted(bounds, whole) == dict.fromkeys(["qkv", "o", "gate_up", "down"], 2 * 40) | {"head": 40}


def test_decoding_computes_a_row_a_sequence_and_step_and_reads_the_cache(benchmark_module: Import) -> None:
    bounds, workloads = benchmark_module("bounds"), benchmark_module("workloads")
    work = workloads.Workload([[1] * 10, [2] * 6], 4, "tok/s")
    counted = bounds.count_work(work, bounds.ModelShape(**SHAPE))
    assert _counted(bounds, work)["qkv"] == 2 * 16 + 2 * 2 * 3
    assert _counted(bounds, work)["head"] == 2 + 2 * 3
    # Keys and values of one head of 4 values in 2 layers, 2 bytes each; after 10 tokens 11, 12 and 13 are attended to.
    assert counted.cache_bytes == (11 + 12 + 13 + 7 + 8 + 9) * 2 * 2 * 4 * 2


def test_attention_counts_each_token_with_the_keys_up_to_it(benchmark_module: Import) -> None:
    bounds, workloads = benchmark_module("bounds"), benchmark_module("workloads")
    shape = bounds.ModelShape(**SHAPE)

    def flops(*fields: Any, **more: Any) -> int:
        return bounds.count_work(workloads.Workload(*fields, **more), shape).attention_flops

    # Two products of a query of 3 heads of 4 values, in 2 layers; the last layer has the last tokens' queries alone.
    pair = 4 * 3 * 4
    assert flops([[1] * 4, [2] * 3], 1, "req/s") == pair * ((1 + 2 + 3 + 4) + (1 + 2 + 3) + 4 + 3)
    assert flops([[1] * 4], 1, "req/s", reads_prompt=True) == 2 * pair * (1 + 2 + 3 + 4)
    assert flops([[1] * 4, [1] * 4], 1, "req/s", shared=2) == pair * ((1 + 2 + 3 + 4) + (3 + 4) + 4 + 4)
    computed = workloads.make_workload("decode_8k", 0)
    assert (len(computed.prompts[0]), computed.max_tokens, computed.amount) == (8001, 64, 64)
    assert bounds.count_work(computed, shape).attention_flops == 2 * pair * 8001
    assert [len(workloads.make_workload(row, 0).prompts) for row in ("prompt_1k", "prompt_4k", "prompt_32k")] == [
        8,
        2,
        1,
    ]


packs_bfloat16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN packs no bfloat16 on this CPU",
)


def test_a_bound_is_calls_times_seconds_and_bytes_over_bandwidth(benchmark_module: Import) -> None:
    bounds = benchmark_module("bounds")
    shape, product = bounds.ModelShape(**SHAPE), bounds.Product("down", 4)
    rates = bounds.Rates({product: 0.5}, {product: "packed_f32"}, 1000.0)
    bound = bounds.make_bound(bounds.Work({product: 10}, 500, 4096), shape, rates)
    assert bound.gemm == 10 / 4 * 0.5
    # The product's 2 x 8 x 16 x 4 operations take half a second.
    assert bound.attention == 4096 / (2 * 8 * 16 * 4 / 0.5)
    assert bound.memory == (10 / 4 * 8 * 16 * 2 + 500) / 1000
    assert bound.seconds == bound.gemm + bound.attention
    better = bounds.Rates({product: 0.4}, {product: "onednn"}, 900.0)
    best = rates.best_of(better)
    assert (best.seconds[product], best.kernels[product], best.read_bytes_per_second) == (0.4, "onednn", 1000.0)
    assert bounds.rates_from_json(bounds.rates_to_json(rates)) == rates


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN")
def test_products_are_in_float32_where_onednn_packs_no_bfloat16(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = benchmark_module("bounds")
    measured: list[str] = []

    def time_products(shape: Any, products: Any, kernel: str, sweeps: int) -> dict[Any, float]:
        measured.append(kernel)
        return {products[0]: 1.0}

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    monkeypatch.setattr(bounds, "measure_read_rate", lambda num_bytes: 1.0)
    shape, products = bounds.ModelShape(**SHAPE), [bounds.Product("down", 4), bounds.Product("head", 2)]
    with torch.inference_mode():
        assert bounds._time_products(shape, products, "onednn_float32", 1).keys() == set(products)
    monkeypatch.setattr(bounds, "_time_products", time_products)
    bounds.measure_rates(shape, products)
    assert measured[-1] == "onednn_float32" and "onednn" not in measured


@needs_kernels
@pytest.mark.parametrize("kernel", ["packed_fp16", pytest.param("onednn", marks=packs_bfloat16)])
def test_a_kernel_that_rounds_bounds_no_head(kernel: str, benchmark_module: Import) -> None:
    bounds = benchmark_module("bounds")
    products = [bounds.Product("down", 4), bounds.Product("head", 2)]
    with torch.inference_mode():
        timed = bounds._time_products(bounds.ModelShape(**SHAPE), products, kernel, 1)
    assert timed.keys() == {products[0]}


def test_the_bounds_kernels_are_named(benchmark_module: Import) -> None:
    report = benchmark_module("report")
    assert report.kernels_line(_result()) == ""
    products = [{"kernel": kernel} for kernel in ("packed_f32", "onednn_float32", "packed_f32")]
    tables = report.make_tables(_result(rates={"products": products}))
    assert "GEMM alone: 2 products by packed_f32, 1 products by onednn_float32" in tables


def _cell(*values: float, **fields: Any) -> dict[str, Any]:
    return {"values": list(values), "seconds": [10 / value for value in values], "check": -5.0, **fields}


def _result(**changes: Any) -> dict[str, Any]:
    rows = {
        "startup": {"unit": "s", "engines": {"ours": _cell(3.0, 1.0, 2.0), "upstream": _cell(20.0)}},
        "score": {
            "unit": "req/s",
            "engines": {"ours": _cell(1500.0), "upstream": _cell(1000.0), "transformers": _cell(1600.0)},
        },
        "peak_memory": {"unit": "MiB", "engines": {"ours": {"values": [500]}, "upstream": {"values": [900]}}},
    }
    engines = {name: {"version": "1", "notes": {}} for name in ("ours", "upstream", "transformers")}
    base = {"rows": rows, "engines": engines, "bounds": {}, "pairs": [], "failures": [], "scale": 1}
    return {**base, **changes}


def test_ratios_targets_and_what_is_missing(benchmark_module: Import) -> None:
    report = benchmark_module("report")
    assert report.medians_table(_result()).splitlines()[2:] == [
        "| startup | s | 2.00 (1.00 to 3.00) | 20.0 | - |",
        "| score | req/s | 1,500 | 1,000 | 1,600 |",
        "| peak_memory | MiB | 500 | 900 | - |",
    ]
    assert report.ratios_table(_result()).splitlines()[2:] == [
        "| startup | ours | upstream | 10.00x | 8x, under 4 s | yes |",
        "| score | ours | upstream | 1.50x | 1.25x | yes |",
        "| score | ours | transformers | 0.94x | ahead | no |",
        "| peak_memory | ours | upstream | 1.80x | 2x | no |",
    ]


def test_a_start_that_is_fast_enough_by_ratio_alone_is_not_reached(benchmark_module: Import) -> None:
    report = benchmark_module("report")
    rows = {"startup": {"unit": "s", "engines": {"ours": _cell(5.0), "upstream": _cell(90.0)}}}
    assert report.ratios_table(_result(rows=rows)).endswith("| 18.00x | 8x, under 4 s | no |")


def test_distance_from_the_bound_is_that_of_each_repeat(benchmark_module: Import) -> None:
    report = benchmark_module("report")
    rows = {"score": {"unit": "req/s", "engines": {"ours": _cell(10.0, 5.0, 2.5)}}}
    bound = {"gemm": [0.25, 1.25, 1.0], "attention": [0.25, 0.25, 0.0], "memory": [0.1, 0.1, 3.0]}
    table = report.bounds_table(_result(rows=rows, bounds={"score": bound}))
    # 1, 2 and 4 seconds: 50 %, 75 % and 75 % of the larger bound.
    assert table.splitlines()[-1] == "| score | 2.000 | 1.000 | 0.250 | 0.100 | 75% |"


def test_a_missed_target_says_what_it_allows_beside_the_products(benchmark_module: Import) -> None:
    report = benchmark_module("report")
    rows = {
        "score": {"unit": "req/s", "engines": {"ours": _cell(10.0, 5.0, 2.5), "upstream": _cell(4.5, 4.5, 4.5)}},
        "decode1": {"unit": "tok/s", "engines": {"ours": _cell(10.0), "upstream": _cell(5.0)}},
        "fullvocab": {"unit": "req/s", "engines": {"ours": _cell(10.0)}},
    }
    bounds = {row: {"gemm": [1.5, 1.0, 2.0], "attention": [0.0] * 3, "memory": [9.0, 9.0, 9.0]} for row in rows}
    table = report.misses_table(_result(rows=rows, bounds=bounds))
    # Ours takes 2 s; 1.25 times as fast as upstream's 2.22 s would be 1.78 s.
    assert table.splitlines()[2:] == ["| score | 2.000 | 1.778 | 1.500 | 0.278 | 0.500 |"]
    assert report.misses_table(_result(rows={"decode1": rows["decode1"]}, bounds=bounds)) == ""


def test_pairs_are_told_by_their_median(benchmark_module: Import) -> None:
    ids_line = benchmark_module("report").ids_line
    assert "+1.0% time (median of 3 pairs, -1.0% to +9.0%; target at most +2%: yes)" in ids_line(
        _result(pairs=[1.09, 1.01, 0.99])
    )
    assert ids_line(_result(pairs=[1.03])).endswith("no)") and ids_line(_result()) == ""


def test_doubtful_comparisons_are_named(benchmark_module: Import) -> None:
    report = benchmark_module("report")
    assert report.find_warnings(_result()) == []
    doubtful = _result(scale=0.1)
    doubtful["rows"]["score"]["engines"]["upstream"]["check"] = -9.0
    assert [warning.split()[0] for warning in report.find_warnings(doubtful)] == ["work", "score:"]


def test_sections_between_markers_are_replaced_alone(benchmark_module: Import) -> None:
    replace = benchmark_module("report").replace_section
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    new = replace(page, "x", "new\n")
    assert new == "a\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    assert replace(new, "x", "new") == new
    for broken in ("", "<!-- end x --><!-- begin x -->", page + page):
        with pytest.raises(ValueError, match="'<!-- begin x -->' and then"):
            replace(broken, "x", "new")


def test_the_documentation_has_its_sections(benchmark_module: Import) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in ("compare", "profile before", "profile after", "kernels"):
        assert "figures" in benchmark_module("report").replace_section(page, name, "figures")


def test_a_profile_adds_up_to_its_step(benchmark_module: Import) -> None:
    operations = [{"name": f"op{number}", "calls": 2, "microseconds": 100 - number} for number in range(16)]
    rest = {"name": "between the operations", "calls": 1, "microseconds": 480}
    step = {"steps": 3, "milliseconds": 1.9, "profiled_milliseconds": 2.0, "operations": [*operations, rest]}
    lines = benchmark_module("profile_step").make_table({"score": step}).splitlines()
    assert lines[0] == "One step of `score`: 1.90 ms, 2.00 ms under the profiler."
    assert lines[4] == "| op0 | 2 | 100 | 5.0% |"
    assert lines[-2:] == ["| 4 other operations | 8 | 346 | 17.3% |", "| between the operations | 1 | 480 | 24.0% |"]
