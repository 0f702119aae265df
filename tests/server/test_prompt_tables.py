"""A prompt's readings as arrays over HTTP: every form against transformers in float64, and against one another."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy
import torch
from asgi import AppThread, Serve
from byte_tokenizer import VOCAB_SIZE, byte_ids
from real_sockets import RawClient, listening
from tiny_llm import make_tiny_model
from transformers import AutoModelForCausalLM

from vllm.logprobs import PromptTables
from vllm.logprobs.divergence import kl_terms
from vllm.server.protocol.generate import GenerateResponse
from vllm.server.protocol.generation import CompletionResponse
from vllm.server.serving.generation.prompt_tables import ARROW, BODY_TYPES, BYTES, SAFETENSORS, accepted_body

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
IDS = byte_ids("a prompt whose readings come in several parts, each of a step")
NUM_ROWS = len(IDS) - 1
RNG = np.random.default_rng(0)
ASKED = RNG.permuted(np.tile(np.arange(VOCAB_SIZE), (NUM_ROWS, 1)), axis=1)[:, :5].astype(np.int32)
ASKED[3, 2:] = ASKED[7] = -1
STUDENT = np.log(RNG.dirichlet(np.ones(6), NUM_ROWS)[:, :5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> AppThread:
    """Its steps are of 16 tokens."""
    fields = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 8192, "enable_prefix_caching": False}
    return serve(fields, folder)


@pytest.fixture(scope="module")
def reference(folder):
    """Float64 logits [R, V], each of which predicts the token after it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0, :-1].numpy()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def body(path, **fields):
    """The body of a request for the readings of IDS; `fields` of SamplingParams are where the path has them."""
    own = {"max_tokens": 0, **fields}
    if path == COMPLETIONS:
        return {"model": "tiny", "prompt": IDS, **own}
    top = {"encoding_format", "prompt_tables", "prompt_student_logprobs", "stream", "stream_options", "token_ids"}
    params = {name: value for name, value in own.items() if name not in top}
    return {"model": "tiny", "token_ids": IDS, **{n: own[n] for n in top & set(own)}, "sampling_params": params}


def array_of(value):
    """An array of a JSON answer."""
    if isinstance(value, str):
        return np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False)
    return np.array([[np.nan if each is None else each for each in np.atleast_1d(row)] for row in value]).squeeze()


def as_json(server, path, **fields):
    answer = server.post(path, **body(path, **fields))
    (GenerateResponse if path == GENERATE else CompletionResponse).model_validate(answer)
    found = answer if path == GENERATE else answer["choices"][0]
    assert found.get("prompt_logprobs") is None and "prompt_token_id_logprobs" not in answer
    return {name: array_of(each) for name, each in found["prompt_tables"].items()}


