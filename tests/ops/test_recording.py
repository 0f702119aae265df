"""Recorded kernel calls: a replay does what the calls did, on what the memory holds then."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from vllm.ops._dispatch import cpu_ops, force
from vllm.ops.embedding import embedding
from vllm.ops.gate_and_mul import gate_and_mul
from vllm.ops.packed_linear import pack_linear, packed_linear
from vllm.ops.recording import Deferral, RecordedMemory, Recording, call_host, can_record
from vllm.ops.rms_norm import fused_add_rms_norm_, rms_norm

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="the C++ operators are not built")


class Layer:
    """A small layer of several operators, with views and in-place writes between them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(50, 24, generator=generator)
        self.norm = torch.randn(24, generator=generator)
        self.head_norm = torch.randn(8, generator=generator)
        self.up = pack_linear(torch.randn(64, 24, generator=generator), torch.randn(64, generator=generator))
        self.down = pack_linear(torch.randn(24, 32, generator=generator), None)

    def __call__(self, ids):
        residual = embedding(ids, self.table)
        hidden = rms_norm(residual, self.norm, 1e-6)
        hidden = rms_norm(hidden.view(len(ids), 3, 8), self.head_norm, 1e-6).flatten(1)
        hidden = packed_linear(gate_and_mul(packed_linear(hidden, self.up), "gelu_tanh"), self.down)
        return fused_add_rms_norm_(hidden, residual, self.norm, 1e-6)


def record(layer, ids):
    with Recording() as recording:
        out = layer(ids)
    return recording, out


def test_a_replay_follows_its_inputs():
    layer = Layer()
    ids = torch.tensor([3, 1, 4])
    recording, out = record(layer, ids)
    assert not recording.missed
    assert torch.equal(out, layer(ids))
    for others in ([0, 49, 7], [3, 1, 4], [9, 9, 9]):
        ids.copy_(torch.tensor(others))
        out.fill_(torch.nan)
        recording.replay()
        assert torch.equal(out, layer(torch.tensor(others)))


def test_the_memory_between_is_kept():
    layer = Layer()
    ids = torch.tensor([5, 6])
    recording, out = record(layer, ids)
    gc.collect()
    squatters = [torch.full((2, 64), torch.nan) for _ in range(200)]
    recording.replay()
    assert torch.equal(out, layer(ids))
    assert all(squatter.isnan().all() for squatter in squatters)


def test_what_is_gone_makes_room():
    x, weight = torch.randn(3, 24), torch.randn(24)
    with Recording() as recording:
        out = rms_norm(x, weight, 1e-6)
        places = {rms_norm(out, weight, 1e-6).data_ptr() for _ in range(5)}
    assert not recording.missed
    assert len(places) == 1
    assert out.data_ptr() not in places


@pytest.mark.parametrize("mode", [Recording, lambda: Deferral(RecordedMemory())], ids=["recorded", "deferred"])
def test_an_empty_tensor_has_none_of_the_memory(mode):
    """Whoever keeps it for its dtype would keep the memory."""
    with mode():
        kept = [torch.empty(0, dtype=torch.bfloat16), torch.ones(2, 3).new_empty(4, 0)]
    assert [(each.shape, each.dtype) for each in kept] == [((0,), torch.bfloat16), ((4, 0), torch.float32)]
    assert not any(each.untyped_storage().data_ptr() for each in kept)


def test_recordings_that_share_memory_take_turns():
    layer, memory = Layer(), RecordedMemory()
    ids = torch.tensor([3, 1, 4])
    recorded = []
    for count in (1, 2, 3):
        recording = Recording(memory)
        with recording:
            recorded.append((recording, layer(ids[:count])))
    # All rows of these fit into a block of the same size.
    assert len({out.data_ptr() for _, out in recorded}) == 1
    for others in ([0, 49, 7], [3, 1, 4]):
        ids.copy_(torch.tensor(others))
        for count in (3, 1, 2):
            recording, out = recorded[count - 1]
            recording.replay()
            assert torch.equal(out, layer(ids[:count]))


def test_memory_outlives_its_recordings_while_a_result_does():
    layer = Layer()
    recording, out = record(layer, torch.tensor([8]))
    expected = layer(torch.tensor([8]))
    del recording
    gc.collect()
    squatters = [torch.full((1, 24), torch.nan) for _ in range(200)]
    assert torch.equal(out, expected)
    assert len(squatters) == 200


