"""LoRA adapters as models of a server: from its arguments, loaded while it runs, found by resolvers."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch
from asgi import make_engine
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tiny_adapters import make_adapter, merged

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.server.lora_modules import LoRAModulePath, parse_modules

PROMPT = "the cat sat on the mat"
CHAT = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
GREEDY = {"temperature": 0, "max_tokens": 5}


class Made:
    def __init__(self, folder) -> None:
        self.folder = folder
        _, self.model = make_random_model("llama", "small", folder / "model", vocab_size=VOCAB_SIZE)
        make_byte_tokenizer(folder / "model")
        self.paths = {
            name: make_adapter(folder / "found" / name, self.model, rank=4, seed=seed)
            for seed, name in enumerate(("one", "two", "three"))
        }
        self.models = {name: merged(self.model, path) for name, path in self.paths.items()}
        self.models["tiny"] = self.model

    @torch.no_grad()
    def tokens(self, name, ids, count=5):
        """The model's greedy tokens after `ids`."""
        found = list(ids)
        for _ in range(count):
            found.append(int(self.models[name](torch.tensor([found])).logits[0, -1].argmax()))
        return found[len(ids) :]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("online"))


@pytest.fixture(scope="module")
def server(serve, made):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setattr(LoRAResolverRegistry, "resolvers", {})
        fields = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_num_seqs": 4}
        modules = [f"one={made.paths['one']}", json.dumps({"name": "two", "path": str(made.paths["two"])})]
        app = serve(fields, made.folder / "model", lora_modules=modules)
        app.run(app.state.load_adapters())
        yield app


@pytest.fixture
def encode(server):
    return server.engine.input_processor.tokenizer.encode


def names(server):
    return [each["id"] for each in server.request("GET", "/v1/models").json()["data"]]


