"""Trainers' programs import of upstream's and call these: verl 0.9, OpenRLHF 0.11, SkyRL 0.3, AReaL 1.0 and axolotl
0.19 by what their code says, without them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import AsyncEngineArgs, AsyncLLM, LLMEngine, RequestOutput, SamplingParams
from vllm.entrypoints.cli import serve
from vllm.inputs import TokensPrompt
from vllm.upstream.refusals import Unserved
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Module: the names that are imported of it, of what their rollouts use.
IMPORTED = {
    "vllm": "LLM AsyncEngineArgs EngineArgs RequestOutput SamplingParams TokensPrompt envs",
    "vllm.config": "DeviceConfig ModelConfig VllmConfig WeightTransferConfig set_current_vllm_config",
    "vllm.config.weight_transfer": "WeightTransferConfig",
    "vllm.distributed.device_communicators.pynccl": "PyNcclCommunicator",
    "vllm.distributed.utils": "StatelessProcessGroup",
    "vllm.distributed.weight_transfer": "WeightTransferEngineFactory",
    "vllm.distributed.weight_transfer.base": "WeightTransferEngine WeightTransferInitInfo WeightTransferUpdateInfo",
    "vllm.distributed.weight_transfer.ipc_engine": "IPCWeightTransferEngine",
    "vllm.distributed.weight_transfer.nccl_common": "trainer_init",
    "vllm.distributed.weight_transfer.nccl_engine": "NCCLTrainerSendWeightsArgs NCCLWeightTransferEngine",
    "vllm.distributed.weight_transfer.packed_tensor": "packed_nccl_broadcast_producer",
    "vllm.engine.arg_utils": "AsyncEngineArgs",
    "vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "vllm.entrypoints.cli.serve": "cmd_init run_headless",
    "vllm.entrypoints.openai.api_server": "build_app init_app_state create_server_socket setup_server run_server",
    "vllm.entrypoints.openai.cli_args": "FrontendArgs make_arg_parser validate_parsed_serve_args",
    "vllm.entrypoints.openai.completion.api_router": "create_completion",
    "vllm.entrypoints.openai.engine.protocol": "ErrorResponse OpenAIBaseModel",
    "vllm.entrypoints.openai.parser.harmony_utils": "get_encoding",
    "vllm.entrypoints.openai.utils": "validate_json_request",
    "vllm.entrypoints.utils": "cli_env_setup load_aware_call with_cancellation",
    "vllm.lora.layers.base": "BaseLayerWithLoRA",
    "vllm.lora.lora_model": "LoRAModel",
    "vllm.lora.peft_helper": "PEFTHelper",
    "vllm.lora.request": "LoRARequest",
    "vllm.lora.utils": "get_adapter_absolute_path",
    "vllm.lora.worker_manager": "LRUCacheWorkerLoRAManager",
    "vllm.model_executor.model_loader.checkpoint_weight_patch": "CheckpointWeightPatch",
    "vllm.model_executor.model_loader.reload": "initialize_layerwise_reload finalize_layerwise_reload",
    "vllm.model_executor.model_loader.utils": "process_weights_after_loading",
    "vllm.platforms": "current_platform",
    "vllm.platforms.cpu": "CpuPlatform",
    "vllm.sampling_params": "SamplingParams StructuredOutputsParams",
    "vllm.transformers_utils.config": "get_hf_text_config",
    "vllm.transformers_utils.model_arch_config_convertor": "ModelArchConfigConvertorBase",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.utils": "random_uuid",
    "vllm.utils.network_utils": "get_ip get_open_port",
    "vllm.utils.system_utils": "set_ulimit",
    "vllm.v1.engine": "FinishReason",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.metrics.ray_wrappers": "RayPrometheusStatLogger",
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
}


@pytest.mark.parametrize("module", IMPORTED)
def test_names_are_there_or_say_why_not(module: str) -> None:
    for name in IMPORTED[module].split():
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type) and issubclass(found, Unserved):
            with pytest.raises(NotImplementedError, match=rf"^{name}: .{{20}}"):
                found()


class Extension:
    """As verl's: it looks at the configuration when it is made, and changes and fills the model by its own methods."""

    def __new__(cls, **kwargs: Any) -> Extension:
        assert kwargs["vllm_config"].model_config.max_model_len == 512
        return super().__new__(cls)

    def ban(self: Any, token_ids: list[int]) -> None:
        original = self.model_runner.model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = original(*args, **kwargs)
            logits[..., token_ids] = float("-inf")
            return logits

        self.model_runner.model.compute_logits = compute_logits

    def take(self: Any, path: str) -> list[Any]:
        assert self.model_runner.vllm_config is self.vllm_config and self.local_rank == 0
        assert self.device.type == "cpu" and getattr(self.model_runner, "drafter", None) is None
        self.model_runner.model.load_weights(iter(load_file(path).items()))
        return [self.model_config.max_model_len, self.parallel_config.tensor_parallel_size]


