"""Readings over slices of the vocabulary against gathered logits, in time and bytes.

    python benchmarks/tp_readings.py                          # 2 ranks, 64 rows of 151,936 logits, 20 ids each
    python benchmarks/tp_readings.py --batches 1,8,64 --ids 2

A greedy step: every rank has a slice of each row's logits and needs the token; rank 0 needs the readings of the ids.
`slices` reduces on every rank, as the engine does; `gather` sends the logits to rank 0, which broadcasts the tokens.
Times are rank 0's, medians of alternating repeats, over gloo on 127.0.0.1 and over shared memory. Prints a markdown
table and JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import torch
from common import add_counts, make_parser, print_result, usable_cores
from report import markdown_table, number
from torch import Tensor

from vllm.distributed.communicator import Communicator, split_vocab
from vllm.distributed.process_group import connect_store, host_store, join_group
from vllm.distributed.shared_memory import Links, SharedMemoryCommunicator, make_links
from vllm.ops.token_readings import Readings
from vllm.v1.worker.gpu.sample.vocab import WHOLE
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of

_HOST = "127.0.0.1"
HEAD = "ranks connected by|rows|slices, ms|gather, ms|times faster|slices, B|gather, B|times fewer".split("|")


def main() -> None:
    """Measure every connection, print."""
    parser = make_parser("Readings over slices of the vocabulary against a gather of logits.", model=False)
    add_counts(parser, ranks=(2, "processes"), vocab_size=(151936, ""), ids=(20, "ids read of each row"))
    add_counts(parser, repeats=(20, "measured steps of each way"))
    parser.add_argument("--batches", default="1,8,64", help="rows a step (default: %(default)s)")
    args = parser.parse_args()
    args.batches = [int(each) for each in args.batches.split(",")]
    records = [record for name in ("gloo", "shared memory") for record in measure(name, args)]
    print(markdown_table(HEAD, [table_line(record) for record in records], 1))
    print_result(**vars(args), connections=records)


def measure(connection: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rank 0's records, one a batch."""
    # A fork inherits the shared memory's descriptors; no threads have been started here.
    context = multiprocessing.get_context("fork")
    store, links = host_store(_HOST, args.ranks), make_links(args.ranks)
    records: Queue[dict[str, Any]] = context.Queue()
    ranks = [
        context.Process(target=_run_rank, args=(rank, connection, args, store.port, links, records), daemon=True)
        for rank in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    for own in links:
        own.close()
    found = [records.get(timeout=600) for _ in args.batches]
    for process in ranks:
        process.join()
    return found


def _run_rank(
    rank: int, connection: str, args: argparse.Namespace, port: int, links: list[Links], records: Queue[dict[str, Any]]
) -> None:
    torch.set_num_threads(max(usable_cores() // args.ranks, 1))
    for each in links:
        if each.rank != rank:
            each.close()
    group: Communicator
    if connection == "gloo":
        store = connect_store(_HOST, port, args.ranks)
        group = join_group(store, rank, args.ranks, torch.device("cpu"), _HOST)
    else:
        group = SharedMemoryCommunicator(links[rank])
    with torch.inference_mode():
        for num_rows in args.batches:
            record = compare(group, num_rows, args.vocab_size, args.ids, args.repeats)
            if rank == 0:
                records.put({"connection": connection, **record})


def compare(group: Communicator, num_rows: int, vocab_size: int, num_ids: int, repeats: int) -> dict[str, Any]:
    """Both ways in turns: median milliseconds and bytes a step of one rank."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    ids = torch.randint(vocab_size, (num_rows, num_ids), generator=generator, dtype=torch.int32)
    own = split_vocab(vocab_size, group.world_size)[group.rank]
    part = logits[:, own.start : own.stop].contiguous()
    ways: dict[str, Callable[[], Readings | None]] = {
        "slices": partial(read_slices, group, part, vocab_size, ids),
        "gather": partial(gather_and_read, group, part, vocab_size, ids),
    }
    if (expected := ways["gather"]()) is not None:
        found = ways["slices"]()
        assert found is not None and torch.equal(found.ranks, expected.ranks)
        torch.testing.assert_close(found.lse, expected.lse)
    else:
        ways["slices"]()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    num_bytes = dict.fromkeys(ways, 0)
    for _ in range(repeats):
        for way, read in ways.items():
            group.all_reduce(torch.zeros(1))  # a barrier
            before, began = group.num_bytes.total(), time.perf_counter()
            read()
            seconds[way].append(time.perf_counter() - began)
            num_bytes[way] = group.num_bytes.total() - before
    return {
        "rows": num_rows,
        "milliseconds": {way: 1000 * statistics.median(each) for way, each in seconds.items()},
        "bytes": num_bytes,
    }


def read_slices(group: Communicator, part: Tensor, vocab_size: int, ids: Tensor) -> Readings:
    """As the sampler does for greedy rows."""
    columns = torch.nn.functional.pad(ids, (1, 0))
    return vocab_of(vocab_size, group).read(part, columns, 0, None)


def gather_and_read(group: Communicator, part: Tensor, vocab_size: int, ids: Tensor) -> Readings | None:
    """Rank 0 reads whole rows and broadcasts the tokens."""
    ranges = split_vocab(vocab_size, group.world_size)
    widest = max(map(len, ranges))
    parts = group.gather(torch.nn.functional.pad(part, (0, widest - part.shape[1])) if part.shape[1] < widest else part)
    readings: Readings | None = None
    tokens = torch.empty(len(ids), dtype=torch.int32)
    if parts is not None:
        whole = torch.cat([each[:, : len(own)] for each, own in zip(parts, ranges, strict=True)], dim=1)
        readings = WHOLE.read(whole, torch.nn.functional.pad(ids, (1, 0)), 0, None)
        tokens.copy_(readings.argmax)
    group.broadcast(tokens)
    return readings


def table_line(record: dict[str, Any]) -> list[str]:
    """One line under HEAD."""
    slices, gather = (record["milliseconds"][way] for way in ("slices", "gather"))
    few, many = (record["bytes"][way] for way in ("slices", "gather"))
    times = map(number, (slices, gather, gather / slices))
    return [record["connection"], str(record["rows"]), *times, f"{few:,}", f"{many:,}", number(many / few)]


if __name__ == "__main__":
    main()
