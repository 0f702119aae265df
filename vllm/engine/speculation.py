"""The configuration of drafts, beside that of their target."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config.speculative import EAGLE_OPTIONS, SpeculativeConfig, num_named_layers
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SchedulerConfig

logger = init_logger(__name__)


def with_model_and_schedule(
    config: SpeculativeConfig | None, args: Any, target: ModelConfig, schedule: SchedulerConfig
) -> tuple[SpeculativeConfig | None, SchedulerConfig]:
    """With a draft model's configuration, which follows the target's EngineArgs; and the schedule without steps that
    begin before the last one's tokens are known, which drafts follow.

    Raises:
        ValueError: there is no such draft model, or its vocabulary is another.
    """
    if config is None:
        return None, schedule
    if schedule.async_scheduling:
        logger.info("async_scheduling is off, as speculative_config is set")
        schedule = replace(schedule, async_scheduling=False)
    if config.method == "mtp":
        return _with_own_layers(config, target), schedule
    has_model = config.method in ("draft_model", "eagle", "eagle3")
    return _with_draft_model(config, args, target) if has_model else config, schedule


def _with_own_layers(config: SpeculativeConfig, target: ModelConfig) -> SpeculativeConfig:
    """By default as many tokens as there are layers."""
    if config.model not in (None, target.model, "mtp", "[mtp]"):
        raise ValueError(
            f"speculative_config: model={config.model!r} is not the target: with method='mtp' the target's own layers "
            "draft; leave it out"
        )
    num_tokens = config.num_speculative_tokens or num_named_layers(target.hf_config.raw)
    return replace(config, num_speculative_tokens=num_tokens)


def _with_draft_model(config: SpeculativeConfig, args: Any, target: ModelConfig) -> SpeculativeConfig:
    """The draft has its own context and weights, and the target's dtype."""
    is_head = config.method != "draft_model"
    # A head's layer is a Llama's, whatever it is called; what it has beside is read with its weights.
    overrides = {"architectures": ["LlamaForCausalLM"]} | dict.fromkeys(EAGLE_OPTIONS) if is_head else None
    draft = type(args)(
        model=config.model or "",
        revision=config.revision,
        quantization=config.quantization,
        skip_tokenizer_init=True,
        dtype=target.dtype,
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        distributed_executor_backend=args.distributed_executor_backend,
        trust_remote_code=args.trust_remote_code,
        load_format=args.load_format,
        hf_overrides=overrides,
    ).create_model_config()
    checks = [
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("eos_token_id", sorted(draft.hf_config.eos_token_ids), sorted(target.hf_config.eos_token_ids)),
        ("bos_token_id", draft.hf_config.raw.get("bos_token_id"), target.hf_config.raw.get("bos_token_id")),
    ]
    for name, own, wanted in checks[:1] if is_head else checks:
        if own != wanted:
            raise ValueError(
                f"speculative_config: model={config.model!r} has another vocabulary than the target: its {name} is "
                f"{own}, and the target's is {wanted}; take a draft of the same family, or method='ngram' or 'suffix'"
            )
    return replace(config, draft_model_config=draft)
