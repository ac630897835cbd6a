"""Sizes of the tiny models: what every family takes, what a tower takes, and what single families need.

The names are those of the configuration fields of Transformers; a field that a configuration lacks is left
out. Numbers differ wherever they could be taken for one another: 4 query heads, 2 key/value heads, d_head 16,
d_model 64, d_mlp 96, 4 experts of width 40, shared experts of width 56.
"""

LAYERS = 3

SIZES = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "emb_dim", "embedding_dim"], 64),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], LAYERS),
    "num_decoder_layers": LAYERS,
    "num_encoder_layers": 1,
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"], 4),
    "num_decoder_attention_heads": 4,
    **dict.fromkeys(["encoder_layers"], 1),
    **dict.fromkeys(["encoder_attention_heads", "num_encoder_attention_heads"], 2),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size"], 96),
    **dict.fromkeys(["dff", "dim_ff", "d_inner", "intermediate_size_mlp", "dense_intermediate_size"], 96),
    "feed_forward_size": 96,
    "router_hidden_size": 24,
    **dict.fromkeys(["prefix_dense_intermediate_size"], 96),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx"], 128),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["moe_intermediate_size", "expert_ffn_hidden_size"], 40),
    **dict.fromkeys(["shared_expert_intermediate_size", "shared_experts_intermediate_size"], 56),
    **dict.fromkeys(["shared_intermediate_size", "moe_shared_expert_intermediate_size"], 56),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts"], 1),
    **dict.fromkeys(["n_group", "num_expert_group", "topk_group"], 1),
    **dict.fromkeys(["num_key_value_heads", "swa_num_key_value_heads"], 2),
    **dict.fromkeys(["swa_num_attention_heads"], 4),
    **dict.fromkeys(["head_dim", "swa_head_dim", "kv_channels", "d_head", "dim_head", "attention_head_size"], 16),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"], 1),
    # latent attention: queries and keys of 12 + 8, values of 16
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # indexers that choose which keys are looked at
    **dict.fromkeys(["index_n_heads", "indexer_n_heads"], 2),
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "index_head_dim": 16,
    "index_topk": 6,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # state-space and linear-attention mixers
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size"], 8),
    **dict.fromkeys(["num_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"], 4),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim", "mamba_headdim"], 32),
    **dict.fromkeys(["time_step_rank", "mamba_dt_rank"], 6),
    **dict.fromkeys(["n_groups", "mamba_n_groups"], 2),
    **dict.fromkeys(["chunk_size", "mamba_chunk_size"], 8),
    "mamba_d_ssm": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "lru_width": 72,
    # words and positions
    **dict.fromkeys(["vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"], 200),
    "hidden_size_per_layer_input": 10,
    "unpadded_vocab_size": 200,
    "embedding_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rotary_dim": 8,
    **dict.fromkeys(["sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention"], 8),
    **dict.fromkeys(["attention_window_size", "window_size"], 8),
    # multipliers away from 1, so that a forgotten one shows
    "residual_multiplier": 0.37,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "logit_scale": 0.6,
    "routed_scaling_factor": 1.3,
    "route_scale": 1.3,
    "embedding_scale": 3.0,
    "moe_routed_scaling_factor": 1.3,
    "query_pre_attn_scalar": 20,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.8,
    "lm_head_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.75,
    "full_attn_alpha_factor": 0.8,
    "full_attn_beta_factor": 0.7,
    "linear_attn_alpha_factor": 0.9,
    "linear_attn_beta_factor": 0.6,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.75,
    "scale_emb": 3,
    "dim_model_base": 32,
    # thresholds low enough to be reached
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    "qk_l2_clip_threshold": 3.0,
    "rel_l2_clip_threshold": 1.5,
    "mlp_gate_softcap": 2.0,
    "mlp_up_softcap": 3.0,
    "swiglu_limit": 1.5,
    "rescale_every": 2,
}

LAYER_FIELDS = {name for name, value in SIZES.items() if "layer" in name and value == LAYERS}

# Caps on logits, where the family has one: low enough to bend what they cap.
CAPS = dict.fromkeys(
    ["attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"], 8.0
)

# Towers for images and sound are built as small as they go: a text prompt does not reach them.
TOWER = {
    **dict.fromkeys(["hidden_size", "d_model", "embed_dim"], 32),
    **dict.fromkeys(["num_hidden_layers", "depth", "encoder_layers", "num_layers"], 1),
    **dict.fromkeys(["num_attention_heads", "num_heads", "encoder_attention_heads"], 2),
    **dict.fromkeys(["intermediate_size", "encoder_ffn_dim"], 40),
    "vocab_size": 200,
}

