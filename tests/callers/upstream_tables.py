"""What runs of upstream's tests, over which model, and what does not run and why."""

from __future__ import annotations

FILES = (
    "test_sampling_params.py",
    "test_outputs.py",
    "test_logprobs.py",
    "test_pooling_params.py",
    "v1/sample/test_sampling_params_e2e.py",
    "v1/sample/test_logprobs.py",
    "v1/sample/test_logprobs_e2e.py",
    "samplers",
    "detokenizer",
    "entrypoints/llm",
    "v1/logits_processors",
    "entrypoints/openai/completion",
    "entrypoints/openai/chat_completion",
    "entrypoints/openai/test_*.py",
    "entrypoints/serve/tokenize",
    "tokenizers_",
)
"""What runs when no file is named, in this order: files, folders and patterns."""

MODELS = (
    "facebook/opt-125m",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen1.5-0.5B-Chat",
    "qwen/Qwen1.5-0.5B-Chat",
    "openai-community/gpt2",
    "distilbert/distilgpt2",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "unsloth/llama-3.2-1b-Instruct",
    "hmellor/tiny-random-LlamaForCausalLM",
    "hmellor/tiny-random-Gemma2ForCausalLM",
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "EleutherAI/pythia-70m",
    "google/gemma-3-1b-it",
    "meta-llama/llama-2-7b-hf",
    "Qwen/Qwen3-4B",
    "RedHatAI/Llama-3.2-1B-FP8",
    "bigcode/tiny_starcoder_py",
    "EleutherAI/gpt-j-6b",
    "bigscience/bloom-560m",
    "tiiuae/falcon-7b",
    "codellama/CodeLlama-7b-hf",
)
"""Language models whose place the tiny one takes."""

WORDS = "a certain model's words"
TEMPLATE = "a certain model's template"
MULTIMODAL = "images, audio or video"
DIFFUSION = "diffusion models"
LORA = "LoRA"
EMBEDS = "prompt embeddings"
GUIDED = "structured outputs"
TOOLS = "tool calls"
POOLING = "pooling models"
SPECULATION = "speculative decoding"
SAMPLER = "upstream's sampler inside"
INTERNAL = "upstream's classes behind its server: here they are functions"

SKIPS = (
    ("diffusion", DIFFUSION),
    ("lora", LORA),
    ("mm_", MULTIMODAL),
    ("multimodal", MULTIMODAL),
    ("_vlm", MULTIMODAL),
    ("image", MULTIMODAL),
    ("audio", MULTIMODAL),
    ("video", MULTIMODAL),
    ("prompt_embeds", EMBEDS),
    ("watermark", "watermarking"),
    ("harmony", "gpt-oss's format"),
    ("gpt_oss", "gpt-oss's format"),
    ("mistralai/", "Mistral's own tokenizer"),
    ("test_mistral", "Mistral's own tokenizer"),
    ("TestCorrectDecodedToken", INTERNAL),
    ("tokenizers_/test_mistral.py", "Mistral's own tokenizer"),
    ("deepseek", TEMPLATE),
    ("test_struct_output_generate.py", GUIDED),
    ("test_structured_outputs", GUIDED),
    ("tensorizer", "the tensorizer loader"),
    ("detokenizer/test_stop_reason.py", WORDS),
    ("detokenizer/test_stop_strings.py", WORDS),
    ("test_no_bad_words.py", WORDS),
    ("offline_mode", "the hub's cache"),
    ("test_chat_extra_kwargs", TEMPLATE),
    ("test_llm_chat_tokenization_no_double_bos", TEMPLATE),
    ("test_sampling_params_e2e.py::test_stop ", WORDS),
    ("test_logprobs_e2e.py::test_prompt_logprobs_e2e", "a data set"),
    ("test_accuracy.py", "a certain model's accuracy"),
    ("test_gpu_utilization.py", "GPUs"),
    ("function_calling", TOOLS),
    ("speculat", SPECULATION),
    ("eagle", SPECULATION),
    ("dynamic_tokenizer", "a tokenizer from the hub"),
)
"""What is not run: a part of the test's id, at whose end stands a space, and why."""

