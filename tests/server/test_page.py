"""The page at /: used in a browser, over a live server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import client_of
from live_server import LiveServer
from tiny_llm import make_tiny_model

KEY = 'a key\'s "own" $value'
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
FOLDER = Path(__file__).parent / "browser"
# page.mjs types these.
REQUEST = {
    "model": "tiny",
    "prompt": "Stop the clock \U0001f600 at",
    "max_tokens": 6,
    "temperature": 0,
    "logprobs": 5,
    "labels": [" the", "A", " stop"],
}
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_tools() -> dict[str, str]:
    """Where node, the browser and playwright-core are; skips, or fails under VLLM_REQUIRE_BROWSER, without one."""
    modules = os.environ.get("VLLM_PLAYWRIGHT_FOLDER", str(FOLDER))
    tools = {
        "node": shutil.which("node"),
        "chromium": os.environ.get("VLLM_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None),
        "playwright-core (npm ci in tests/server/browser)": modules
        if (Path(modules) / "node_modules" / "playwright-core").is_dir()
        else None,
    }
    missing = [name for name, place in tools.items() if place is None]
    if missing:
        reason = f"the page needs a browser to be tested: there is no {', no '.join(missing)}"
        if os.environ.get("VLLM_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    node, chromium, folder = tools.values()
    return {"node": str(node), "PAGE_CHROMIUM": str(chromium), "PAGE_MODULES": str(folder)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = make_tiny_model(tmp_path_factory.mktemp("page"), max_position_embeddings=65536)
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    flags = ["--chat-template", str(folder / "template.jinja"), "--tool-call-parser", "hermes"]
    with LiveServer(folder, "--api-key", KEY, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def seen(server: LiveServer) -> dict[str, dict[str, Any]]:
    """All that page.mjs saw."""
    tools = find_tools()
    command = [tools.pop("node"), str(FOLDER / "page.mjs")]
    env = {**os.environ, **tools, "PAGE_URL": server.url, "PAGE_KEY": KEY}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def scenario(seen: dict[str, dict[str, Any]], name: str, server: LiveServer) -> dict[str, Any]:
    """The observations of one scenario, in which no other host was asked and nothing was complained of."""
    found = seen[name]
    assert "failed" not in found, f"{found['failed']}\n{found['log']}"
    assert found["log"]["hosts"] == [server.url.removeprefix("http://")]
    if name not in ("key", "errors", "sampling"):
        assert found["log"]["complaints"] == []
    return found


def post(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/{path}", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """The page's request without its stream."""
    assert body["stream"] is True
    return {name: value for name, value in body.items() if not name.startswith("stream")}


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace(",", "").removesuffix(" %"))


def dotted(text: str) -> str:
    return text.replace(" ", "·")


def check_bars(bars: list[dict[str, Any]], answer: dict[str, Any], position: int) -> None:
    """That the bars show a position of the answer's."""
    reading = answer["choices"][0]["readings"][position]
    assert [bar["tokenId"] for bar in bars] == [entry["token_id"] for entry in answer["labels"]]
    for bar, entry in zip(bars, answer["labels"], strict=True):
        one = reading["ids"][str(entry["token_id"])]
        assert bar["label"] == dotted(entry["label"])
        assert bar["name"] == f"Probability of {dotted(entry['label'])}"
        assert bar["value"] == pytest.approx(one["probability"], abs=1e-6)
        probability, logprob, logit, rank = map(number, bar["cells"])
        assert probability == pytest.approx(100 * one["probability"], abs=0.0051)
        assert logprob == pytest.approx(one["logprob"], abs=0.00051)
        assert logit == pytest.approx(one["logit"], abs=0.00051)
        assert rank == one["rank"]


def test_the_page_asks_for_a_key_and_keeps_it_for_its_tab(seen, server):
    found = scenario(seen, "key", server)
    assert found["refused"] == "This server asks for a key"
    assert found["focused"] == "api-key"
    assert found["stillOpen"], "a wrong key was taken"
    assert found["accepted"] == "tiny · 65,536 tokens of context"
    assert found["kept"] == [[KEY], 0, ""], "session storage, local storage, cookies"
    assert all("401" in complaint for complaint in found["log"]["complaints"])


