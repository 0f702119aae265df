"""Routes for who owns the server: there with VLLM_SERVER_DEV_MODE=1, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from asgi import AppThread, Serve
from safetensors.torch import load_file, save_file

ROUTES = [
    ("GET", "/server_info"),
    ("GET", "/get_world_size"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/collective_rpc"),
    ("POST", "/update_weights"),
    ("GET", "/weight_version"),
]


@pytest.fixture(scope="module")
def app(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppThread]:
    fields = {
        "profiler_config": {"profiler": "torch", "torch_profiler_dir": str(tmp_path_factory.mktemp("traces"))},
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": "nccl"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        yield serve(fields)


def answer(app: AppThread, method: str, url: str, **options: object) -> object:
    response = app.request(method, url, **options)
    assert response.status_code == 200, response.text
    return response.json() if response.content else None


def test_only_in_development(app: AppThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE")
    other = AppThread(app.engine, app)
    for method, url in ROUTES:
        assert other.request(method, url).status_code == 404, url
    assert not {url for _, url in ROUTES} & set(app.request("GET", "/openapi.json").json()["paths"])


def test_what_it_is_made_of(app: AppThread) -> None:
    config = answer(app, "GET", "/server_info?config_format=json")["vllm_config"]
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["weight_transfer_config"] == {"backend": "nccl"}
    assert "processed_logprobs" in answer(app, "GET", "/server_info")["vllm_config"]
    assert answer(app, "GET", "/get_world_size") == {"world_size": 1}
    error = app.request("GET", "/server_info?config_format=xml").json()["error"]
    assert error["param"] == "config_format"


def test_the_prefix_cache(app: AppThread) -> None:
    prompt = list(range(3, 60))
    first, second = (app.post("/v1/completions", prompt=prompt, max_tokens=1)["usage"] for _ in range(2))
    assert answer(app, "POST", "/reset_prefix_cache") == {"success": True}
    third = app.post("/v1/completions", prompt=prompt, max_tokens=1)["usage"]
    cached = [(each.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for each in (first, second, third)]
    assert cached[0] == cached[2] == 0


def test_sleep(app: AppThread) -> None:
    prompt = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    before = app.post("/v1/completions", **prompt)["choices"]
    assert answer(app, "POST", "/sleep?level=1") is None
    assert answer(app, "GET", "/is_sleeping") == {"is_sleeping": True}
    answer(app, "POST", "/wake_up?tags=weights")
    assert answer(app, "GET", "/is_sleeping") == {"is_sleeping": True}
    answer(app, "POST", "/wake_up?tags=kv_cache")
    assert answer(app, "GET", "/is_sleeping") == {"is_sleeping": False}
    assert app.post("/v1/completions", **prompt)["choices"] == before
    assert app.request("POST", "/sleep?level=7").json()["error"]["param"] == "level"


def test_pauses(app: AppThread) -> None:
    answer(app, "POST", "/pause?mode=wait&clear_cache=false")
    assert answer(app, "GET", "/is_paused") == {"is_paused": True}
    answer(app, "POST", "/resume")
    assert answer(app, "GET", "/is_paused") == {"is_paused": False}
    assert app.request("POST", "/pause?clear_cache=perhaps").json()["error"]["param"] == "clear_cache"


def test_workers(app: AppThread) -> None:
    assert answer(app, "POST", "/collective_rpc", json={"method": "reload_weights"}) == {"results": [None]}
    assert app.request("POST", "/collective_rpc", json={}).json()["error"]["param"] == "method"
    unknown = app.request("POST", "/collective_rpc", json={"method": "no_such_method"})
    assert unknown.status_code == 400
    assert "no_such_method" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"master_address": "127.0.0.1", "world_size": 2}, "init_info lacks master_port"),
        ({"master_address": "127.0.0.1", "master_port": 1, "world_size": 1}, "world_size must be"),
        ({"handles": []}, "init_info: handles is not served"),
    ],
)
def test_trainers_that_cannot_be_met(app: AppThread, info: dict[str, object], message: str) -> None:
    response = app.request("POST", "/init_weight_transfer_engine", json={"init_info": info})
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert answer(app, "POST", "/init_weight_transfer_engine", json={"init_info": {}}) == {"status": "initialized"}


def test_new_weights(app: AppThread, tmp_path: Path) -> None:
    def read() -> tuple[object, object]:
        (choice,) = app.post("/v1/completions", **prompt)["choices"]
        return choice["logprobs"]["token_logprobs"], choice["weight_versions"]

    prompt = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 1, "return_weight_versions": True}
    old = Path(app.engine.vllm_config.model_config.path) / "model.safetensors"
    weights = load_file(old)
    save_file({name: tensor + 0.05 for name, tensor in weights.items()}, tmp_path / "new.safetensors")
    before = read()
    (first,) = before[1]
    assert answer(app, "GET", "/weight_version") == {"weight_version": first}

    answer(app, "POST", "/start_weight_update")
    by_path = {"update_info": {"path": str(tmp_path / "new.safetensors")}}
    assert answer(app, "POST", "/update_weights", json=by_path) == {"status": "updated"}
    assert read() == before
    answer(app, "POST", "/finish_weight_update", json={"weight_version": "step-1"})
    changed = read()
    assert changed[0] != before[0]
    assert changed[1] == ["step-1"]
    chat = app.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "a"}],
        chat_template="{{ messages[0].content }}",
        max_tokens=1,
        return_weight_versions=True,
    )
    assert chat["choices"][0]["weight_versions"] == ["step-1"]

    octets = {"headers": {"content-type": "application/octet-stream"}}
    answer(app, "POST", "/update_weights", content=old.read_bytes(), **octets)
    assert read() == (before[0], [first + 2])


def test_weights_that_do_not_fit(app: AppThread, tmp_path: Path) -> None:
    version = answer(app, "GET", "/weight_version")
    weights = load_file(Path(app.engine.vllm_config.model_config.path) / "model.safetensors")
    save_file({**weights, "zzz.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    for content in ((tmp_path / "w.safetensors").read_bytes(), b"no file of tensors"):
        response = app.request(
            "POST", "/update_weights", content=content, headers={"content-type": "application/octet-stream"}
        )
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("no weight was changed: ")
    for info in (
        {"names": []},
        {"names": ["a"], "dtype_names": ["float32"], "shapes": []},
        {"names": ["a"], "dtype_names": ["float33"], "shapes": [[1]]},
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]},
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "is_sparse": True},
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]},  # and no trainer was met
    ):
        assert app.request("POST", "/update_weights", json={"update_info": info}).status_code == 400, info
    assert answer(app, "GET", "/weight_version") == version


def test_a_profile_needs_a_folder(app: AppThread, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(app, "POST", "/start_profile") is None
    app.post("/v1/completions", prompt=[5, 6], max_tokens=1)
    assert answer(app, "POST", "/stop_profile") is None
    config = app.engine.vllm_config
    assert len(list(Path(config.torch_profiler_dir).iterdir())) == 1
    monkeypatch.setattr(app.engine, "vllm_config", replace(config, torch_profiler_dir=""))
    assert app.request("POST", "/start_profile").status_code == 404