DROPPED_FLAGS = {
    "--enable-lora": 0,
    "--lora-modules": 1,
    "--max-lora-rank": 1,
    "--max-cpu-loras": 1,
    "--limit-mm-per-prompt": 1,
    "--enable-auto-tool-choice": 0,
    "--tool-call-parser": 1,
    "--reasoning-parser": 1,
    "--enable-prompt-embeds": 0,
    "--enable-watermarking": 0,
}
"""Flags of servers that only tests of features we do not have need, and how many values follow each."""

ABSENT = {
    "lm_eval": "a data set",
    "vllm._aiter_ops": "AMD's GPUs",
    "vllm.assets": MULTIMODAL,
    "vllm.config.diffusion": DIFFUSION,
    "vllm.utils.diffusion": DIFFUSION,
    "vllm.config.pooler:SequencePoolingType": POOLING,
    "vllm.config.pooler:TokenPoolingType": POOLING,
    "vllm.entrypoints.generate": INTERNAL,
    "vllm.entrypoints.launchers": INTERNAL,
    "vllm.entrypoints.openai.chat_completion": INTERNAL,
    "vllm.entrypoints.openai.completion": INTERNAL,
    "vllm.entrypoints.openai.models": INTERNAL,
    "vllm.entrypoints.openai.parser": "gpt-oss's format",
    "vllm.entrypoints.openai.responses": "the Responses API",
    "vllm.entrypoints.pooling": POOLING,
    "vllm.entrypoints.scale_out": INTERNAL,
    "vllm.entrypoints.serve": INTERNAL,
    "vllm.entrypoints.speech_to_text": MULTIMODAL,
    "vllm.exceptions:QueueOverflowError": INTERNAL,
    "vllm.lora": LORA,
    "vllm.model_executor.model_loader.tensorizer": "the tensorizer loader",
    "vllm.model_executor.model_loader.weight_utils": "a download",
    "vllm.models": TEMPLATE,
    "vllm.multimodal": MULTIMODAL,
    "vllm.multimodal.inputs:PlaceholderRange": MULTIMODAL,
    "vllm.multimodal.utils:encode_image_url": MULTIMODAL,
    "vllm.outputs:WeightVersionSpan": "versions of weights",
    "vllm.parser": TOOLS,
    "vllm.pooling_params:LateChunkingParams": POOLING,
    "vllm.pooling_params:LateInteractionParams": POOLING,
    "vllm.reasoning.abs_reasoning_parsers": TOOLS,
    "vllm.renderers": INTERNAL,
    "vllm.renderers.chat_utils:BaseMultiModalItemTracker": MULTIMODAL,
    "vllm.renderers.hf:HfRenderer": INTERNAL,
    "vllm.tokenizers.mistral": "Mistral's own tokenizer",
    "vllm.tokenizers.deepseek_v4": TEMPLATE,
    "vllm.tokenizers.deepseek_v41": TEMPLATE,
    "vllm.tokenizers.deepseek_v41_encoding": TEMPLATE,
    "vllm.tokenizers.deepseek_v4_encoding": TEMPLATE,
    "vllm.utils.mistral": "Mistral's own tokenizer",
    "vllm.v1.metrics.stats": SPECULATION,
    "vllm.v1.outputs:SamplingMaskLists": "masks of sampling",
    "vllm.v1.sample.metadata": SAMPLER,
    "vllm.v1.sample.logits_processor.builtin": SAMPLER,
    "vllm.v1.sample.logits_processor.state": SAMPLER,
    "vllm.v1.sample.thinking_budget_state": "budgets of reasoning",
    "vllm.v1.structured_output": GUIDED,
}
"""Modules of upstream's without a counterpart here: a test that uses one of their names is skipped for the reason."""
