"""trl: GRPO with the engine in the trainer's process, and over the server that trl starts.

trl's trainer itself sends a server no weights where there is no GPU (`test_the_trainer_itself_asks_for_a_gpu`);
examples/grpo_over_a_server.py does.
"""

from __future__ import annotations

import importlib.util
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import ROOT

from vllm.utils.network_utils import get_open_port

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions", "ignore:`trl vllm-serve`")

PROMPTS = ["the stop", "Hello there", "Say: the", "One, two,"]
READ = [5, 90, 17, 201, 33, 64, 3]
TOLERANCE = 1e-4
"""The tolerance of a token's logprob, in nats."""


def trainer_of(
    folder: Path, output: Path, prompts: list[str] = PROMPTS, peft_config: Any = None, **options: Any
) -> Any:
    """A trainer whose reward is the share of even ids in the answer: two steps of four answers."""
    from datasets import Dataset

    usual = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    return trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completion_ids, **_: [
            sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids
        ],
        args=trl.GRPOConfig(output_dir=str(output), **{**usual, **options}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        peft_config=peft_config,
    )


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def readings(llm: Any) -> list[float]:
    """Logprobs of READ's tokens, each after those before it, by the engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    (output,) = llm.generate([{"prompt_token_ids": READ}], params, use_tqdm=False)
    return [row[token_id].logprob for token_id, row in zip(READ[1:], output.prompt_logprobs[1:], strict=True)]


@torch.no_grad()
def reference_readings(model: Any) -> list[float]:
    logprobs = model(torch.tensor([READ])).logits[0].log_softmax(-1)
    return [float(logprobs[place, token_id]) for place, token_id in enumerate(READ[1:])]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep between generations"])
def test_grpo_trains_and_the_engine_follows(tiny_model: Path, tmp_path: Path, sleeps: bool) -> None:
    trainer = trainer_of(tiny_model, tmp_path, vllm_enable_sleep_mode=sleeps)
    before = reference_readings(trainer.model)
    llm = trainer.vllm_generation.llm
    if not sleeps:
        assert readings(llm) == pytest.approx(before, abs=TOLERANCE)
    trainer.train()

    steps = steps_of(trainer)
    assert len(steps) == 2
    for row in steps:  # the engine sampled with the weights that the step trains
        assert row["sampling/sampling_logp_difference/max"] < TOLERANCE
    assert any(row["grad_norm"] > 0 for row in steps)

    trainer.vllm_generation.sync_weights()
    if sleeps:
        llm.wake_up(tags=["kv_cache"])
    after = readings(llm)
    assert after == pytest.approx(reference_readings(trainer.model), abs=TOLERANCE)
    assert max(abs(new - old) for new, old in zip(after, before, strict=True)) > 100 * TOLERANCE


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("with_adapter", [False, True], ids=["all weights", "an adapter"])
def test_the_reward_rises(tiny_model: Path, tmp_path: Path, with_adapter: bool) -> None:
    options: dict[str, Any] = {"vllm_enable_sleep_mode": True}
    if with_adapter:
        peft = pytest.importorskip("peft")
        # Targets of all sizes: the adapter is merged for the engine, and taken out again. Steps are smaller, and more:
        # with those of 0.1 the reward after 30 is anything from 0.55 to 0.8, by the seed, also where transformers
        # generates.
        options = {
            "peft_config": peft.LoraConfig(r=16, lora_alpha=64, target_modules="all-linear"),
            "learning_rate": 0.02,
            "max_steps": 80,
        }
    sizes = {"per_device_train_batch_size": 16, "num_generations": 8, "max_steps": 30}
    trainer = trainer_of(tiny_model, tmp_path, **{**sizes, **options})
    trainer.train()
    check_rise(steps_of(trainer), with_adapter)


def check_rise(steps: list[dict[str, float]], with_adapter: bool) -> None:
    """The reward rises over the steps."""
    assert len(steps) == (80 if with_adapter else 30)
    # Half of the ids are even.
    assert sum(row["reward"] for row in steps[:5]) / 5 < 0.6
    assert sum(row["reward"] for row in steps[-5:]) / 5 > (0.65 if with_adapter else 0.8)
    # An adapter that is merged into weights, and taken out of them later, rounds them each time; and as weights grow,
    # float32 by itself is as far from float64, the trainer's as the engine's.
    tolerance = TOLERANCE * (10 if with_adapter else 1)
    assert all(row["sampling/sampling_logp_difference/max"] < tolerance for row in steps)


# Prompts of 7 tokens each: a batch that trl pads on the left moves the positions of its own forward.
EVEN_PROMPTS = ["abcdefg", "hijklmn", "bcdfghj"]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("rounding", ["vllm", "autocast"])
def test_a_trainer_under_autocast_and_the_engines_rounding(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: str
) -> None:
    monkeypatch.setenv("VLLM_ROUNDING", rounding)
    trainer = trainer_of(
        tiny_model,
        tmp_path,
        EVEN_PROMPTS,
        bf16=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        vllm_model_impl="transformers",
        per_device_train_batch_size=8,
        max_steps=5,
    )
    trainer.train()
    # The third of 5 steps: PyTorch may add the few products of so small a model in another order once in a while.
    middle = sorted(row["sampling/sampling_logp_difference/max"] for row in steps_of(trainer))[2]
    assert middle < 1e-5 if rounding == "autocast" else middle > 1e-3


@pytest.fixture(scope="module")
def client(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of `trl vllm-serve`, as trl starts it."""
    pytest.importorskip("requests")
    from trl.generation.vllm_client import VLLMClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("trl") / "log"
    command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", str(tiny_model), "--host", "127.0.0.1"]
    command += ["--enable-lora", "--max-lora-rank", "16"]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--dtype", "float32"], stdout=file, stderr=file, env=environment
        )
    try:
        yield _connected(VLLMClient, f"http://127.0.0.1:{port}", server, log)
    finally:
        server.terminate()
        server.wait(30)