def test_the_bars_show_what_the_server_answers(seen, server):
    found = scenario(seen, "completion", server)
    (body,) = found["log"]["bodies"]
    assert whole(body) == REQUEST
    answer = post(server, "v1/completions", REQUEST)
    readings = answer["choices"][0]["readings"]
    check_bars(found["bars"], answer, 0)
    for bar in found["bars"]:
        assert bar["drawn"] == pytest.approx(bar["value"], abs=0.01)
    assert found["mass"] == pytest.approx(readings[0]["mass"], abs=1e-6)
    assert found["lines"] == 3
    assert found["described"].startswith("Line chart of 6 positions. First: ·the ")
    assert found["lastPosition"] == "6"
    check_bars(found["lastBars"], answer, 5)
    shares = [math.exp(one["logprob"]) for one in readings[0]["ids"].values()]
    assert found["ofAll"] == pytest.approx(shares, abs=1e-6)
    for row, reading in zip(found["numbers"], readings, strict=True):
        expected = [100 * math.exp(one["logprob"]) for one in reading["ids"].values()]
        assert [number(cell) for cell in row[2:]] == pytest.approx([*expected, 100 * reading["mass"]], abs=0.0051)
    chips = [["·the", "261"], ["A", "35"], ["·stop", "265"]]
    assert [parts[:2] for parts in found["chips"]] == chips, "each label with its token id"
    usage = answer["usage"]
    assert f"{usage['prompt_tokens']} prompt + {usage['completion_tokens']} generated tokens" in found["usage"]


