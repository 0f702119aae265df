"""trl: GRPO of a tiny model that reads pictures, with the engine in the trainer's process."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import drawn
from tiny_vision import ASSISTANT, make_chat_model

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions")

TOLERANCE = 1e-4
"""The tolerance of a token's logprob, in nats."""


@pytest.mark.usefixtures("environment")
def test_grpo_trains_on_pictures(tmp_path: Path) -> None:
    from datasets import Dataset

    folder = tmp_path / "model"
    make_chat_model("llava", folder, ASSISTANT)
    rows = [
        {"prompt": [{"role": "user", "content": f"what is {seed}"}], "image": drawn(40, 30, seed)} for seed in range(4)
    ]
    options = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 200,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    trainer = trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completion_ids, **_: [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids],
        args=trl.GRPOConfig(output_dir=str(tmp_path / "out"), **options),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    assert len(steps) == 2
    for row in steps:  # the engine sampled after the pictures with the weights that the step trains
        assert row["sampling/sampling_logp_difference/max"] < TOLERANCE
    assert any(row["grad_norm"] > 0 for row in steps)