FLAGS = {
    "dtype": "float32",
    "load_format": "dummy",
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "test_trainers_calls.Extension",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "logprobs_mode": "processed_logprobs",
    "gpu_memory_utilization": 0.5,
    "tensor_parallel_size": 1,
    "seed": 0,
    "override_generation_config": json.dumps({"temperature": 1.0, "top_p": 1}),
    "scheduling_policy": "fcfs",
    "compilation_config": json.dumps({"cudagraph_mode": "FULL_AND_PIECEWISE"}),
}
SWITCHES = ["enable_chunked_prefill", "enable_prefix_caching", "enable_sleep_mode", "disable_log_stats"]
PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, logprobs=0, temperature=0, ignore_eos=True)


def engine_of_flags(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncLLM:
    """By the command line's parser, as verl starts it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # of the engine's process
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    parser = FlexibleArgumentParser(description="a trainer's")
    commands = {}
    parsers = parser.add_subparsers(required=False, dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(parsers).set_defaults(dispatch_function=command.cmd)
        commands[command.name] = command
    args = parser.parse_args(["serve", str(folder), *flags, *(f"--{name}" for name in SWITCHES)])
    args.model = args.model_tag
    commands[args.subparser].validate(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    config.parallel_config.data_parallel_master_port = 1
    offered = inspect.signature(AsyncLLM.from_vllm_config).parameters
    asked = {name: getattr(engine_args, name) for name in ("enable_log_requests", "disable_log_stats")}
    return AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        **{name: value for name, value in asked.items() if name in offered},
    )


async def last(engine: AsyncLLM, request_id: str, params: SamplingParams) -> RequestOutput:
    outputs = [
        output
        async for output in engine.generate(
            prompt=TokensPrompt(prompt_token_ids=PROMPT), sampling_params=params, request_id=request_id, priority=0
        )
    ]
    return outputs[-1]


def test_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, max_position_embeddings=1024)
    weights = str(folder / "model.safetensors")
    reference: LLMEngine = make_tiny_llm(folder, logprobs_mode="processed_logprobs").llm_engine

    def expected(logit_bias: dict[int, float] | None = None) -> list[int]:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logit_bias=logit_bias)
        reference.add_request("a", {"prompt_token_ids": PROMPT}, params)
        outputs: list[Any] = []
        while reference.has_unfinished_requests():
            outputs += reference.step()
        return list(outputs[-1].outputs[0].token_ids)

    plain = expected()
    banned = plain[0]

    async def run() -> None:
        engine = engine_of_flags(folder, monkeypatch)
        try:
            await engine.reset_mm_cache()
            assert await engine.collective_rpc(method="take", args=(weights,), kwargs=None) == [[512, 1]]
            assert (await last(engine, "a", PARAMS)).outputs[0].token_ids == plain
            await engine.collective_rpc(method="ban", timeout=None, kwargs={"token_ids": [banned]})
            assert (await last(engine, "b", PARAMS)).outputs[0].token_ids == expected({banned: -1000.0})

            long = SamplingParams(max_tokens=480, temperature=0, ignore_eos=True)
            running = asyncio.create_task(last(engine, "c", long))
            while not engine.output_processor.request_states:
                await asyncio.sleep(0.01)
            assert list(engine.output_processor.request_states) == ["c"]
            await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
            choice = (await running).outputs[0]
            assert choice.finish_reason == "abort" and len(choice.token_ids) < 480
            await engine.wait_for_requests_to_drain()
            await engine.resume_generation()

            kept = asyncio.create_task(last(engine, "d", long))
            while not engine.output_processor.get_num_unfinished_requests():
                await asyncio.sleep(0.01)
            with pytest.raises(TimeoutError, match="1 requests were not finished after 0 s"):
                await engine.wait_for_requests_to_drain(0)
            await engine.pause_generation(mode="keep")
            await engine.reset_prefix_cache()
            await engine.resume_generation()
            assert len((await kept).outputs[0].token_ids) == 480

            await engine.sleep(level=2)
            await engine.wake_up(tags=["weights"])
            await engine.collective_rpc(method="take", args=(weights,))
            await engine.wake_up(tags=["kv_cache"])
            await engine.reset_prefix_cache(reset_connector=True)
            await engine.reset_encoder_cache()
            assert (await last(engine, "e", PARAMS)).outputs[0].token_ids == plain
        finally:
            engine.shutdown()

    asyncio.run(run())
