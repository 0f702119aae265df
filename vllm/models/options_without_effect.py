"""Options of config.json that change nothing a family's model computes: they name things, concern training or
generation, or are read by another part of the engine."""

from __future__ import annotations

# Names are exact: neighbours of a harmless one can change numbers, as norm_std, output_multiplier and token_dropout do.
_EVERYWHERE = frozenset(
    (
        # The file, the classes that read it, and precision, which is the engine's.
        "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
        "_experts_implementation _flash_attn_2_enabled _from_model_config _model_name_or_path _name_or_path "
        "_num_labels _text_part_of _whole_config num_image_tokens architectures attn_implementation auto_map dtype "
        "finetuning_task language model_type prefix pruned_heads task_specific_params tf_legacy_loss torch_dtype "
        "torchscript transformers.js_config transformers_version trust_remote_code unsloth_fixed unsloth_traced "
        "unsloth_version use_bfloat16 use_cache use_flash_attention use_flash_attention_2 use_flash_attn "
        # Tokens and the tokenizer.
        "audio_token_id begin_suppress_tokens bos_token bos_token_id cls_token cls_token_id decoder_start_token_id "
        "eos_token eos_token_id eot_token_id forced_bos_token_id forced_eos_token_id image_token_id mask_token "
        "mask_token_id max_model_len max_sequence_length model_max_length n_ctx pad_token pad_token_id sep_token "
        "sep_token_id suppress_tokens tokenizer_class tokenizer_model_max_length tokenizer_name unk_token unk_token_id "
        "video_token_id vision_end_token_id vision_start_token_id vision_token_id "
        # Generation, whose defaults are generation_config.json's.
        "bad_words_ids cache_implementation diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
        "exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups "
        "num_beams num_return_sequences output_attentions output_hidden_states output_past output_router_logits "
        "output_scores remove_invalid_values repetition_penalty return_dict return_dict_in_generate top_k top_p "
        "typical_p "
        # Encoders with a decoder beside them; there is none here.
        "chunk_size_feed_forward cross_attention_hidden_size is_decoder is_encoder_decoder tie_encoder_decoder "
        # Training: what is dropped, how weights begin, what is added to the loss.
        "activation_dropout attention_dropout attention_dropout_prob attention_probs_dropout_prob attn_dropout "
        "attn_pdrop aux_loss_alpha aux_loss_coef classifier_dropout classifier_dropout_prob classifier_pdrop dropout "
        "dropout_rate emb_pdrop embd_pdrop embed_dropout embedding_dropout ffn_dropout ffn_pdrop "
        "gradient_checkpointing head_dropout hidden_dropout hidden_dropout_prob init_std initializer_factor "
        "initializer_range initializer_std layerdrop mlp_dropout moe_aux_loss_coeff moe_z_loss_coeff "
        "mtp_loss_scaling_factor mtp_loss_weight neftune_noise_alpha pooler_dropout pretraining_tp resid_dropout "
        "resid_pdrop residual_dropout router_aux_loss_coef router_z_loss_coef use_gradient_checkpointing z_loss_coef "
        "z_loss_coefficient z_loss_weight "
        # Other parts of the engine read these: quantization, pooling, scores of pairs.
        "classifier_from_token compression_config id2label is_causal is_matryoshka is_original_qwen3_reranker label2id "
        "matryoshka_dimensions method num_labels pooling problem_type quantization_config "
        "sbert_ce_default_activation_function sentence_transformers temperature use_bidirectional_attention "
    ).split()
)
IN_FAMILIES = {
    # The file, the classes that read it, and precision, which is the engine's.
    "attn_impl": "mpt",
    "flash_attn": "phi",
    "flash_rotary": "phi",
    "is_composition": "mistral",
    "is_llama_config": "llama",
    "use_flash_rotary": "phi",
    # A whole model's, in the text decoder's options of files of SmolVLM; `use_resampler` would ask for the former.
    "perceiver_config": "llama",
    "pixel_shuffle_factor": "llama",
    # Sums in float32, which every kernel here makes.
    "attention_softmax_in_fp32": "bloom chatglm gpt2 starcoder2",
    "fp32_residual_connection": "chatglm",
    "reorder_and_upcast_attn": "gpt2 nomic_bert",
    "residual_in_fp32": "mamba nemotron",
    "scale_attention_softmax_in_fp32": "gpt2 starcoder2",
    # Tokens and the tokenizer.
    "boa_token_id": "gemma gemma3n gemma4",
    "boi_token_id": "gemma gemma3n gemma4",
    "eoa_token_id": "gemma gemma3n gemma4",
    "eod_token_id": "hunyuan llama",
    "eoi_token_id": "gemma gemma3n gemma4",
    "gmask_token_id": "chatglm",
    "org_vocab_size": "hunyuan llama",
    "predict_special_tokens": "gpt2",
    # Training: what is dropped, how weights begin, what is added to the loss.
    "bias_dropout_fusion": "bloom falcon",
    "fused_dropout_add_ln": "nomic_bert",
    "init_config": "mpt",
    "init_device": "mpt",
    "init_method": "granite",
    "initializer_cutoff_factor": "modernbert",
    "moe_aux_loss_lambda": "ernie",
    "moe_dropout_prob": "ernie",
    "moe_loss_weight": "dbrx",
    "moe_orthogonal_loss_lambda": "ernie",
    "moe_z_loss_lambda": "ernie",
    "output_dropout": "bailing",
    "qa_dropout": "distilbert",
    "seq_classif_dropout": "distilbert",
    # Heads that other classes of transformers have.
    "summary_activation": "gpt2 nomic_bert",
    "summary_first_dropout": "gpt2 nomic_bert",
    "summary_proj_to_labels": "gpt2 nomic_bert",
    "summary_type": "gpt2 nomic_bert",
    "summary_use_proj": "gpt2 nomic_bert",
}
"""By option the families that may have it: modules of models/dense, mixtures, hybrids and encoders."""


def has_no_effect(option: str, family: str) -> bool:
    """Whether the option changes nothing that a model of the family computes."""
    return option in _EVERYWHERE or family in IN_FAMILIES.get(option, "").split()