def refused(server, status, path, **body):
    answer = server.request("POST", path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def complete(server, model, **body):
    answer = server.request(
        "POST", "/v1/completions", json={"model": model, "prompt": PROMPT, **GREEDY, "return_token_ids": True, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_names(server, made):
    cards = {each["id"]: each for each in server.request("GET", "/v1/models").json()["data"]}
    assert list(cards)[:3] == ["tiny", "one", "two"]
    assert (cards["one"]["root"], cards["one"]["parent"]) == ("one", "tiny")
    assert (cards["tiny"]["root"], cards["tiny"]["parent"]) == ("tiny", None)
    assert server.request("GET", "/v1/models/two").json()["id"] == "two"
    assert server.request("GET", "/v1/models/nobody").status_code == 404


@pytest.mark.parametrize("name", ["tiny", "one", "two"])
def test_completions_and_what_is_generated_from_messages(server, made, encode, name):
    wanted = made.tokens(name, encode(PROMPT))
    answer = complete(server, name)
    assert answer["model"] == name and answer["choices"][0]["token_ids"] == wanted
    text = server.engine.input_processor.tokenizer.decode(wanted, skip_special_tokens=True)
    messages = [{"role": "user", "content": PROMPT}]
    plain = made.tokens(name, encode(PROMPT, add_special_tokens=False))
    text = server.engine.input_processor.tokenizer.decode(plain, skip_special_tokens=True)
    body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 5, **CHAT}
    answer = server.post("/v1/chat/completions", **body)
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name, text)
    streamed = server.request("POST", "/v1/chat/completions", json={**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert {each["model"] for each in chunks} == {name}
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"]) == text


def test_the_other_doors(server, made, encode):
    """Each as the model that it names."""
    server.state.chat_template = CHAT["chat_template"]
    ids = encode(PROMPT, add_special_tokens=False)
    texts = {}
    for name in ("tiny", "one"):
        texts[name] = server.engine.input_processor.tokenizer.decode(made.tokens(name, ids), skip_special_tokens=True)
        body = {"model": name, "input": PROMPT, "temperature": 0, "max_output_tokens": 5}
        answer = server.post("/v1/responses", **body)
        parts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
        assert (answer["model"], "".join(parts)) == (name, texts[name])
        messages = [{"role": "user", "content": PROMPT}]
        answer = server.post("/v1/messages", model=name, messages=messages, max_tokens=5, temperature=0)
        assert (answer["model"], "".join(part["text"] for part in answer["content"])) == (name, texts[name])
    server.state.chat_template = None
    assert texts["tiny"] != texts["one"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["tiny", "one", "two"])
def test_scores_and_decisions(server, made, encode, name):
    body = {"model": name, "query": PROMPT, "items": [" a", " b"], "label_token_ids": [7, 9], "apply_softmax": True}
    answer = server.post("/generative_scoring", **body)
    for item, row in zip((" a", " b"), answer["data"], strict=True):
        logits = made.models[name](torch.tensor([encode(PROMPT + item)])).logits[0, -1].double()
        wanted = logits[[7, 9]].softmax(0)
        assert row["score"] == pytest.approx(float(wanted[0]), abs=1e-4)
    answer = server.post("/rerank", model=name, query="q", documents=["a", "b"])
    assert answer["model"] == name


def test_load_and_unload(server, made):
    path = str(made.paths["three"])
    assert refused(server, 404, "/v1/completions", model="third", prompt="a")["code"] == "model_not_found"
    body = {"lora_name": "third", "lora_path": path}
    answer = server.request("POST", "/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    assert names(server)[-1] == "third"
    made.models["third"] = made.models["three"]
    assert complete(server, "third")["choices"][0]["token_ids"] == made.tokens(
        "third", server.engine.input_processor.tokenizer.encode(PROMPT)
    )
    assert "loaded already" in refused(server, 400, "/v1/load_lora_adapter", **body)["message"]
    assert server.request("POST", "/v1/load_lora_adapter", json={**body, "load_inplace": True}).status_code == 200
    assert "own name" in refused(server, 400, "/v1/load_lora_adapter", lora_name="tiny", lora_path=path)["message"]
    assert refused(server, 400, "/v1/load_lora_adapter", lora_name="x")["param"] == "lora_path"
    held = server.run(server.engine.list_loras())
    answer = server.request("POST", "/v1/unload_lora_adapter", json={"lora_name": "third"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
    assert len(server.run(server.engine.list_loras())) == len(held) - 1
    assert refused(server, 404, "/v1/unload_lora_adapter", lora_name="third")["param"] == "lora_name"
    assert refused(server, 404, "/v1/completions", model="third", prompt="a")["param"] == "model"


def test_a_damaged_adapter_is_400_and_changes_nothing(server, made, tmp_path):
    before, listed = server.run(server.engine.list_loras()), names(server)
    large = make_adapter(tmp_path / "large", made.model, rank=64)
    for path, problem in ((tmp_path / "nowhere", "adapter_config.json"), (large, "max_lora_rank")):
        error = refused(server, 400, "/v1/load_lora_adapter", lora_name="bad", lora_path=str(path))
        assert problem in error["message"] and error["param"] == "lora_path", error
    assert server.run(server.engine.list_loras()) == before and names(server) == listed


class Known(LoRAResolver):
    def __init__(self, paths) -> None:
        self.paths, self.asked = paths, []

    async def resolve_lora(self, base_model_name, lora_name):
        self.asked.append((base_model_name, lora_name))
        path = self.paths.get(lora_name)
        return None if path is None else LoRARequest(lora_name, 1, str(path))


def test_resolvers(server, made, tmp_path, monkeypatch):
    known = Known({"resolved": made.paths["three"], "broken": tmp_path})
    LoRAResolverRegistry.register_resolver("known", known)
    made.models["resolved"] = made.models["three"]
    wanted = made.tokens("resolved", server.engine.input_processor.tokenizer.encode(PROMPT))
    assert complete(server, "resolved")["choices"][0]["token_ids"] == wanted
    assert complete(server, "resolved")["choices"][0]["token_ids"] == wanted
    assert known.asked == [("tiny", "resolved")]
    error = refused(server, 400, "/v1/completions", model="broken", prompt="a")
    assert error["param"] == "model" and str(tmp_path) not in error["message"]
    assert refused(server, 404, "/v1/completions", model="nobody", prompt="a")["code"] == "model_not_found"
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0")
    assert refused(server, 404, "/v1/completions", model="other", prompt="a")
    assert known.asked[-1] == ("tiny", "nobody")


def test_folders_are_found_by_their_names(serve, made, tmp_path, monkeypatch):
    """VLLM_LORA_RESOLVER_CACHE_DIR: FOLDER/NAME, unless it is for another model."""
    found = tmp_path / "found"
    for name in ("two", "three"):
        shutil.copytree(made.paths[name], found / name)
    other = json.loads((found / "two" / "adapter_config.json").read_text())
    for name, changed in (
        ("of another model", {"base_model_name_or_path": "org/other"}),
        ("of this", {"base_model_name_or_path": "org/tiny"}),
        ("of another kind", {"peft_type": "IA3"}),
        ("org/deep", {}),
    ):
        shutil.copytree(found / "two", found / name)
        (found / name / "adapter_config.json").write_text(json.dumps(other | changed))
    (found / "empty").mkdir()
    (tmp_path / "outside").mkdir()
    shutil.copytree(found / "two", tmp_path / "outside" / "adapter")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(found))
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {})
    server = serve({"enable_lora": True, "max_loras": 2}, made.folder / "model")
    assert LoRAResolverRegistry.get_supported_resolvers() == {"Filesystem Resolver"}
    ids = server.engine.input_processor.tokenizer.encode(PROMPT)
    for name, kind in (
        ("three", "three"),
        ("two", "two"),
        ("of this", "two"),
        ("org/deep", "two"),
        ("three", "three"),
    ):
        assert complete(server, name)["choices"][0]["token_ids"] == made.tokens(kind, ids)
    assert names(server) == ["tiny", "three", "two", "of this", "org/deep"]
    for name in (
        "of another model",
        "of another kind",
        "empty",
        "../outside/adapter",
        "org/../two",
        "/two",
        "..",
        "",
        "nobody",
    ):
        answer = server.request("POST", "/v1/completions", json={"model": name, "prompt": "a"})
        assert answer.status_code in (400, 404) and str(found) not in answer.text, name
    assert names(server) == ["tiny", "three", "two", "of this", "org/deep"]


def test_metrics_name_adapters(server):
    complete(server, "one")
    text = server.request("GET", "/metrics").text
    assert 'vllm:lora_requests_info{engine="0",max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}' in text


def test_modules():
    given = ["a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "base"}']
    assert parse_modules(given) == [LoRAModulePath("a", "/x=y"), LoRAModulePath("b", "/z", "base")]
    assert parse_modules(None) == []
    for wrong in ("a", "=x", "a=", "{}", '{"name": 1, "path": "x"}', '{"name": "a", "path": "b", "c": 1}', "{"):
        with pytest.raises(ValueError, match="--lora-modules takes NAME=PATH"):
            parse_modules([wrong])
    with pytest.raises(ValueError, match="names 'a' twice"):
        parse_modules(["a=b", "a=c"])


def test_engine_of_a_server(server, made):
    """AsyncLLM's own calls."""

    async def test(engine):
        one = LoRARequest("mine", 50, str(made.paths["three"]))
        assert await engine.add_lora(one) and 50 in await engine.list_loras()
        assert await engine.pin_lora(50)
        with pytest.raises(VLLMValidationError, match="no adapter has the id 51"):
            await engine.pin_lora(51)
        assert await engine.remove_lora(50) and not await engine.remove_lora(50)
        with pytest.raises(VLLMValidationError, match="must be a LoRARequest"):
            await engine.add_lora("mine")

    server.run(test(server.engine))


def test_every_replica_has_an_adapter(made, tmp_path):
    async def test(engine):
        own = LoRARequest("one", 1, str(made.paths["one"]))
        prompts = [[5, 6, 7], [8, 9], [10], [11, 12]]
        params = SamplingParams(temperature=0, max_tokens=3)

        async def answer(index, ids):
            async for output in engine.generate({"prompt_token_ids": ids}, params, f"r{index}", lora_request=own):
                last = output
            return last

        outputs = await asyncio.gather(*(answer(index, ids) for index, ids in enumerate(prompts)))
        for ids, output in zip(prompts, outputs, strict=True):
            assert output.lora_request == own and output.outputs[0].token_ids == made.tokens("one", ids, 3)
        assert await engine.list_loras() == {1}
        assert await asyncio.gather(*(each.core.call("list_loras") for each in engine.replicas)) == [[1], [1]]
        with pytest.raises(VLLMValidationError, match="adapter_config.json"):
            await engine.add_lora(LoRARequest("none", 2, str(tmp_path)))
        assert await engine.list_loras() == {1} and await engine.remove_lora(1) and not await engine.list_loras()

    async def run():
        engine = make_engine(made.folder / "model", enable_lora=True, data_parallel_size=2)
        try:
            await test(engine)
        finally:
            engine.shutdown()

    asyncio.run(run())
