"""Stands where upstream's tests expect their shared fixtures (`tests.conftest`): the same names over our engine."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import absent
import huggingface_hub
import pytest
import torch
import transformers

import vllm.tokenizers.registry
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

os.environ.setdefault("HF_HUB_OFFLINE", "1")
absent.install(json.loads(os.environ["UPSTREAM_ABSENT"]))
if not torch.accelerator.is_available():
    torch.accelerator.empty_cache = lambda: None  # what tests call between two engines

_ADAPTERS = json.loads(os.environ["UPSTREAM_ADAPTERS"])
_download = huggingface_hub.HfApi.snapshot_download


def _found(self: Any, repo_id: str, *args: Any, **fields: Any) -> str:
    """An adapter's name has become its folder, but where it names a folder of the test's own."""
    if Path(repo_id).is_dir():
        return repo_id
    return _ADAPTERS.get(repo_id) or _download(self, repo_id, *args, **fields)


huggingface_hub.HfApi.snapshot_download = _found

if _ANY_TOKENIZER := os.environ.get("UPSTREAM_TOKENIZER"):
    _of_hub = transformers.AutoTokenizer.from_pretrained

    # A file has hundreds of tests, and they leave tokenizers as they are.
    _read_once = functools.cache(_of_hub)

    def _some_tokenizer(name: Any = None, *args: Any, tokenizer_name: Any = None, **fields: Any) -> Any:
        folder = name or tokenizer_name
        return _read_once(str(folder) if Path(folder).is_dir() else _ANY_TOKENIZER)

    transformers.AutoTokenizer.from_pretrained = _some_tokenizer
    for _module in (vllm.tokenizers, vllm.tokenizers.registry):
        _module.get_tokenizer = _some_tokenizer

# The random model's logits lie so close together that two implementations in float16 take different tokens.
_DTYPES = {"half": "float32", "float": "float32", "float16": "float32"}
_SKIPS = json.loads(os.environ["UPSTREAM_SKIPS"])


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that upstream's own fixtures add."""
    parser.addoption("--optional", action="store_true", default=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the script's table names, with its reason."""
    for item in items:
        for part, reason in _SKIPS:
            if part in f"{item.nodeid} ":
                if reason:
                    item.add_marker(pytest.mark.skip(reason=reason))
                break


@contextmanager
def _left_out_if_refused() -> Iterator[None]:
    """Skip the test that needs a name of upstream's which only refuses."""
    try:
        yield
    except NotImplementedError as error:
        if traceback.extract_tb(error.__traceback__)[-1].name != "refuse":
            raise
        pytest.skip("refused by name")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Fixtures that need such a name."""
    with _left_out_if_refused():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Tests that need one."""
    with _left_out_if_refused():
        return (yield)


class VllmRunner:
    """An LLM and calls that return (token ids, text[, readings]) tuples; ids of `generate` begin with the prompt's."""

    def __init__(self, model_name: str, *, tokenizer_name: str | None = None, **fields: Any) -> None:
        fields.setdefault("max_model_len", 1024)
        fields["dtype"] = _DTYPES.get(fields.get("dtype", "auto"), fields.get("dtype", "auto"))
        self.llm = LLM(model=model_name, tokenizer=tokenizer_name, **{"seed": 0, **fields})

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(self, *error: object) -> None:
        del self.llm

    def get_llm(self) -> LLM:
        return self.llm

    def get_inputs(self, prompts: list[Any]) -> list[Any]:
        return [_as_prompt(prompt) for prompt in prompts]

    def generate(
        self, prompts: list[Any], sampling_params: SamplingParams, return_logprobs: bool = False, **fields: Any
    ) -> Any:
        found, readings = [], []
        for output in self.llm.generate(self.get_inputs(prompts), sampling_params, **fields):
            ids = [output.prompt_token_ids + list(each.token_ids) for each in output.outputs]
            texts = [(output.prompt or "") + each.text for each in output.outputs]
            found.append((ids, texts))
            own = list(output.prompt_logprobs or [])
            for each in output.outputs:
                own += list(each.logprobs or [])
            readings.append(own)
        return (found, readings) if return_logprobs else found

    def generate_w_logprobs(
        self, prompts: list[Any], sampling_params: SamplingParams, include_prompt_token_ids: bool = False, **fields: Any
    ) -> list[tuple[Any, ...]]:
        found = []
        for output in self.llm.generate(self.get_inputs(prompts), sampling_params, **fields):
            each = output.outputs[-1]
            row: tuple[Any, ...] = (list(each.token_ids), each.text, each.logprobs)
            row += (output.prompt_token_ids,) if include_prompt_token_ids else ()
            row += (output.prompt_logprobs,) if sampling_params.prompt_logprobs is not None else ()
            found.append(row)
        return found

    def generate_greedy(self, prompts: list[Any], max_tokens: int, **fields: Any) -> list[tuple[list[int], str]]:
        outputs = self.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens), **fields)
        return [(ids[0], texts[0]) for ids, texts in outputs]

    def generate_greedy_logprobs(
        self,
        prompts: list[Any],
        max_tokens: int,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
        stop_token_ids: list[int] | None = None,
        stop: list[str] | None = None,
        **fields: Any,
    ) -> list[tuple[Any, ...]]:
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=num_logprobs,
            prompt_logprobs=num_prompt_logprobs,
            stop_token_ids=stop_token_ids,
            stop=stop,
        )
        return self.generate_w_logprobs(prompts, params, **fields)

    def embed(self, prompts: list[Any], **fields: Any) -> list[list[float]]:
        return [output.outputs.embedding for output in self.llm.embed(prompts, **fields)]

    def classify(self, prompts: list[Any], **fields: Any) -> list[list[float]]:
        return [output.outputs.probs for output in self.llm.classify(prompts, **fields)]

    def token_embed(self, prompts: list[Any]) -> list[torch.Tensor]:
        return [output.outputs.data for output in self.llm.encode(prompts, pooling_task="token_embed")]

    def token_classify(self, prompts: list[Any]) -> list[torch.Tensor]:
        return [output.outputs.data for output in self.llm.encode(prompts, pooling_task="token_classify")]

    def score(self, first: Any, second: Any, **fields: Any) -> list[float]:
        return [output.outputs.score for output in self.llm.score(first, second, **fields)]

    def generate_beam_search(
        self, prompts: list[Any], beam_width: int, max_tokens: int, concurrency_limit: int | None = None
    ) -> list[tuple[list[list[int]], list[Any]]]:
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        limit: dict[str, Any] = {} if concurrency_limit is None else {"concurrency_limit": concurrency_limit}
        outputs = self.llm.beam_search(self.get_inputs(prompts), params, **limit)
        return [([beam.tokens for beam in each.sequences], [beam.text for beam in each.sequences]) for each in outputs]


