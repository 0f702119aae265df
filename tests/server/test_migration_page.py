"""Every row that stands by hand in docs/migration.md is tried: here, or by the test that its check names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgi import AppThread, Serve
from tiny_llm import make_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").partition("<!-- made by")[0]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"

Check = Callable[[AppThread], Any]
# By the first cell of a row: what tries it, or the test elsewhere that does.
CHECKS: dict[str, Check | str] = {}


def rows(heading: str) -> list[str]:
    """The first cells of a section's table."""
    (section,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(f"{heading}\n")]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\) \| ", line.removeprefix("| "))[0] for line in table[2:]]


HEADINGS = ("Readings", "Requests", "Pooling models")
ROWS = [row for heading in HEADINGS for row in rows(heading)]


def tries(*cells: str) -> Callable[[Check], Check]:
    """The check of the rows that begin with these cells."""

    def add(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(cells, check))
        return check

    return add


def answer(server: AppThread, path: str, **body: Any) -> dict[str, Any]:
    """That of a request that must be taken."""
    usual: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    if path == COMPLETIONS:
        usual["prompt"] = "hi"
    elif path == CHAT:
        usual["messages"] = USER
    response = server.request("POST", path, json=usual | body)
    assert response.status_code == 200, response.text
    return response.json()


def content(server: AppThread, **body: Any) -> list[dict[str, Any]]:
    return answer(server, CHAT, logprobs=True, **body)["choices"][0]["logprobs"]["content"]