def as_events(server, path, **fields):
    chunks = server.stream(path, **body(path, **{"max_tokens": 2, "ignore_eos": True, **fields}))
    for chunk in chunks:
        (GenerateResponse if path == GENERATE else CompletionResponse).model_validate(chunk)
    parts = [chunk["prompt_tables"] for chunk in chunks if "prompt_tables" in chunk]
    assert len(parts) == -(-NUM_ROWS // 16)
    assert sum(bool(chunk["choices"]) for chunk in chunks) == 2
    return {name: np.concatenate([array_of(part[name]) for part in parts]) for name in parts[0]}


def as_bytes(server, path, kind, **fields):
    answer = server.request("POST", path, json=body(path, **fields), headers={"Accept": kind})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == kind and "content-length" not in answer.headers
    if kind != ARROW:
        return safetensors.numpy.load(answer.content)
    reader = pa.ipc.open_stream(answer.content)
    assert reader.schema.metadata[b"model"] == b"tiny"
    batches = list(reader)
    if "prompt_logprob_start" not in fields:
        assert len(batches) >= -(-NUM_ROWS // 16)  # one a step
    arrays = {}
    for name, column in zip(reader.schema.names, pa.Table.from_batches(batches).columns, strict=True):
        whole = column.combine_chunks()
        if pa.types.is_fixed_size_list(whole.type):
            arrays[name] = whole.flatten().to_numpy().reshape(-1, whole.type.list_size)
        else:
            arrays[name] = whole.to_numpy()
    return arrays


def assert_true(arrays, reference, num_topk, is_json=False):
    lse = np.log(np.exp(reference).sum(axis=1))
    logprobs, every = reference - lse[:, None], np.arange(NUM_ROWS)
    impossible = np.nan if is_json else -np.inf
    np.testing.assert_array_equal(arrays["positions"], every + 1)
    np.testing.assert_array_equal(arrays["token_ids"][:, num_topk:], ASKED)
    is_id = arrays["token_ids"] >= 0
    np.testing.assert_array_equal(arrays["counts"], is_id.sum(axis=1))
    for name, expected in (("logprobs", logprobs), ("logits", reference)):
        cells = np.take_along_axis(expected, np.maximum(arrays["token_ids"], 0).astype(int), axis=1)
        np.testing.assert_allclose(arrays[name], np.where(is_id, cells, impossible), atol=1e-4, err_msg=name)
        np.testing.assert_allclose(arrays[f"own_{name}"], expected[every, IDS[1:]], atol=1e-4, err_msg=name)
    np.testing.assert_array_equal(arrays["own_token_ids"], IDS[1:])
    np.testing.assert_allclose(arrays["lse"], lse, atol=1e-4)
    np.testing.assert_allclose(arrays["entropy"], -(np.exp(logprobs) * logprobs).sum(axis=1), atol=1e-4)
    for name, ids in (("ranks", arrays["token_ids"]), ("own_ranks", arrays["own_token_ids"])):
        table, ranks = ids.reshape(NUM_ROWS, -1).astype(int), arrays[name].reshape(NUM_ROWS, -1)
        chosen = np.take_along_axis(reference, np.maximum(table, 0), axis=1)[..., None]
        best, worst = (1 + (reference[:, None] > chosen + off).sum(axis=-1) for off in (2e-4, -2e-4))
        assert ((best <= ranks) & (ranks <= worst))[table >= 0].all() and (ranks[table < 0] == 0).all(), name
    top = np.sort(reference, axis=1)[:, ::-1][:, :num_topk]
    np.testing.assert_allclose(arrays["logits"][:, :num_topk], top, atol=1e-4)


READ = {"prompt_logprob_token_ids": ASKED.tolist(), "prompt_logprobs": 2, "logprob_entropy": True}


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_every_form_has_the_models_readings(server, reference, path):
    ways = {
        "base64": as_json(server, path, encoding_format="base64", **READ),
        "arrow": as_bytes(server, path, ARROW, **READ),
        "safetensors": as_bytes(server, path, SAFETENSORS, **READ),
        "bytes": as_bytes(server, path, BYTES, **{**READ, "prompt_logprob_token_ids": npy(ASKED)}),
        "events": as_events(server, path, encoding_format="base64", **READ),
    }
    for way, arrays in ways.items():
        assert_true(arrays, reference, num_topk=2)
        assert {each.dtype.name for each in arrays.values()} == {"int32", "float32"}, way
        assert ("prompt_index" in arrays) == (way in ("arrow", "safetensors", "bytes"))
        for name, array in ways["base64"].items():
            # The bits are those of one engine; a step has other rows each time.
            np.testing.assert_allclose(arrays[name], array, atol=1e-5, err_msg=f"{way} {name}")
    names = list(ways["base64"])
    assert_true(as_json(server, path, prompt_tables=names, **READ), reference, num_topk=2, is_json=True)


@pytest.mark.parametrize("fields", [{"tensor_parallel_size": 2}, {"num_gpu_blocks_override": 9}], ids=["two", "tight"])
def test_over_ranks_and_after_preemption(serve, folder, reference, fields):
    server = serve({"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False, **fields}, folder)
    neighbours = [
        server.begin("POST", COMPLETIONS, json=body(COMPLETIONS, max_tokens=50, ignore_eos=True)) for _ in range(3)
    ]
    asked = body(GENERATE, encoding_format="base64", max_tokens=40, ignore_eos=True, **READ)
    begun = server.begin("POST", GENERATE, json=asked)
    for kind in (ARROW, SAFETENSORS):
        assert_true(as_bytes(server, GENERATE, kind, **READ), reference, num_topk=2)
    tables = begun.result(60).json()["prompt_tables"]
    assert_true({name: array_of(each) for name, each in tables.items()}, reference, num_topk=2)
    assert [each.result(60).json()["usage"]["completion_tokens"] for each in neighbours] == [50] * 3
    preempted = re.search(r"vllm:num_preemptions_total\{.*\} (\S+)", server.request("GET", "/metrics").text)
    assert (float(preempted[1]) > 0) == ("num_gpu_blocks_override" in fields)


@pytest.mark.parametrize("given", [STUDENT.tolist(), npy(STUDENT)], ids=["lists", "npy"])
def test_divergences_come_without_the_tables(server, reference, given):
    fields = {"prompt_logprob_token_ids": npy(ASKED), "prompt_student_logprobs": given}
    names = ["reverse_kl", "forward_kl"]
    for path in (GENERATE, COMPLETIONS):
        found = as_json(server, path, prompt_tables=names, **fields)
        assert set(found) == set(names)
        streamed = as_events(server, path, prompt_tables=names, **fields)
        arrow = as_bytes(server, path, ARROW, prompt_tables=names, **fields)
        for name in names:
            np.testing.assert_allclose(found[name], arrow[name], atol=1e-5)
            np.testing.assert_allclose(found[name], streamed[name], atol=1e-5)
        assert set(arrow) == {"prompt_index", *names}
        assert {*names, "logprobs", "lse"} < set(as_json(server, path, **fields))
        assert_buckets(found, reference)


def assert_buckets(found, reference):
    for row, ids in enumerate(ASKED):
        ids = ids[ids >= 0]
        q = np.exp(reference[row] - np.log(np.exp(reference[row]).sum()))
        q = np.append(q[ids], np.delete(q, ids).sum())
        p = np.exp(STUDENT[row, : len(ids)])
        p = np.append(p, 1 - p.sum())
        assert found["reverse_kl"][row] == pytest.approx((p * np.log(p / q)).sum(), abs=1e-4)
        assert found["forward_kl"][row] == pytest.approx((q * np.log(q / p)).sum(), abs=1e-4)


def test_divergences_are_those_of_the_offline_function(server):
    fields = {"prompt_logprob_token_ids": npy(ASKED), "prompt_student_logprobs": STUDENT.tolist()}
    found = as_bytes(server, GENERATE, SAFETENSORS, **fields)
    names = PromptTables.__dataclass_fields__
    tables = PromptTables(**{"num_topk": 0, "entropy": None} | {n: a for n, a in found.items() if n in names})
    student = np.where(ASKED < 0, np.nan, STUDENT)
    for terms in (
        tables.kl(student),
        kl_terms(np.where(ASKED < 0, -np.inf, STUDENT).astype(np.float32), tables.logprobs),
    ):
        np.testing.assert_array_equal(terms.reverse, found["reverse_kl"])
        np.testing.assert_array_equal(terms.forward, found["forward_kl"])


@pytest.mark.parametrize("kind", [ARROW, SAFETENSORS])
def test_several_prompts_and_a_first_position(server, kind):
    prompts = [IDS[:20], IDS, [5]]
    fields = {"prompt": prompts, "prompt_logprobs": 0, "prompt_logprob_token_ids": [7, 9]}
    arrays = as_bytes(server, COMPLETIONS, kind, **fields)
    if kind == SAFETENSORS:
        assert arrays["prompt_index"].tolist() == [0] * 19 + [1] * NUM_ROWS
    for index, prompt in enumerate(prompts):
        own = arrays["prompt_index"] == index
        assert arrays["positions"][own].tolist() == list(range(1, len(prompt)))
        assert arrays["own_token_ids"][own].tolist() == prompt[1:]
        assert (arrays["token_ids"][own] == [7, 9]).all()
    start = NUM_ROWS - 3
    tail = as_bytes(server, GENERATE, kind, prompt_logprobs=0, prompt_logprob_start=start)
    assert tail["positions"].tolist() == [start + 1, start + 2, start + 3]
    assert "logprobs" not in tail or tail["logprobs"].shape == (3, 0)
    none = as_bytes(server, GENERATE, kind, token_ids=[5], prompt_logprobs=1) if kind == SAFETENSORS else {}
    assert all(len(each) == 0 for each in none.values())


def test_ranks_may_be_left_out(server):
    for kind in (ARROW, SAFETENSORS):
        whole, few = (as_bytes(server, GENERATE, kind, prompt_ranks=asked, **READ) for asked in (True, False))
        assert set(whole) - set(few) == {"ranks", "own_ranks"}
        np.testing.assert_allclose(few["logprobs"], whole["logprobs"], atol=1e-5)


def test_an_arrow_stream_of_no_rows_is_whole(server):
    answer = server.request(
        "POST", GENERATE, json=body(GENERATE, token_ids=[5], prompt_logprobs=0), headers={"Accept": ARROW}
    )
    assert pa.ipc.open_stream(answer.content).read_all().num_rows == 0


def test_what_asks_for_nothing_changes_nothing(server):
    plain = body(GENERATE, prompt_logprobs=1)
    expected = server.post(GENERATE, **plain)["prompt_logprobs"]
    neutral = {"encoding_format": "float", "prompt_tables": None, "prompt_student_logprobs": None}
    for fields in (neutral, {**neutral, "encoding_format": None}):
        assert server.post(GENERATE, **plain, **fields)["prompt_logprobs"] == expected
    for accept in ("application/json", "*/*", "text/html", f"application/json, {ARROW};q=0.5", f"{ARROW};q=0"):
        answer = server.request("POST", GENERATE, json=plain, headers={"Accept": accept})
        assert answer.headers["content-type"] == "application/json", accept


@pytest.mark.parametrize(
    ("header", "expected"),
    [(None, None), ("", None), ("*/*", None), (ARROW, ARROW), (f"text/html;q=0.3, {BYTES} ;q=0.5", BYTES),
     (f"{SAFETENSORS}, {ARROW}", SAFETENSORS), (f"{ARROW};q=x", None), (ARROW.upper(), ARROW)],
)  # fmt: skip
def test_accept_headers(header, expected):
    assert accepted_body(header) == expected


def test_a_rendered_request_keeps_its_form(server):
    asked = {"prompt_tables": ["reverse_kl"], "prompt_student_logprobs": STUDENT.tolist(), "encoding_format": "base64"}
    fields = {**body(COMPLETIONS, prompt_logprob_token_ids=npy(ASKED)), **asked}
    (rendered,) = server.post(f"{COMPLETIONS}/render", **fields)
    wrong = server.request("POST", f"{COMPLETIONS}/render", json={**fields, "prompt_student_logprobs": 0})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt_student_logprobs")
    answer = server.post(GENERATE, **rendered)
    expected = as_json(server, GENERATE, prompt_logprob_token_ids=npy(ASKED), **asked)["reverse_kl"]
    np.testing.assert_allclose(array_of(answer["prompt_tables"]["reverse_kl"]), expected, atol=1e-5)


def wrong(says, param, accept=None, status=400, **fields):
    return pytest.param(fields, accept, param, says, status, id=says[:40])


TWICE = [[5, 5], *ASKED[1:].tolist()]
GOOD = {"prompt_logprob_token_ids": ASKED.tolist()}


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "accept", "param", "says", "status"),
    [
        wrong("got 'hex'", "encoding_format", encoding_format="hex", **GOOD),
        wrong("names out of positions, ", "prompt_tables", prompt_tables=["probs"], **GOOD),
        wrong("one or more names", "prompt_tables", prompt_tables=[], **GOOD),
        wrong("encoding_format: there are no readings", "encoding_format", encoding_format="base64"),
        wrong("Accept: there are no readings", "Accept", ARROW),
        wrong("prompt_tables: there are no readings", "prompt_tables", prompt_tables=["lse"]),
        wrong("entropy needs logprob_entropy", "prompt_tables", prompt_tables=["entropy"], **GOOD),
        wrong("own_ranks: logprob_ranks=false", "prompt_tables", prompt_tables=["own_ranks"], prompt_ranks=False,
              **GOOD),
        wrong("forward_kl needs prompt_student", "prompt_tables", prompt_tables=["lse", "forward_kl"], **GOOD),
        wrong("max_tokens must be 0", "max_tokens", ARROW, max_tokens=3, **GOOD),
        wrong("logprob_token_ids: an answer in", "logprob_token_ids", SAFETENSORS, logprob_token_ids=[5], **GOOD),
        wrong("logprobs: an answer in", "logprobs", BYTES, logprobs=1, **GOOD),
        wrong("stream and the prompt's", "stream", ARROW, stream=True, **GOOD),
        wrong("n and the prompt's", "n", ARROW, n=2, **GOOD),
        wrong("text is not a .npy file", "prompt_logprob_token_ids", prompt_logprob_token_ids="AAAA"),
        wrong("text is not a .npy file", "prompt_logprob_token_ids", prompt_logprob_token_ids="é"),
        wrong("of two dimensions, got 1", "prompt_logprob_token_ids", prompt_logprob_token_ids=npy(np.arange(3))),
        wrong("must hold integers", "prompt_logprob_token_ids", prompt_logprob_token_ids=npy(STUDENT)),
        wrong("has 4 lists", "prompt_logprob_token_ids", ARROW, prompt_logprob_token_ids=npy(ASKED[:4])),
        wrong("needs prompt_logprob_token_ids", "prompt_student_logprobs", prompt_student_logprobs=[[-1.0]],
              prompt_logprobs=1),
        wrong("has 1 lists, but", "prompt_student_logprobs", prompt_student_logprobs=[[-1.0]], **GOOD),
        wrong("list of lists of logprobs", "prompt_student_logprobs", prompt_student_logprobs=-1.0, **GOOD),
        wrong("text is not a .npy", "prompt_student_logprobs", prompt_student_logprobs="x", **GOOD),
        wrong("[0] must be logprobs, at most 0 each, got", "prompt_student_logprobs", ARROW,
              prompt_student_logprobs=npy(-STUDENT), **GOOD),
        wrong("probability of at most 1 in all, got", "prompt_student_logprobs",
              prompt_student_logprobs=npy(STUDENT * 0), **GOOD),
        wrong("[0] has 5 twice", "prompt_logprob_token_ids", prompt_student_logprobs=npy(STUDENT),
              prompt_logprob_token_ids=TWICE),
    ],
)  # fmt: skip
def test_bad_requests_reach_no_engine(server, monkeypatch, path, fields, accept, param, says, status):
    def queue(*_):
        raise AssertionError("it was queued")

    monkeypatch.setattr(server.engine, "add_checked", queue)
    headers = {} if accept is None else {"Accept": accept}
    answer = server.request("POST", path, json=body(path, **fields), headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"].removeprefix("sampling_params.") == param


def test_further_fields_that_completions_refuse(server):
    many = body(COMPLETIONS, prompt=[IDS, IDS], prompt_student_logprobs=STUDENT.tolist(), **GOOD)
    echo = body(COMPLETIONS, echo=True, prompt_tables=["lse"], **GOOD)
    for fields, param in ((many, "prompt_student_logprobs"), (echo, "echo")):
        answer = server.request("POST", COMPLETIONS, json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_without_pyarrow(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    answer = server.request("POST", GENERATE, json=body(GENERATE, **GOOD), headers={"Accept": ARROW})
    assert answer.status_code == 406 and "vllm[arrow]" in answer.json()["error"]["message"]
    assert as_bytes(server, GENERATE, SAFETENSORS, **GOOD)["lse"].shape == (NUM_ROWS,)


def test_mixed_with_ordinary_requests(server):
    """Nobody's answer depends on the tables that others get meanwhile."""
    plain = {"model": "tiny", "prompt": IDS[:9], "max_tokens": 30, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    expected = server.post(COMPLETIONS, **plain)["choices"]
    alone = as_bytes(server, GENERATE, ARROW, **READ)

    async def together():
        work = [server._client.post(COMPLETIONS, json=plain) for _ in range(3)]
        work += [
            server._client.post(GENERATE, json=body(GENERATE, **READ), headers={"Accept": kind}) for kind in BODY_TYPES
        ]
        return await asyncio.gather(*work)

    *texts, arrow, first, second = server.run(together())
    for text in texts:
        (own,) = text.json()["choices"]
        assert own["text"] == expected[0]["text"]
        np.testing.assert_allclose(
            own["logprobs"]["token_logprobs"], expected[0]["logprobs"]["token_logprobs"], atol=1e-4
        )
    found = pa.ipc.open_stream(arrow.content).read_all()
    np.testing.assert_allclose(found["lse"].to_numpy(), alone["lse"], atol=1e-5)
    for answer in (first, second):
        np.testing.assert_allclose(safetensors.numpy.load(answer.content)["lse"], alone["lse"], atol=1e-5)


async def reset(client):
    client.leave_abruptly()


@pytest.mark.parametrize("kind", [ARROW, SAFETENSORS])
@pytest.mark.parametrize("way", [RawClient.leave, reset])
def test_a_client_that_leaves_frees_its_request(server, kind, way):
    """It leaves while most of the prompt is still to be read, in steps of 16 tokens."""
    fields = {"token_ids": [5 + each % 50 for each in range(8000)], "prompt_logprob_token_ids": [7, 8]}

    async def work():
        async with listening(server.engine) as sockets:
            client = await RawClient.send(sockets.port, GENERATE, body(GENERATE, **fields), accept=kind)
            if kind == ARROW:
                assert await client.read_some()
            await sockets.until("num_running", 1)
            await way(client)
            await sockets.empty()

    before = rows_read(server)
    server.run(work())
    assert rows_read(server) - before < 7000


def rows_read(server):
    """Positions whose readings have reached the server so far."""
    text = server.request("GET", "/metrics").text
    return float(re.search(r"^vllm:logprob_rows_read_total\S* (\S+)", text, re.MULTILINE)[1])