SLIDING_FIRST = ["sliding_attention", "full_attention", "sliding_attention"]
CONVOLUTION_FIRST = ["conv", "full_attention", "conv"]
MIXER_FIRST = ["linear_attention", "full_attention", "linear_attention"]
SHARED_TWICE = ["linear_attention", "hybrid", "hybrid"]
DENSE_FIRST = ["dense", "sparse", "sparse"]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

WIDE_GLOBAL_HEADS = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 24,
}

LATENT_WINDOWS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 28,
    "swa_kv_lora_rank": 20,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 16,
    "head_dim": 20,
}

# What single families need besides: sizes that must fit together, and a layer of each kind.
FAMILIES: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 128, "hidden_size": 64},
        "decoder_config": {
            "hidden_size_global": 128,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "intermediate_size": 96,
            "num_attention_heads": 4,
        },
        "global_config": {"hidden_size": 128},
    },
    "cohere2_moe": {"mlp_layer_types": DENSE_FIRST, "num_shared_experts": 2},
    "cohere_compass_text": {
        "layer_types": SLIDING_FIRST,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10_000.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 40},
    },
    "deepseek_v4": {
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 2,
        "o_lora_rank": 24,
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "ngpt_alpha_init": 0.3},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 64},
        "text_config": LATENT_WINDOWS,
    },
    "dots3_note_text": LATENT_WINDOWS,
    "falcon_h1": {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [0.8, 1.3]},
    "gemma3n_text": {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.5, 0.0, 0.5]},
    **dict.fromkeys(["gemma4", "gemma4_unified"], {"text_config": WIDE_GLOBAL_HEADS}),
    **dict.fromkeys(["gemma4_text", "gemma4_unified_text"], WIDE_GLOBAL_HEADS),
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "granitemoehybrid": {"layer_types": MIXER_FIRST},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 12,
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "inkling_text": {"mlp_layer_types": DENSE_FIRST},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": CONVOLUTION_FIRST},
    "lfm2_moe": {"layer_types": CONVOLUTION_FIRST},
    "llama4": {"text_config": {"moe_layers": [1, 2], "no_rope_layer_interval": 2}},
    "llama4_text": {"moe_layers": [1, 2], "no_rope_layer_interval": 2},
    "longcat_flash": {"zero_expert_num": 2, "head_dim": 8},
    "mamba2": {"head_dim": 32},
    "minimax_m3_vl_text": {"mlp_layer_types": DENSE_FIRST},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
            "num_blocks": 2,
        }
    },
    "qwen4_exp": {"text_config": {"hc_lowrank": 12}},
    "qwen4_exp_text": {"hc_lowrank": 12},
    "reformer": {
        "is_decoder": True,
        "hash_seed": 3,
        "axial_pos_shape": (8, 16),
        "axial_pos_embds_dim": (24, 40),
    },
    "rembert": {"input_embedding_size": 40, "output_embedding_size": 72},
    "roc_bert": {
        "shape_vocab_size": 200,
        "pronunciation_vocab_size": 200,
        "shape_embed_dim": 24,
        "pronunciation_embed_dim": 20,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": SHARED_TWICE},
    "zamba2": {"layers_block_type": SHARED_TWICE},
    "zaya": {"num_experts_per_tok": 1},
}

# Query weights that are scaled down, as query-key products are not divided by the root of d_head there, or
# the norm before them doubles them: the softmax would be saturated.
DAMPED: dict[str, tuple[str, float]] = {
    **dict.fromkeys(["gemma3n_text", "gemma4", "gemma4_text"], ("self_attn.q_norm.weight", 0.25)),
    **dict.fromkeys(["gemma4_unified", "gemma4_unified_text"], ("self_attn.q_norm.weight", 0.25)),
    "gpt_neo": ("q_proj.weight", 0.3),
    "nemotron": ("q_proj.weight", 0.3),
}

UNBUILDABLE = {
    "gemma3n": "its image tower is a network of fixed size from timm (gemma3n_text is its language model)",
    **dict.fromkeys(
        ["gemma4_assistant", "gemma4_unified_assistant"],
        "a drafting head that takes another model's states, keys and values, no tokens",
    ),
}