def refused(server: AppThread, path: str, param: str, says: str, **body: Any) -> None:
    """A request that must be refused by the name of its field."""
    usual: dict[str, Any] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER} if path == CHAT else {}
    response = server.request("POST", path, json=usual | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert re.search(says, error["message"]), error["message"]


def generated(server: AppThread, **params: Any) -> dict[str, Any]:
    body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 1, "temperature": 0, **params}}
    response = server.request("POST", GENERATE, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> AppThread:
    folder = make_tiny_model(tmp_path_factory.mktemp("Org") / "Small")
    return serve({}, folder, chat_template=TEMPLATE)


# -- readings ------------------------------------------------------------------------------------------------------


@tries("rank of a requested id", "ids without `logprobs` over HTTP", "`logprobs=k` with `logprob_token_ids`")
def ranks_and_both(server: AppThread) -> None:
    (whole,) = content(server, top_logprobs=32)
    order = [entry["token_id"] for entry in whole["top_logprobs"]]
    ids = [order[20], order[0], order[7]]
    (reading,) = answer(server, CHAT, logprob_token_ids=ids)["choices"][0]["readings"]
    assert [entry["rank"] for entry in reading["ids"].values()] == [21, 1, 8]
    (both,) = answer(server, CHAT, logprobs=True, top_logprobs=2, logprob_token_ids=ids)["choices"][0]["logprobs"][
        "content"
    ]
    assert [entry["token_id"] for entry in both["top_logprobs"]] == [
        *order[:2],
        *(i for i in ids if i not in order[:2]),
    ]


@tries('`[1.5]`, `["7"]`, `[true]`')
def ids_that_are_none(server: AppThread) -> None:
    for value, says in (1.5, "float 1.5"), ("7", "str '7'"), (True, "bool True"):
        refused(server, COMPLETIONS, "logprob_token_ids", says, logprob_token_ids=[value])


@tries("mode of a request")
def modes(server: AppThread) -> None:
    fields = {"logprob_token_ids": [3], "temperature": 2.0, "seed": 0}
    raw, processed = (
        answer(server, COMPLETIONS, logprobs_mode=mode, **fields)["choices"][0]["readings"][0]["ids"]["3"]["logprob"]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert raw != processed


@tries("number of ids")
def many_ids(server: AppThread) -> None:
    refused(server, COMPLETIONS, "logprob_token_ids", "max allowed: 128", logprob_token_ids=list(range(129)))


@tries("chat `top_logprobs`")
def the_top_and_the_sampled_token(server: AppThread) -> None:
    # The token that is sampled is no likely one.
    (entry,) = answer(server, CHAT, logprobs=True, top_logprobs=4, allowed_token_ids=[3])["choices"][0]["logprobs"][
        "content"
    ]
    assert entry["token_id"] == 3 and len(entry["top_logprobs"]) == 5
    assert entry["top_logprobs"][-1]["token_id"] == 3


CHECKS |= {
    "ties": "tests/v1/engine/test_logprob_token_ids.py::test_3_ties_share_the_better_rank",
    "`logprobs=k` beside another request's ids": "tests/logprobs/test_logprobs.py::test_a_neighbours_wider_columns_are",
    "classic `top_logprobs`": "tests/server/test_completions.py::test_token_ids_in_place_of_texts",
    "byte fragments in chat": "tests/server/test_chat_completions.py::test_bytes_are_those_of_the_tokens",
    "a position's entries": "tests/logprobs/test_logprobs.py::test_dicts_up_to_256_entries",
    "cached or chunked prompts": "tests/models/test_latent_models.py::test_few_blocks_cached_prefixes_chunks_and",
}

# -- requests ------------------------------------------------------------------------------------------------------


@tries("unknown field")
def unknown(server: AppThread) -> None:
    refused(server, COMPLETIONS, "top_kk", "did you mean 'top_k'.*--ignore-unknown-fields", top_kk=1)


@tries('integers as `1.0`, `"1"`, `true`')
def integers(server: AppThread) -> None:
    answer(server, COMPLETIONS, max_tokens=1.0)
    for value in ("1", True):
        refused(server, COMPLETIONS, "max_tokens", "must be a valid integer", max_tokens=value)


@tries("`logit_bias` beyond 100")
def biases(server: AppThread) -> None:
    given = [answer(server, COMPLETIONS, logit_bias={"3": bias}, seed=0)["choices"] for bias in (100, 500)]
    assert given[0] == given[1]


@tries("prompt plus `max_tokens` beyond the context", "prompt of exactly `max_model_len`")
def contexts(server: AppThread) -> None:
    refused(server, COMPLETIONS, "max_tokens", "leave max_tokens out", max_tokens=1000)
    body = answer(server, COMPLETIONS, prompt=[3] * 128, max_tokens=0, prompt_logprobs=0)
    assert len(body["choices"][0]["prompt_logprobs"]) == 128


@tries("`max_tokens: 0` without `echo`")
def next_position(server: AppThread) -> None:
    (reading,) = answer(server, COMPLETIONS, max_tokens=0, logprob_token_ids=[3])["choices"][0]["readings"]
    assert reading["ids"]["3"]["logprob"] < 0 and reading["token_id"] is None


@tries("`n` above 1 at temperature 0")
def equal_answers(server: AppThread) -> None:
    first, second = answer(server, COMPLETIONS, n=2)["choices"]
    assert first["text"] == second["text"]


@tries("a temperature between 0 and 0.01")
def low_temperature(server: AppThread) -> None:
    shown = server.request("POST", "/v1/completions/render", json={"prompt": "hi", "temperature": 0.001}).json()
    assert math.isclose(shown[0]["sampling_params"]["temperature"], 0.01)


@tries("`allowed_token_ids`, `bad_words`, `min_tokens` that leave no token")
def no_token(server: AppThread) -> None:
    body = {"allowed_token_ids": [3], "logit_bias": {}, "bad_words": ["!"]}
    response = server.request("POST", COMPLETIONS, json={"prompt": "hi", **body})
    assert response.status_code == 400 and "bad_words" in response.json()["error"]["message"]


@tries("beam search with constraints")
def constrained_beams(server: AppThread) -> None:
    choices = answer(server, COMPLETIONS, use_beam_search=True, n=2, allowed_token_ids=[3, 4], return_token_ids=True)[
        "choices"
    ]
    assert sorted(choice["token_ids"] for choice in choices) == [[3], [4]]


@tries("errors")
def one_shape(server: AppThread) -> None:
    asked = ("POST", COMPLETIONS, {}), ("GET", "/nothing", None), ("PUT", CHAT, {}), ("POST", "/v1/score", {})
    for method, path, body in asked:
        assert server.request(method, path, json=body).json()["error"].keys() == {"message", "type", "param", "code"}


@tries(
    "`X-Request-Id`, `usage.prompt_tokens_details`, `/load`, `/tokenizer_info`, the render routes, "
    "`/inference/v1/generate`"
)
def always_there(server: AppThread) -> None:
    response = server.request(
        "POST", COMPLETIONS, json={"prompt": "hi", "max_tokens": 1}, headers={"X-Request-Id": "a"}
    )
    assert response.headers["X-Request-Id"] == "a" and "prompt_tokens_details" in response.json()["usage"]
    assert all(server.request("GET", path).status_code == 200 for path in ("/load", "/tokenizer_info"))
    generated(server)


@tries("`prompt_logprob_token_ids` at `/inference/v1/generate`", "`trace_decode_token_ids`")
def given_tokens(server: AppThread) -> None:
    body = generated(server, trace_decode_token_ids=[5], prompt_logprob_token_ids=[3], prompt_logprobs=1)
    assert body["choices"][0]["token_ids"] == [5] and body["prompt_token_id_logprobs"]
    streamed = {
        "token_ids": [3, 4],
        "stream": True,
        "sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": [3]},
    }
    assert "prompt_token_id_logprobs" in server.request("POST", GENERATE, json=streamed).text


@tries("`logprob_token_ids` at `/inference/v1/generate`")
def ids_of_generate(server: AppThread) -> None:
    (entry,) = generated(server, logprob_token_ids=[5])["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"][-1]["token_id"] == 5


@tries("`tools`")
def calls(server: AppThread) -> None:
    choice = answer(server, CHAT, tools=TOOLS, tool_choice="required", max_tokens=110)["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    answer(server, CHAT, tools=TOOLS, tool_choice="none")
    refused(server, CHAT, "tools", "--tool-call-parser", tools=TOOLS)


@tries("`response_format`, `structured_outputs`, `guided_*`")
def bound(server: AppThread) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": {"enum": ["a"]}}}
    assert answer(server, CHAT, response_format=form, max_tokens=20)["choices"][0]["message"]["content"] == '"a"'
    for field in ({"structured_outputs": {"choice": ["yes"]}}, {"guided_choice": ["yes"]}, {"guided_regex": "yes"}):
        assert answer(server, COMPLETIONS, max_tokens=20, **field)["choices"][0]["text"] == "yes"
    read = answer(server, COMPLETIONS, max_tokens=20, structured_outputs={"choice": ["yes"]}, grammar_readings=True)
    assert read["choices"][0]["allowed_mass_total"] < 0


@tries("`suffix`")
def suffix(server: AppThread) -> None:
    refused(server, COMPLETIONS, "suffix", "cannot be honoured", suffix="x")


@tries("`/v1/messages`, `/v1/responses`")
def other_doors(server: AppThread) -> None:
    assert answer(server, "/v1/messages", model="tiny", messages=USER)["type"] == "message"
    kept = server.request("POST", "/v1/responses", json={"input": "hi", "max_output_tokens": 1}).json()
    assert server.request("GET", f"/v1/responses/{kept['id']}").json()["id"] == kept["id"]


@tries("`/generative_scoring`")
def scores(server: AppThread) -> None:
    body = {"query": "q", "items": ["a"], "label_token_ids": [3]}
    response = server.request("POST", "/generative_scoring", json=body).json()
    assert 0 < response["data"][0]["score"] < 0.5
    long = server.request("POST", "/generative_scoring", json={**body, "items": ["a" * 500]})
    assert long.status_code == 400 and "truncate_prompt_tokens" in long.json()["error"]["message"]


CHECKS |= {
    "rerankers without a template": "tests/server/test_rerank.py::test_built_in_templates_order",
    "`truncate_prompt_tokens`": "tests/server/test_truncated_texts.py::test_completions",
    "`tokenization_kwargs`": "tests/entrypoints/test_encoders.py::test_long_texts_are_cut_by_tokenization_kwargs",
    '`hf_overrides={"head_dtype": ...}`': "tests/models/test_config.py::test_the_heads_dtype_is_float32",
    "name of the model without `--served-model-name`": (
        "tests/server/test_upstream_requests.py::test_the_model_is_served_under_the_name_as_given"
    ),
    "reasoning": "tests/server/test_reasoning.py::test_reasoning_is_apart_from_the_content",
    "`/v1/decisions`": "tests/server/test_decisions.py::test_the_numbers_are_those_of_transformers",
    "`/v1/systemone`": "tests/server/test_systemone.py::test_the_answers_are_those_of_decisions",
}

# -- pooling -------------------------------------------------------------------------------------------------------
CHECKS |= {
    "`LLM.embed`, `classify`, `score`, `encode`, `reward`; `/v1/embeddings`, `/v2/embed`, `/classify`, `/pooling`, "
    "`/score`, `/rerank`": "tests/server/test_embeddings.py::test_texts_in_every_form",
    "`PoolingParams`: `dimensions`, `use_activation`, `step_tag_id`, `returned_token_ids`, `task`, "
    "`skip_reading_prefix_cache`, `late_chunking_params`, `extra_kwargs`": "tests/test_pooling.py::test_a_task_has_its",
    "`PoolingParams.late_interaction_params`": "tests/test_pooling.py::test_verify_names_what_is_wrong",
    "`PoolerConfig.enable_chunked_processing`, `max_embed_len`": "tests/server/test_long_texts.py::test_mean_of",
    "`late_chunking_params` of `/v1/embeddings`": "tests/server/test_embeddings.py::test_parts_of_texts",
    "`messages`, one conversation or several, also as `input`; `chat_template` ...": (
        "tests/server/test_embeddings.py::test_several_conversations"
    ),
    "`input_type` of `/v2/embed`": "tests/server/test_embeddings.py::test_prompts_by_name",
    "`max_tokens_per_query`, `max_tokens_per_doc`, `instruction`, `chat_template_kwargs` of `/rerank` and `/score`": (
        "tests/server/test_rerank.py::test_log_odds_readings_and_instructions"
    ),
}


@tries("tasks `plugin` and `embed&token_classify`; `data` of `/pooling`", '`padding: "max_length"`')
def pooling_refusals(server: AppThread) -> None:
    bodies = [{"input": "a", "task": task} for task in ("plugin", "embed&token_classify")]
    bodies += [{"data": "a"}, {"input": "a", "padding": "max_length"}]
    for body in bodies:
        response = server.request("POST", "/pooling", json=body)
        assert response.status_code == 400, body
        assert any(name in response.json()["error"]["message"] for name in ("task", "data", "padding"))
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]
    refused(server, CHAT, "messages[0].content", "image", messages=[{"role": "user", "content": image}])


# -- engine --------------------------------------------------------------------------------------------------------
ENGINE = {
    "`tensor_parallel_size` works": "tests/models/test_tensor_parallel.py::test_a_rank_loads_its_share_alone",
    "`host` is 127.0.0.1": "tests/server/test_serve_flags.py::test_",
    "`python -m vllm.entrypoints.openai.api_server`": "tests/server/test_api_server.py::test_",
    "`SamplingParams(logits_processors=[...])`": "tests/v1/worker/test_sampler_processors.py::test_a_mixed_batch",
    "Offline and on a server": "tests/v1/engine/test_async_llm.py::test_",
    "`swap_space` is 0": "tests/v1/worker/test_kv_swap.py::test_copies_against_a_model",
    "On CPU all cores": "tests/test_import_time.py::test_",
}


@pytest.mark.parametrize("name", re.findall(r"^- (.+)$", PAGE.partition("## Engine")[2], re.MULTILINE))
def test_a_line_of_the_engine_has_a_test(name: str) -> None:
    (test,) = [test for begins, test in ENGINE.items() if name.startswith(begins)]
    assert_is_there(test)


def test_every_row_has_its_check() -> None:
    assert sorted(CHECKS) == sorted(ROWS)


def assert_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^ *def {name}", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test


@pytest.mark.parametrize("row", ROWS)
def test_a_row_holds(row: str, server: AppThread) -> None:
    check = CHECKS[row]
    if not isinstance(check, str):
        check(server)
        return
    assert_is_there(check)


@pytest.mark.parametrize("row", rows("Programs that run here unmodified"))
def test_a_program_has_a_test(row: str) -> None:
    """At the version that is installed for it."""
    callers = ROOT / "tests" / "callers"
    pinned = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    environments = "".join(path.read_text(encoding="utf-8") for path in (callers / "envs").glob("*.txt"))
    tests = "".join(path.read_text(encoding="utf-8") for path in callers.rglob("test_*.py"))
    for name in row.split(", "):
        if versioned := re.fullmatch(r"(\S+) (\d[\d.]*)(?: \(.*\))?", name):
            name, version = versioned.groups()
            distribution = re.escape(name.partition(".")[0])
            assert re.search(rf"^{distribution}(\[.*\])?=={re.escape(version)}\b", environments, re.MULTILINE), name
        module = PROGRAMS.get(name, name.replace("-", "_"))
        assert module in tests or f'"{name}"' in tests, module
        assert name not in PROGRAMS or f'"{name}' in pinned or name.startswith("Qwen3"), name


PROGRAMS = {"lm-eval": "lm_eval", "llama-index-llms-vllm": "llama_index.llms.vllm", "pydantic-ai-slim": "pydantic_ai"}
PROGRAMS |= {"openai-agents": "agents", "Qwen3-Reranker's way of scoring": "Qwen3-Reranker"}