def _connected(make: Any, url: str, server: subprocess.Popen[bytes], log: Path) -> Any:
    deadline = time.monotonic() + 300
    while True:
        try:
            return make(base_url=url)
        except OSError:  # requests has a ConnectionError of its own
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


def test_server_generates(client: Any, llm: Any) -> None:
    from vllm import SamplingParams

    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    answer = client.generate(ids, n=2, temperature=0.8, max_tokens=6, logprobs=0, generation_kwargs={"seed": 7})
    params = SamplingParams(n=2, temperature=0.8, max_tokens=6, logprobs=0, seed=7, logprobs_mode="processed_logprobs")
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    completions = [each for output in outputs for each in output.outputs]
    assert answer["prompt_ids"] == ids
    assert answer["completion_ids"] == [each.token_ids for each in completions]
    for rows, each in zip(answer["logprobs"], completions, strict=True):
        own = [row[token_id].logprob for token_id, row in zip(each.token_ids, each.logprobs, strict=True)]
        assert [value for (value,) in rows] == pytest.approx(own, abs=TOLERANCE)


def test_server_answers_chats(client: Any, llm: Any) -> None:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:2]]
    answer = client.chat(conversations, temperature=1.0, max_tokens=4, generation_kwargs={"seed": 3})
    template = llm.get_tokenizer().apply_chat_template
    rendered = [template(each, add_generation_prompt=True, return_dict=False) for each in conversations]
    assert answer["prompt_ids"] == rendered
    assert all(1 <= len(ids) <= 4 for ids in answer["completion_ids"])