def test_a_token_in_focus_is_explained(seen, server):
    found = scenario(seen, "completion", server)
    logprobs = post(server, "v1/completions", REQUEST)["choices"][0]["logprobs"]
    assert [int(tip["id"]) for tip in found["tokens"]] == logprobs["token_ids"]
    for tip, label, logprob, top in zip(
        found["tokens"], found["text"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert tip["shown"]
        assert number(tip["logprob"]) == pytest.approx(logprob, abs=0.00051)
        assert tip["rank"] == "1"
        assert len(tip["top"]) == 5
        assert tip["top"][0] == tip["name"], "temperature 0 takes the most likely one"
        assert sorted(top.values())[-5] <= logprob
        assert label == f"{tip['name']}, id {tip['id']}, logprob {tip['logprob']}, rank {tip['rank']}"
    assert found["hidden"], "Escape closes the explanation"


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_a_token_under_the_pointer_is_explained(mode, seen, server):
    found = scenario(seen, "hover", server)[mode]
    chunks = [json.loads(line.removeprefix("data: ")) for line in found["stream"].split("\n\n")[:-2]]
    sent = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    tokens = [token for one in sent for token in (chat_tokens(one) if mode == "chat" else completion_tokens(one))]
    assert len(tokens) == 6
    for tip, (token_id, logprob, rank) in zip(found["tips"], tokens, strict=True):
        assert tip["shown"]
        assert int(tip["id"]) == token_id
        assert number(tip["logprob"]) == pytest.approx(logprob, abs=0.00051)
        assert tip["rank"] == rank


def chat_tokens(logprobs: dict[str, Any]) -> list[tuple[int, float, str]]:
    return [(token["token_id"], token["logprob"], str(token["rank"])) for token in logprobs["content"]]


def completion_tokens(logprobs: dict[str, Any]) -> list[tuple[int, float, str]]:
    """The rank of one that is not among the top 5 is known only if the server says it."""
    tokens = []
    columns = zip(logprobs["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for index, (token_id, logprob, top) in enumerate(columns):
        rank = 1 + sum(other > logprob for other in top.values())
        known = str(rank) if rank <= 5 else "beyond 5"
        tokens.append((token_id, logprob, str(logprobs["ranks"][index]) if "ranks" in logprobs else known))
    return tokens


def test_a_chat_shows_the_same(seen, server):
    found = scenario(seen, "chat", server)
    (body,) = found["log"]["bodies"]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    check_bars(found["bars"], post(server, "v1/chat/completions", whole(body)), 0)


def test_the_next_position_can_be_read_without_generating(seen, server):
    found = scenario(seen, "next", server)
    (body,) = found["log"]["bodies"]
    assert body["max_tokens"] == 0
    assert found["tokens"] == 0
    check_bars(found["bars"], post(server, "v1/completions", whole(body)), 0)


def test_a_decision_shows_each_options_probability(seen, server):
    found = scenario(seen, "decision", server)
    (body,) = found["log"]["bodies"]
    assert [question["type"] for question in body["questions"]] == ["predicate", "choice", "score"]
    assert found["refused"]["text"].startswith("Not JSON") and found["refused"]["focused"] == "questions"
    assert found["error"] == "", "the next run clears the error"
    assert found["hidden"] == [True] * 4
    given = post(server, "v1/decisions", body)["answers"]
    assert [each["title"] for each in found["answers"]] == ["broken", "Who?", "much"]
    names = [["true", "false"], ["me", "true", "a b"], ["no", "a bit"]]
    for shown, answer, own in zip(found["answers"], given, names, strict=True):
        assert shown["mass"] == pytest.approx(answer["diagnostics"]["label_mass"], abs=1e-6)
        assert [option["name"] for option in shown["options"]] == own
        shares = [each["probability"] for each in answer.get("probabilities", ())]
        shares = shares or [answer["probability"], 1 - answer["probability"]]
        for option, share, read in zip(shown["options"], shares, answer["diagnostics"]["options"], strict=True):
            assert option["value"] == pytest.approx(share, abs=1e-6)
            assert option["drawn"] == pytest.approx(share, abs=0.01)
            probability, logprob, rank = map(number, option["cells"])
            assert probability == pytest.approx(100 * share, abs=0.0051)
            assert logprob == pytest.approx(read["logprob"], abs=0.00051)
            assert rank == read["rank"]
    predicate, choice, score = (each["result"] for each in found["answers"])
    assert number(predicate.removesuffix(" true")) == pytest.approx(100 * given[0]["probability"], abs=0.0051)
    assert choice.startswith(f"{str(given[1]['choice']).lower()}, confidence ")
    assert number(score.partition(",")[0]) == pytest.approx(given[2]["score"], abs=0.0051)
    # The page's own questions are ones that the server takes.
    assert len(post(server, "v1/decisions", {**body, "questions": found["sample"]})["answers"]) == 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_code_of_a_decision_is_the_request(seen, server):
    pytest.importorskip("openai")
    found = scenario(seen, "decision", server)
    given = post(server, "v1/decisions", found["log"]["bodies"][0])["answers"]
    assert json.loads(run_code(["bash", "-c", found["code"]["curl"] + " --silent"]))["answers"] == given
    assert json.loads(run_code([sys.executable, "-c", found["code"]["python"]]))["answers"] == given


@pytest.mark.parametrize(("name", "kind"), [("schema", "field"), ("choices", "choice")])
def test_the_values_of_a_form_are_shown(name, kind, seen, server):
    pytest.importorskip("llguidance")
    found = scenario(seen, "fields", server)
    body = next(each for each in found["log"]["bodies"] if f"{kind}_readings" in each)
    (choice,) = post(server, "v1/completions", whole(body))["choices"]
    expected = choice["field_readings"] if kind == "field" else {"choices": choice["choice_readings"]}
    assert [each["path"] for each in found[name]] == list(expected)
    for shown, entries in zip(found[name], expected.values(), strict=True):
        for row, entry in zip(shown["values"], entries, strict=True):
            value = entry["value"]
            assert row["name"] == (dotted(value) if isinstance(value, str) else "null true false".split()[
                [None, True, False].index(value)
            ])  # fmt: skip
            assert row["elements"] == 1, "texts are never markup"
            assert row["best"] == entry["chosen"]
            assert row["value"] == pytest.approx(entry["share"], abs=1e-4)
            assert row["drawn"] == pytest.approx(entry["share"], abs=0.02)
            assert number(row["cells"][0]) == pytest.approx(100 * entry["share"], abs=0.01)
            assert number(row["cells"][1]) == pytest.approx(entry["logprob"], abs=1e-3)
    assert found["refused"]["focused"] == "schema" and "Not JSON" in found["refused"]["text"]
    assert found["hidden"], "without a form there is no card"


def test_the_code_of_a_form_is_the_request(seen, server, monkeypatch):
    found = scenario(seen, "fields", server)
    captured: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "openai", recording_sdk(captured))
    for name, body in zip(("schema", "choices"), found["log"]["bodies"][-2:], strict=True):
        code = found[f"{name}Code"].replace(server.url, "http://127.0.0.1:1")
        with pytest.raises(RequestMade):
            exec(compile(code.replace('os.environ["OPENAI_API_KEY"]', '"none"'), "shown", "exec"), {})
        sent = captured.pop()
        assert sent | sent.pop("extra_body") == whole(body)


def test_tools_are_sent_as_they_are_written(seen, server, monkeypatch):
    found = scenario(seen, "tools", server)
    assert found["hidden"], "only chat has tools"
    assert found["refused"]["focused"] == "tools" and "Not JSON" in found["refused"]["text"]
    one, two, none = map(whole, found["log"]["bodies"])
    (tool,) = one["tools"]
    assert tool["type"] == "function" and tool["function"]["name"] == "weather", "a function is a tool"
    assert two["tools"] == [tool, {**tool, "function": {**tool["function"], "name": "now"}}]
    assert none == {name: value for name, value in one.items() if name != "tools"}
    captured: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "openai", recording_sdk(captured))
    with pytest.raises(RequestMade):
        code = found["code"].replace(server.url, "http://127.0.0.1:1")
        code = code.replace('os.environ["OPENAI_API_KEY"]', '"none"')
        exec(compile(code, "shown", "exec"), {})
    sent = captured.pop()
    assert sent | sent.pop("extra_body") == one


def test_further_fields_of_sampling_are_sent(seen, server):
    found = scenario(seen, "sampling", server)
    assert found["choices"] == ["auto", "none", "required", "weather", "now"]
    none, named, refused = map(whole, found["log"]["bodies"])
    assert (none["tool_choice"], none["top_p"], none["stop"]) == ("none", 0.5, ["END", "\n\n"])
    assert named["tool_choice"] == {"type": "function", "function": {"name": "now"}}
    assert "tool_choice" in found["code"] and "top_p" in found["code"]
    assert refused["top_p"] == 7
    assert found["refused"]["focused"] == "top-p" and "top_p" in found["refused"]["text"]


def test_a_chat_keeps_its_turns_and_shows_markdown(seen, server):
    found = scenario(seen, "conversation", server)
    assert len(set(found["examples"].values())) == 4, "each mode has an example of its own"
    user, answer = found["turns"]
    assert user == "&lt;b&gt;Hello&lt;/b&gt;", "texts are never markup"
    for part in (
        "<h5>Two <em>things</em></h5>",
        "<li><strong>bold</strong> and <code>co&lt;de&gt;</code></li>",
        "[no](javascript:window.hacked=1)",
        '<pre data-language="js"><code>if (a &lt; b) { &lt;script&gt;</code></pre>',
        '&lt;img src=x onerror="window.hacked = 1"&gt; &lt;script&gt;window.hacked = 1&lt;/script&gt;',
        "<blockquote><p>quoted</p></blockquote>",
        "<thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><s>2</s></td></tr></tbody>",
        "2 * 3 * 4, snake_case_name",
    ):
        assert part in answer, answer
    assert "<img" not in answer and "<script" not in answer and found["hacked"] is None
    rel = "noopener noreferrer"
    assert found["links"] == [
        ["https://example.org/a?b=1", rel, "link"],
        ["https://example.org/p.png", rel, "pic"],
    ]
    assert found["prompt"] == "", "the next message can be written"
    assert found["label"] == "Result of weather" and found["call"] == 'weather({"city": "Oslo"})'
    first, second, third = found["sent"]
    assert [message["role"] for message in first] == ["user"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0]["content"] == "<b>Hello</b>" and second[1]["content"].startswith("## Two *things*")
    assert [message["role"] for message in third[3:]] == ["assistant", "tool"]
    assert third[3]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (third[4]["tool_call_id"], third[4]["content"]) == ("call-1", "rain")
    after = found["after"]
    assert (after["mode"], after["prompt"], after["system"], after["topP"]) == ("chat", "a draft", "Be brief.", "0.5")
    assert len(after["turns"]) == 6 and after["turns"][-1] == "It rains.", "a reload keeps all of it"
    assert found["completion"] == found["examples"]["completion"]
    assert found["cleared"] == {"turns": 0, "prompt": "a draft"}


def test_documents_are_shown_by_their_scores(seen, server):
    found = scenario(seen, "rerank", server)
    (body,) = found["log"]["bodies"]
    assert (found["sample"], found["hidden"]) == (3, [True] * 4)
    assert body["documents"] == ["the stop", "<i>on</i> the roof \U0001f600", "no"], "empty lines are none"
    answer = post(server, "v1/rerank", body)
    assert found["usage"] == f"{answer['usage']['prompt_tokens']} prompt tokens"
    for row, result in zip(found["rows"], answer["results"], strict=True):
        assert (row["text"], row["elements"]) == (body["documents"][result["index"]], 0), "texts stay texts"
        assert row["value"] == pytest.approx(result["relevance_score"], abs=1e-6)
        assert row["drawn"] == pytest.approx(result["relevance_score"], abs=0.01)
        score, line = map(number, row["cells"])
        assert score == pytest.approx(result["relevance_score"], abs=0.000051)
        assert line == result["index"] + 1


def test_only_what_the_model_can_is_offered(seen, server):
    modes = scenario(seen, "rerank", server)["modes"]
    assert (modes["embed"]["shown"], modes["embed"]["runs"]) == (["rerank"], True)
    assert (modes["token_classify"]["shown"], modes["token_classify"]["runs"]) == ([], False)
    assert "no view" in modes["token_classify"]["alert"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_code_of_a_ranking_is_the_request(seen, server):
    pytest.importorskip("openai")
    found = scenario(seen, "rerank", server)
    results = post(server, "v1/rerank", found["log"]["bodies"][0])["results"]
    assert json.loads(run_code(["bash", "-c", found["code"]["curl"] + " --silent"]))["results"] == results
    printed = run_code([sys.executable, "-c", found["code"]["python"]]).splitlines()
    assert printed == [f"{each['relevance_score']} {each['document']['text']}" for each in results]


def test_the_ids_of_a_typed_text(seen, server):
    found = scenario(seen, "ids", server)
    body = {"prompt": found["text"], "add_special_tokens": False, "return_token_strs": True}
    answer = post(server, "tokenize", body)
    assert [int(token_id) for _, token_id in found["items"]] == answer["tokens"]
    signs = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥"})
    assert [text for text, _ in found["items"]] == [text.translate(signs) for text in answer["token_texts"]]
    assert json.loads(found["copied"]) == answer["tokens"]
    assert found["count"] == f"{answer['count']} tokens"


def test_an_error_stands_where_it_belongs(seen, server):
    found = scenario(seen, "errors", server)
    assert "labels[0] ' positive' is 9 tokens" in found["labels"]["text"]
    assert (found["labels"]["focused"], found["labels"]["invalid"]) == ("label-input", "true")
    assert "max_tokens" in found["maxTokens"]["text"] and "-3" in found["maxTokens"]["text"]
    assert "documents must not be empty" in found["documents"]["text"]
    assert (found["maxTokens"]["focused"], found["maxTokens"]["invalid"]) == ("max-tokens", "true")
    assert found["inside"]["text"] == "the model <i>failed</i>"
    ((text, num_elements, label),) = found["kept"]
    assert (text, num_elements) == ("<b>x", 0), "what came before the error stays, as text"
    assert label.endswith("rank 7")
    assert found["cut"]["text"] == "The connection ended before the answer was complete."
    assert found["after"], "the next run clears the error"
    assert "at least 2" in found["questions"]["text"]
    assert (found["questions"]["focused"], found["questions"]["invalid"]) == ("questions", "true")
    assert all("400" in complaint for complaint in found["log"]["complaints"])


def test_stop_ends_the_request_on_the_server(seen, server):
    found = scenario(seen, "stop", server)
    assert found["during"] == {"status": "Running …", "bars": 3}, "shown while it runs"
    assert 3 <= found["shown"] < 60000
    assert found["status"] == f"Stopped after {found['shown']:,} tokens"
    assert found["focused"] == "run"


def test_light_and_dark(seen, server):
    found = scenario(seen, "schemes", server)
    for place, (light, dark) in enumerate(zip(found["light"], found["dark"], strict=True)):
        (light_ground, light_ink), (dark_ground, dark_ink) = map(luminances, (light, dark))
        assert light_ground > 0.8 > 0.1 > dark_ground, place
        for ground, ink in ((light_ground, light_ink), (dark_ground, dark_ink)):
            assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) > 7
    assert found["overflow"] <= 0, "a narrow window scrolls sideways"


def luminances(colours: list[str]) -> list[float]:
    """Relative luminance by WCAG of rgb(...) colours."""
    result = []
    for colour in colours:
        channels = [int(part) / 255 for part in re.findall(r"\d+", colour)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        result.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return result


def test_the_page_works_below_a_path(seen, server):
    found = scenario(seen, "prefix", server)
    assert found["paths"] and all(path.startswith("/some/where/") for path in found["paths"])
    assert found["bars"] == 3
    assert f"{server.url}/some/where/v1/completions" in found["code"]


def test_events_may_be_cut_anywhere(seen, server):
    found = scenario(seen, "events", server)
    assert found["readings"] == [['{"a":"\U0001f600"}', "two\nlines", "你", "[DONE]"]]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_command_is_the_request(seen, server):
    found = scenario(seen, "code", server)
    expected = post(server, "v1/completions", REQUEST)
    answer = json.loads(run_code(["bash", "-c", found["curl"] + " --silent"]))
    assert answer["choices"] == expected["choices"]
    assert answer["labels"] == expected["labels"]
    stream = run_code(["bash", "-c", found["curl-stream"] + " --silent"])
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n")[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == expected["choices"][0]["text"]
    assert [reading for choice in choices for reading in choice["readings"]] == expected["choices"][0]["readings"]


def test_the_python_program_is_the_request(seen, server):
    pytest.importorskip("openai")
    found = scenario(seen, "code", server)
    (choice,) = post(server, "v1/completions", REQUEST)["choices"]
    readings = [
        " ".join(map(str, (repr(one["label"]), one["probability"], one["logprob"], one["rank"])))
        for position in choice["readings"]
        for one in position["ids"].values()
    ]
    first = "".join(f"{line}\n" for line in readings[:3])
    assert run_code([sys.executable, "-c", found["python"]]) == f"{choice['text']}\n{first}"
    streamed = run_code([sys.executable, "-c", found["python-stream"]])
    assert [line for line in readings if line in streamed] == readings


def run_code(command: list[str]) -> str:
    done = subprocess.run(command, env={**os.environ, "OPENAI_API_KEY": KEY}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_any_text_is_quoted(seen, server, monkeypatch):
    cases = scenario(seen, "quoting", server)["cases"]
    assert len(cases) == 26
    captured: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "openai", recording_sdk(captured))
    for case in cases:
        body = case["request"]["body"]
        for code in (case["curl"], case["python"]):
            assert all(sign == "\n" or unicodedata.category(sign) not in UNSEEN for sign in code), repr(code)
        # A function takes the command's place and shows what the shell made of its arguments.
        arguments = run_code(["bash", "-c", "curl() { printf '%s\\0' \"$@\"; }\n" + case["curl"]]).split("\0")
        assert arguments[0] == f"http://127.0.0.1:1/{case['request']['path']}"
        assert json.loads(arguments[arguments.index("-d") + 1]) == body
        with pytest.raises(RequestMade):
            exec(compile(case["python"], "shown", "exec"), {})
        sent = captured.pop()
        assert sent | sent.pop("extra_body") == body


class RequestMade(Exception):
    """In place of an answer."""


def recording_sdk(captured: list[dict[str, Any]]) -> types.ModuleType:
    """OpenAI's SDK, as far as it notes the fields of a request."""

    def create(**fields: Any) -> None:
        captured.append(fields)
        raise RequestMade

    class OpenAI:
        def __init__(self, base_url: str, api_key: str) -> None:
            assert (base_url, api_key) == ("http://127.0.0.1:1/v1", "none")
            self.completions = types.SimpleNamespace(create=create)
            self.chat = types.SimpleNamespace(completions=self.completions)

    module = types.ModuleType("openai")
    module.__dict__["OpenAI"] = OpenAI
    return module


def test_the_files_of_the_page(server):
    with httpx.Client(base_url=server.url) as client:
        index = client.get("/")
        assert index.headers["Content-Type"] == "text/html; charset=utf-8"
        names = re.findall(r'(?:src|href)="(static/[^"]+)"', index.text)
        kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        assert len(names) >= 4
        files = [client.get(f"/{name}") for name in names]
        for name, answer in zip(names, files, strict=True):
            assert answer.headers["Content-Type"].startswith(kinds[Path(name).suffix])
        for answer in (index, *files):
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'self'" in policy and "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            known = client.get(answer.url.path, headers={"If-None-Match": answer.headers["ETag"]})
            assert (known.status_code, known.content) == (304, b"")
            assert client.get(answer.url.path, headers={"If-None-Match": '"another"'}).status_code == 200
            assert client.head(answer.url.path).headers["ETag"] == answer.headers["ETag"]
        for name in ("index.html", "nothing.js", "..%2fpage.py", "%2e%2e/page.py", ""):
            answer = client.get(f"/static/{name}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"


def test_the_page_can_be_left_out():
    async def statuses() -> list[int]:
        async with client_of(None, page=False, served_model_name=["tiny"]) as client:
            return [(await client.get(path)).status_code for path in ("/", "/static/app.js")]

    assert asyncio.run(statuses()) == [404, 404]


def test_a_missing_browser_is_a_reason_to_skip_or_to_fail(monkeypatch):
    monkeypatch.setenv("VLLM_PLAYWRIGHT_FOLDER", "/nowhere")
    monkeypatch.delenv("VLLM_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no playwright-core"):
        find_tools()
    monkeypatch.setenv("VLLM_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="no playwright-core"):
        find_tools()