class HfRunner:
    """The same calls by transformers, in the dtype asked for."""

    def __init__(
        self,
        model_name: str,
        dtype: str = "auto",
        is_sentence_transformer: bool = False,
        is_cross_encoder: bool = False,
        auto_cls: Any = None,
        **fields: Any,
    ) -> None:
        if is_sentence_transformer or is_cross_encoder:
            library = pytest.importorskip("sentence_transformers")
            kind = library.SentenceTransformer if is_sentence_transformer else library.CrossEncoder
            self.model = kind(model_name, device="cpu")
            return
        from transformers import AutoModelForCausalLM, AutoTokenizer

        kind = getattr(torch, _DTYPES.get(dtype, dtype), torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        self.model = (auto_cls or AutoModelForCausalLM).from_pretrained(model_name, dtype=kind).eval()
        self.config = self.model.config

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *error: object) -> None:
        del self.model

    def encode(self, prompts: list[str], **fields: Any) -> Any:
        return self.model.encode(prompts)

    def predict(self, pairs: list[list[str]], **fields: Any) -> torch.Tensor:
        return torch.as_tensor(self.model.predict(pairs))

    def wrap_device(self, inputs: Any, **fields: Any) -> Any:
        return inputs

    def classify(self, prompts: list[str]) -> list[list[float]]:
        found = []
        for prompt in prompts:
            with torch.no_grad():
                logits = self.model(**self.tokenizer(prompt, return_tensors="pt")).logits[0]
            kind = self.config.problem_type
            is_share = kind not in ("regression", "multi_label_classification")
            values = logits.softmax(-1) if is_share else logits.sigmoid() if kind != "regression" else logits
            found.append(values.tolist())
        return found

    def _ids(self, prompt: Any) -> torch.Tensor:
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        return torch.tensor([ids])

    def _generate(self, prompt: Any, **fields: Any) -> Any:
        ids = self._ids(prompt)
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **fields)

    def generate(self, prompts: list[Any], **fields: Any) -> list[tuple[list[list[int]], list[str]]]:
        rows = [self._generate(prompt, **fields).tolist() for prompt in prompts]
        return [(ids, self.tokenizer.batch_decode(ids, skip_special_tokens=True)) for ids in rows]

    def generate_greedy(self, prompts: list[Any], max_tokens: int, **fields: Any) -> list[tuple[list[int], str]]:
        rows = self.generate(prompts, do_sample=False, max_new_tokens=max_tokens, **fields)
        return [(ids[0], texts[0]) for ids, texts in rows]

    def generate_beam_search(
        self, prompts: list[Any], beam_width: int, max_tokens: int
    ) -> list[tuple[list[list[int]], list[str]]]:
        return self.generate(
            prompts, do_sample=False, max_new_tokens=max_tokens, num_beams=beam_width, num_return_sequences=beam_width
        )

    def _continuation(self, prompt: Any, max_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Greedy ids without the prompt, and the logprobs after each position but the last."""
        row = self._generate(prompt, do_sample=False, max_new_tokens=max_tokens)
        with torch.no_grad():
            logprobs = self.model(row).logits[0].float().log_softmax(-1)
        return row[0, self._ids(prompt).shape[1] :].tolist(), logprobs

    def generate_greedy_logprobs(self, prompts: list[Any], max_tokens: int, **fields: Any) -> list[list[torch.Tensor]]:
        """One tensor a step; the first holds the prompt's positions as well."""
        found = []
        for prompt in prompts:
            start = self._ids(prompt).shape[1]
            ids, logprobs = self._continuation(prompt, max_tokens)
            steps = [logprobs[start + step : start + step + 1] for step in range(len(ids) - 1)]
            found.append([logprobs[:start], *steps])
        return found

    def generate_greedy_logprobs_limit(
        self, prompts: list[Any], max_tokens: int, num_logprobs: int | None, **fields: Any
    ) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for prompt in prompts:
            start = self._ids(prompt).shape[1]
            ids, logprobs = self._continuation(prompt, max_tokens)
            tops = [logprobs[start - 1 + step].topk(num_logprobs or 0) for step in range(len(ids))]
            entries = [dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]
            found.append((ids, self.tokenizer.decode(ids), entries))
        return found


def _as_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    return {"prompt": prompt} if isinstance(prompt, str) else prompt


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    return VllmRunner


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


@pytest.fixture
def example_prompts() -> list[str]:
    return (Path(__file__).parent / "prompts" / "example.txt").read_text().splitlines()


@pytest.fixture(scope="session", autouse=True)
def no_downloads() -> Iterator[None]:
    """Adapters that a server is started with are asked of the hub; the server that stands in loads none."""
    from types import SimpleNamespace
    from unittest.mock import patch

    def local(folder: str, filename: str, **fields: Any) -> str:
        return str(Path(folder) / filename)

    nothing = SimpleNamespace(snapshot_download=lambda *args, **fields: "", hf_hub_download=local)
    with (
        patch("vllm.transformers_utils.repo_utils.hf_api", lambda: nothing),
        # Patch it in modules that have imported it.
        patch("huggingface_hub.HfApi.hf_hub_download", lambda api, *args, **fields: local(*args, **fields)),
    ):
        yield


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    yield caplog


@pytest.fixture
def enable_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


@pytest.fixture(scope="session")
def num_gpus_available() -> int:
    return torch.cuda.device_count()


class AssetServer:
    """Pictures at an address of this machine, drawn by their names in the place of upstream's."""

    def __init__(self) -> None:
        assets = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/")
                file = io.BytesIO()
                assets.get_image_asset(name).save(file, "JPEG" if name.endswith(".jpg") else "PNG")
                self.send_response(200)
                self.end_headers()
                self.wfile.write(file.getvalue())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def url_for(self, name: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def get_image_asset(self, name: str) -> Any:
        from tiny_vision import draw

        mode = "RGBA" if "RGBA" in name else "P" if "palette" in name else "RGB"
        return draw(60, 40, len(name), mode)


@pytest.fixture(scope="session")
def local_asset_server() -> Iterator[AssetServer]:
    server = AssetServer()
    yield server
    server.close()


@pytest.fixture
def image_url(request: pytest.FixtureRequest, local_asset_server: AssetServer) -> str:
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request: pytest.FixtureRequest, local_asset_server: AssetServer) -> list[str]:
    return [local_asset_server.url_for(name) for name in request.param]