def test_server_reads_sequences(client: Any, reference: Any) -> None:
    answer = client.get_sequence_logprobs([READ], [1], top_logprobs=100)
    own = [row[0] for row in answer["actual_logprobs"][0]]
    expected = reference_readings(reference)
    listed = [(got, want) for got, want in zip(own, expected, strict=True) if got > -math.inf]
    assert listed
    assert all(got == pytest.approx(want, abs=TOLERANCE) for got, want in listed)
    assert all(len(row) == 100 and row == sorted(row, reverse=True) for row in answer["logprobs"][0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="trl sends weights from a GPU")
@pytest.mark.usefixtures("environment")
def test_the_trainer_itself_asks_for_a_gpu(client: Any, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="NCCL weight-transfer engine, which needs a CUDA device"):
        trainer_of(tiny_model, tmp_path, vllm_mode="server", vllm_server_base_url=client.base_url)


@torch.no_grad()
def test_its_client_sends_weights(client: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(client, "group_port", get_open_port())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = served_readings(client)
    client.init_communicator(device="cuda")  # of no index: no device is touched
    try:
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
        client.update_model_params(model)
        changed = served_readings(client)
        assert changed == pytest.approx(reference_readings(model), abs=TOLERANCE)
        assert max(abs(new - old) for new, old in zip(changed, before, strict=True)) > 100 * TOLERANCE

        # One by one, of another dtype.
        with client.weight_update():
            for name, weight in model.named_parameters():
                weight.copy_(weight.bfloat16())
                client.update_named_param(name, weight.bfloat16())
            assert served_readings(client) == changed  # until the update ends
        rounded = served_readings(client)
        assert rounded == pytest.approx(reference_readings(model), abs=TOLERANCE)

        # Nothing changes where one does not fit; the group goes on.
        name, weight = next(iter(model.named_parameters()))
        for wrong in ((name, weight[1:]), ("zzz.weight", weight), (name, weight.int())):
            with pytest.raises(Exception, match="400.*no weight was changed: .*load_weights"):
                client.update_named_param(*wrong)
            assert served_readings(client) == rounded
        original = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        client.update_model_params(original)
        assert served_readings(client) == pytest.approx(before, abs=1e-6)
    finally:
        client.close_communicator()


def served_readings(client: Any) -> list[float]:
    """As `readings`, of the server."""
    url = f"{client.base_url}/v1/completions"
    body = {"model": client.model, "prompt": READ, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    (choice,) = client._post(url, json=body)["choices"]
    pairs = zip(READ[1:], choice["prompt_logprobs"][1:], strict=True)
    return [row[str(token_id)]["logprob"] for token_id, row in pairs]


@pytest.fixture(scope="module")
def example() -> Any:
    """examples/grpo_over_a_server.py."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "grpo_over_a_server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def served_trainer(
    environment: None,
    client: Any,
    example: Any,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """A function that makes the example's trainer."""
    from trl.generation import vllm_generation

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(vllm_generation, "VLLMClient", vllm_generation.VLLMClient)  # set back in the end
    made = []

    def make(**options: Any) -> Any:
        usual = {"vllm_group_port": get_open_port(), "disable_tqdm": True}
        made.append(example.make_trainer(str(tiny_model), client.base_url, str(tmp_path), **usual, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.vllm_generation.vllm_client.close_communicator()


def test_the_reward_rises_over_a_server(served_trainer: Any) -> None:
    trainer = served_trainer()
    trainer.train()
    check_rise(steps_of(trainer), with_adapter=False)


# Unlike colocated engines, servers sample in no fixed order: few steps say whether an adapter comes, not whether the
# reward rises.
@pytest.mark.parametrize("is_alone", [False, True], ids=["merged", "alone"])
def test_an_adapter_over_a_server(
    served_trainer: Any, example: Any, tiny_model: Path, tmp_path: Path, is_alone: bool
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=16, lora_alpha=64, target_modules="all-linear")
    trainer = served_trainer(peft_config=config, learning_rate=0.1, max_steps=6)
    sender = trainer.vllm_generation.vllm_client
    if is_alone:
        # The server has what was trained last.
        sender.update_model_params(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
        example.send_adapter_alone(trainer, str(tmp_path / "adapter"))
    trainer.train()
    steps = steps_of(trainer)
    assert len(steps) == 6 and any(row["grad_norm"] > 0 for row in steps)
    # An adapter that is merged is sent between two roundings of the weights.
    assert all(row["sampling/sampling_logp_difference/max"] < (1 if is_alone else 5) * TOLERANCE for row in steps)
    names = [
        each["id"] for each in trainer.vllm_generation.vllm_client._get(f"{client_url(trainer)}/v1/models")["data"]
    ]
    assert ("policy" in names) == is_alone


def client_url(trainer: Any) -> str:
    return str(trainer.vllm_generation.vllm_client.base_url)


def test_an_adapter_of_each_step_in_the_trainers_process(tiny_model: Path, tmp_path: Path) -> None:
    """Without trl: what its trainers would do with an engine that loads adapters."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), config)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    llm = LLM(str(tiny_model), dtype="float32", max_model_len=128, enable_lora=True, max_lora_rank=8)
    params = SamplingParams(max_tokens=8, logprobs=0, seed=3, ignore_eos=True)
    seen = []
    for step in range(4):
        model.save_pretrained(tmp_path)
        request = LoRARequest("policy", 1, str(tmp_path), load_inplace=True)
        llm.start_weight_update()
        llm.finish_weight_update(f"step-{step}")
        (output,) = llm.generate([{"prompt_token_ids": READ}], params, use_tqdm=False, lora_request=request)
        (choice,) = output.outputs
        assert choice.weight_versions == [f"step-{step}"]
        logits = model(torch.tensor([[*READ, *choice.token_ids]])).logits[0, len(READ) - 1 : -1]
        trained = logits.log_softmax(-1)[range(8), list(choice.token_ids)]
        sampled = [row[token_id].logprob for row, token_id in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert sampled == pytest.approx(trained.tolist(), abs=TOLERANCE)
        seen.append(sampled[0])
        optimizer.zero_grad()
        (-trained.sum()).backward()
        optimizer.step()
    assert len({round(each, 3) for each in seen}) == 4
    assert llm.llm_engine.list_loras() == {1}


def test_server_tells_the_trainer_what_it_asks(client: Any) -> None:
    info = client.get_server_info()
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["weight_transfer_config"]["backend"] == "nccl"
    assert client.get_world_size() == 1
    client.reset_prefix_cache()
