"""GRPO by trl, with a server that samples in another process, on machines without a GPU.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --dtype float32 --logprobs-mode processed_logprobs --max-logprobs -1 \
        --weight-transfer-config '{"backend": "nccl"}'
    python examples/grpo_over_a_server.py MODEL

The weights go from the trainer to the server's workers over gloo. trl's client would let them, but for its check that
the trainer has a CUDA device: `HostClient` is trl's client without that check.

With --adapter a LoRA adapter is trained, of which the server loads each version alone; it also needs --enable-lora
--max-lora-rank 16, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import trl
from datasets import Dataset
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

PROMPTS = ["the stop", "Hello there", "Say: the", "One, two,"]


class HostClient(VLLMClient):
    """Sends weights from the host's memory."""

    def init_communicator(self, device: Any = 0) -> None:
        """As trl's, whatever the trainer's device: "cuda" without an index touches none."""
        super().init_communicator(device="cuda")


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A toy task: the share of even ids in each answer."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def make_trainer(model: str, url: str, folder: str, peft_config: Any = None, **options: Any) -> trl.GRPOTrainer:
    """A trainer of the toy task; `options` are GRPOConfig's."""
    vllm_generation.VLLMClient = HostClient
    usual = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 8,
        "max_steps": 30,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 1,
    }
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=even_ids,
        args=trl.GRPOConfig(output_dir=folder, **{**usual, **options}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        peft_config=peft_config,
    )


def send_adapter_alone(trainer: trl.GRPOTrainer, folder: str, name: str = "policy") -> None:
    """Let each step's adapter reach the server as files in `folder`, which it can read, and answer under `name`.
    Otherwise trl merges the adapter into the weights, and sends all of them."""
    client = trainer.vllm_generation.vllm_client

    def sync_weights() -> None:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        client.session.post(f"{client.base_url}/v1/load_lora_adapter", json=body).raise_for_status()
        client.model = name

    trainer.vllm_generation.sync_weights = sync_weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder that the server serves")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--adapter", action="store_true", help="train a LoRA adapter, and send it alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.adapter:
            from peft import LoraConfig

            trainer = make_trainer(args.model, args.url, folder, LoraConfig(r=16, target_modules="all-linear"))
            send_adapter_alone(trainer, f"{folder}/adapter")
        else:
            trainer = make_trainer(args.model, args.url, folder)
        trainer.train()
