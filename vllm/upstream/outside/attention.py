"""Upstream's attention layer: ours, which takes the step's cache from its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.options import AttentionOptions
from vllm.attention.packed import PackedSequences
from vllm.layers import attention as ours
from vllm.ops.packed_attention import packed_attention
from vllm.upstream.outside.refused import refuse_quantization
from vllm.upstream.outside.step import Step


class AttentionType:
    """The tokens that a layer's queries see, as upstream names them."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class Attention(ours.Attention):
    """Causal attention over the paged cache.

    Args:
        num_heads, num_kv_heads: this rank's.
        head_size: of a query, key and value.
        scale: factor on the scores.
        alibi_slopes: of this rank's query heads.
        cache_config: its `sliding_window` is that of layers without `per_layer_sliding_window`.
        logits_soft_cap: bound of the scores; None or 0: none.
        per_layer_sliding_window: tokens that a query sees, itself included; None: the configuration's.
        prefix: the layer's name in its model.
        kv_sharing_target_layer_name: the name of an earlier layer whose keys and values this one reads.
        sinks: [Hq] of this rank's query heads, one more logit in the softmax's denominator.

    Raises:
        ValueError: what cannot be done here, with what to do instead.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        use_mla: bool = False,
        use_sparse: bool = False,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: Any = None,
        head_size_v: int | None = None,
        sinks: nn.Parameter | Tensor | None = None,
        **others: Any,
    ) -> None:
        refuse_quantization(quant_config, prefix)
        self._refuse(prefix, use_mla or use_sparse, attn_type, attn_backend, head_size_v not in (None, head_size))
        if unknown := [name for name, value in others.items() if value is not None and value is not False]:
            raise ValueError(f"{prefix}: Attention cannot do {', '.join(unknown)}: leave it out")
        window = per_layer_sliding_window
        if window is None:
            window = getattr(cache_config, "sliding_window", None)
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        kept = sinks if kv_sharing_target_layer_name is None or sinks is None else None
        options = AttentionOptions(scale, window, logits_soft_cap or None, slopes)
        super().__init__(head_size, options=options, num_kv_heads=num_kv_heads or num_heads)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self._kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.layer_name, self.attn_type = window, prefix, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # In a tuple: the parameter is the model's, where it made one.
        self._sinks = (kept,)
        self.step, self.index = Step(), 0  # set by the model

    @staticmethod
    def _refuse(prefix: str, is_latent: bool, attn_type: str, backend: Any, is_uneven: bool) -> None:
        for asked, what, instead in (
            (is_latent, "latent (use_mla) or sparse attention", "describe the model with a LatentAttentionSpec"),
            (backend is not None, "attn_backend", "choose one of the engine's by attention_backend"),
            (is_uneven, "values of another size than keys (head_size_v)", "fill the narrower ones up with zeros"),
            (
                attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY),
                f"attn_type={attn_type!r}",
                "an encoder beside a decoder is not served",
            ),
        ):
            if asked:
                raise ValueError(f"{prefix}: Attention cannot do {what}: {instead}")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **_: Any) -> Tensor:  # type: ignore[override]
        """Attend: [T, Hq * D].

        Args:
            query, key, value: [T, Hq * D], [T, Hkv * D] and [T, Hkv * D], or with heads apart.
            others: a cache and metadata, which former models hand on, or a shape; not used.
        """
        attn = self.step.attn
        assert attn is not None, "the layer is called outside of its model's step"
        q = query.reshape(-1, self.num_heads, self.head_dim)
        k = v = None
        if self.kv_sharing_target is None:
            k, v = (each.reshape(-1, self._kv_heads, self.head_dim) for each in (key, value))
        if isinstance(attn, PackedSequences):
            out = self._within(q, k, v, attn)
        elif self.attn_type == AttentionType.ENCODER_ONLY:
            raise ValueError(f"{self.layer_name}: tokens that see those after them need a model with a pooler")
        else:
            out = super().forward(q, k, v, self.step.kv_caches[self.index], attn)
        return out if query.dim() == 2 else out.view(*query.shape[:-1], -1) if query.dim() != 3 else out

    def _within(self, q: Tensor, k: Tensor | None, v: Tensor | None, sequences: PackedSequences) -> Tensor:
        """[T, Hq * D] of attention within whole sequences, to tokens before, or to all."""
        options, is_causal = self.options, self.attn_type == AttentionType.DECODER
        if k is None or v is None or options.sinks is not None or (is_causal and options.alibi_slopes is not None):
            raise ValueError(f"{self.layer_name}: sinks, ALiBi and shared keys are not served in models with a pooler")
        reach = len(q) if options.window is None else options.window - 1
        window = (reach, 0) if is_causal else None if options.window is None else (reach, reach)
        others = window, options.softcap, options.alibi_slopes, sequences.seqused_k
        assert options.scale is not None
        return packed_attention(q, k, v, sequences.cu_seqlens, options.scale, *others).flatten(1)

    def finish_loading(self) -> None:
        """Take what was loaded into sinks."""
        (sinks,) = self._sinks
        if sinks is not None:
            self.options = replace(self.options, sinks=sinks.detach().flatten().float())


class EncoderOnlyAttention(Attention):
    """Attention of each token to all of its text, for models with a pooler."""

    def __init__(self, *args: Any, attn_type: str | None = None, **options: Any) -> None:
        super().__init__(*args, **{**options, "attn_type": AttentionType.ENCODER_ONLY})


class MultiHeadAttention(nn.Module):
    """Attention among the tokens of a picture."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """
        Raises:
            ValueError: always.
        """
        super().__init__()
        raise ValueError("MultiHeadAttention: encoders of pictures from outside the tree are not served")