def test_calls_of_the_host_come_before_and_after():
    layer, ids, brought, said = Layer(), torch.tensor([3, 1, 4]), [torch.tensor([5, 5, 6])], []
    call_host(lambda: said.append("outside"))
    with Recording() as recording:
        call_host(lambda: ids.copy_(brought[0]))
        out = layer(ids)
        call_host(lambda: said.append(out.clone()))
    brought[0] = torch.tensor([9, 8, 7])
    recording.replay()
    assert said[0] == "outside" and len(said) == 3
    for result, given in zip(said[1:], ([5, 5, 6], [9, 8, 7]), strict=True):
        assert torch.equal(result, layer(torch.tensor(given)))


def test_no_kernel_may_follow_the_last_call_of_the_host():
    layer, ids = Layer(), torch.tensor([3, 1, 4])
    with Recording() as recording:
        layer(ids)
        call_host(lambda: None)
        layer(ids)
    assert any("after a call of the host" in each for each in recording.missed)


def test_what_is_not_ours_is_noticed():
    layer = Layer()
    with Recording() as recording:
        layer(torch.tensor([1])).add(1.0)
    assert recording.missed == {"aten.add.Tensor"}


def test_a_copy_that_hides_in_a_view_is_noticed():
    x = torch.randn(4, 6)[:, :4]
    with Recording() as recording:
        x.reshape(-1)
    assert recording.missed


def test_the_references_cannot_be_recorded():
    with force("reference"):
        assert not can_record(torch.zeros(1))
        with Recording() as recording:
            rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
    assert recording.missed


def test_recording_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), Recording():
        raise ZeroDivisionError
    layer = Layer()
    recording, out = record(layer, torch.tensor([2]))
    out.zero_()
    recording.replay()
    assert torch.equal(out, layer(torch.tensor([2])))


def test_nothing_heavy_is_loaded():
    """torch.compile's frontend takes seconds to import."""
    program = (
        "import sys, torch\n"
        "from vllm.ops.recording import RecordedMemory, Recording, can_record\n"
        "from vllm.ops.rms_norm import rms_norm\n"
        "x, weight = torch.ones(1, 4), torch.ones(4)\n"
        "assert can_record(x)\n"
        "with Recording() as recording:\n"
        "    rms_norm(x, weight, 1e-6)\n"
        "assert not recording.missed\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_one_at_a_time_on_a_thread():
    with Recording(), pytest.raises(RuntimeError, match="records already"):
        Recording().__enter__()


def test_a_copy_that_may_be_a_view_is_missed():
    wide = torch.randn(3, 64)
    for columns, copies in ((64, False), (8, True)):
        with Recording() as recording:
            wide[:, :columns].contiguous()
        assert bool(recording.missed) == copies


def test_deferred_calls_are_made_at_the_end():
    layer, ids = Layer(), torch.tensor([3, 49, 3, 0])
    expected = [layer(ids), layer(ids.flip(0))]
    memory = RecordedMemory()
    for turn, given in enumerate((ids, ids.flip(0))):
        with Deferral(memory):
            out = layer(given)
        assert torch.equal(out, expected[turn])


def test_deferred_calls_are_made_before_what_needs_them():
    """An operation of PyTorch's, one that looks like a view's, a call of the host."""
    layer, ids, seen = Layer(), torch.tensor([3, 49, 3, 0]), []
    hidden = layer(ids)
    with Deferral(RecordedMemory()):
        doubled = 2 * layer(ids)
        turned = layer(ids).T.contiguous()
        ours = layer(ids)
        call_host(lambda: seen.append(ours.tolist()))
    assert torch.equal(doubled, 2 * hidden) and torch.equal(turned, hidden.T) and seen == [hidden.tolist()]


def test_deferred_calls_are_forgotten_after_an_error():
    table, memory = torch.zeros(5, 8), RecordedMemory()
    norm = torch.ones(8)
    with pytest.raises(ZeroDivisionError), Deferral(memory):
        fused_add_rms_norm_(torch.ones(5, 8), table, norm, 1e-6)
        _ = 1 / 0
    assert not table.any()
    with Deferral(memory):
        fused_add_rms_norm_(torch.ones(5, 8), table, norm, 1e-6)
        assert not table.numpy().any()
    assert (table == 1).all()
