"""Tiny models away from their defaults: each entry is a name, a family and what to build it with."""

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo_sizes import UNBUILDABLE

Variant = tuple[str, str, dict[str, Any]]

EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40}
SLIDING = ["sliding_attention"] * 3

BIAS_FIELDS = (
    *("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias", "no_bias", "enable_bias"),
    *("norm_bias", "decoder_bias", "lm_head_bias", "conv_bias", "use_conv_bias", "add_bias_linear"),
    *("attention_out_bias", "mamba_conv_bias", "mamba_proj_bias", "projectors_bias"),
)
"""Fields that put biases on matrices or take them off."""

MULTIPLIERS: dict[str, list[dict[str, Any]]] = {
    "granite": [{"residual_multiplier": 1.0, "logits_scaling": 0.25}, {"residual_multiplier": 2.5}],
    "granitemoeshared": [{"residual_multiplier": 1.7, "embedding_multiplier": 0.5}],
    "minicpm3": [{"scale_depth": 4.0}],
    "falcon_h1": [{"attention_out_multiplier": 2.0, "ssm_out_multiplier": 0.2}],
    "minimax": [{"full_attn_beta_factor": 1.6, "mlp_alpha_factor": 0.5}],
    "afmoe": [{"mup_enabled": True}],
    "gpt2": [
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {"scale_attn_weights": False},
    ],
    "bart": [{"scale_embedding": True}],
    "blenderbot": [{"scale_embedding": True}],
    "xglm": [{"scale_embedding": False}],
    "biogpt": [{"scale_embedding": False}],
    "cohere2": [{"logit_scale": 3.0}],
}

HEADS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(
        ["llama", "qwen3", "gemma2", "olmo2", "mistral", "mixtral", "gpt_oss", "glm4"],
        [{"num_key_value_heads": 4}, {"num_key_value_heads": 1}],
    ),
    "llama4_text": [{"num_key_value_heads": 4}],
    "gpt_bigcode": [{"multi_query": False}],
    "starcoder2": [{"num_key_value_heads": 4}],
    "deepseek_v3": [{"q_lora_rank": None}, {"n_group": 2, "topk_group": 1, "norm_topk_prob": False}],
    "qwen2": [{"num_key_value_heads": 1, "head_dim": 24}],
}

BLOCKS: dict[str, list[dict[str, Any]]] = {
    "falcon": [
        {"parallel_attn": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
    ],
    "gpt_neox": [{"use_parallel_residual": False}],
    "stablelm": [{"use_parallel_residual": True}, {"qk_layernorm": True, "use_qkv_bias": True}],
    "bloom": [{"apply_residual_connection_post_layernorm": True}],
    "phi": [{"qk_layernorm": True}],
    "persimmon": [{"qk_layernorm": False}],
    "cohere": [{"use_qk_norm": True}],
    "glm4_moe": [{"use_qk_norm": True}],
    "llama4_text": [{"use_qk_norm": False, "attn_temperature_tuning": False}],
    "opt": [{"do_layer_norm_before": False}, {"layer_norm_elementwise_affine": False}],
    "hyperclovax": [{"use_post_norm": False}],
    "lfm3": [{"use_sandwich_norm": False, "use_attention_gate": False}],
    "laguna": [{"gating": False}, {"moe_router_logit_softcapping": 2.0}],
    "trocr": [{"layernorm_embedding": False, "scale_embedding": True}],
    "xmod": [{"pre_norm": True, "adapter_layer_norm": True, "adapter_reuse_layer_norm": False}],
    "ernie": [{"use_task_id": True}],
    "roc_bert": [{"concat_input": False}],
    "prophetnet": [{"ngram": 1}],
    "reformer": [{"attn_layers": ["local", "local", "local"]}, {"attn_layers": ["lsh", "lsh", "lsh"]}],
    "zamba2": [{"use_mem_rope": True, "num_mem_blocks": 2}],
    "doge": [{"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}],
    "gemma4_text": [
        EXPERTS,
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", *["full_attention"] * 2],
        },
        {"hidden_size_per_layer_input": 0},
    ],
    "longcat_flash": [{"zero_expert_num": 0}],
    "qwen2_moe": [{"mlp_only_layers": [0], "norm_topk_prob": True}],
    "jetmoe": [{"num_experts_per_tok": 1}],
    "olmo": [{"clip_qkv": 0.8}],
    "qwen4_exp_text": [
        {
            "ple_layer_ids": [1],
            "ple_embed_dim": 16,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 1,
            "make_ngram_vocab_size_divisible_by": 8,
        }
    ],
}

WIDTHS: dict[str, list[dict[str, Any]]] = {
    "electra": [{"embedding_size": 40}],
    "roformer": [{"embedding_size": 40}],
    "opt": [{"word_embed_proj_dim": 40}, {"word_embed_proj_dim": 40, "do_layer_norm_before": False}],
    "rembert": [{"input_embedding_size": 64, "output_embedding_size": 64}],
}

TIED: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(["llama", "qwen3", "mixtral", "olmo2", "gpt_neox"], [{"tie_word_embeddings": True}]),
    **dict.fromkeys(
        ["gpt2", "gemma2", "gemma3_text", "bloom", "mpt", "bert", "cohere2"], [{"tie_word_embeddings": False}]
    ),
}

CAPS: dict[str, list[dict[str, Any]]] = {
    "gemma3_text": [{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}],
    "gemma2": [
        {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": None},
    ],
    "gemma4_text": [{"final_logit_softcapping": 5.0}],
    "recurrent_gemma": [{"logits_soft_cap": 2.0}],
    "xlstm": [{"output_logit_soft_cap": 1.5, "gate_soft_cap": 2.0}],
}

WINDOWS: dict[str, list[dict[str, Any]]] = {
    "mistral": [{"sliding_window": 5}, {"sliding_window": None}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 5, "layer_types": SLIDING}],
    "gemma2": [{"sliding_window": 5}],
    "gemma3_text": [{"sliding_window": 5, "layer_types": SLIDING}],
    "gpt_oss": [{"sliding_window": 5, "layer_types": SLIDING}],
    "phi3": [{"sliding_window": 5}],
    "gpt_neo": [{"window_size": 5, "attention_types": [[["local"], 3]]}],
    "cohere2": [{"sliding_window": 5, "layer_types": SLIDING}],
    "modernbert-decoder": [{"local_attention": 6}],
    "smollm3": [{"use_sliding_window": True, "sliding_window": 5, "layer_types": SLIDING}],
}

CAUSAL: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(
        [
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
        ],
        [{"is_decoder": True}],
    ),
    **dict.fromkeys(
        [
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ],
        [{"is_decoder": True}],
    ),
    "xlm": [{"causal": True}],
    "xlnet": [{"attn_type": "uni"}],
}

LAYER_AND_HEAD = [
    "llama",
    "gpt2",
    "gemma2",
    "falcon",
    "gpt_neox",
    "olmo2",
    "opt",
    "mixtral",
    "bloom",
    "mamba",
    "cohere",
]
SDPA = [
    *["llama", "gpt2", "gemma3_text", "falcon", "gpt_neox", "opt", "bert", "mixtral", "cohere2", "phi3"],
    *[
        "olmo2",
        "granite",
        "qwen3_next",
        "deepseek_v3",
        "bart",
        "gptj",
        "starcoder2",
        "gemma4_text",
        "mistral",
    ],
]
MIXTURES = [
    *[
        "mixtral",
        "qwen3_moe",
        "qwen2_moe",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "olmoe",
        "glm4_moe",
        "dots1",
    ],
    *["ernie4_5_moe", "phimoe", "jamba", "minimax", "afmoe", "lfm2_moe"],
]
DTYPES = ["llama", "gpt2", "gemma2", "falcon", "qwen3_moe", "mamba", "granite", "bert"]


def variants() -> list[Variant]:
    """Configurations away from the defaults, each to be made with `build(family, **overrides)`."""
    groups = {
        "multipliers": MULTIPLIERS,
        "heads": HEADS,
        "blocks": BLOCKS,
        "widths": WIDTHS,
        "tied": TIED,
        "caps": CAPS,
        "windows": WINDOWS,
        "causal": CAUSAL,
    }
    listed = [
        (f"{family}-{group}-{number}", family, overrides)
        for group, members in groups.items()
        for family, choices in members.items()
        for number, overrides in enumerate(choices)
    ]
    listed += [(f"{family}-one-layer", family, {"layers": 1}) for family in LAYER_AND_HEAD]
    listed += [(f"{family}-one-head", family, _one_head(family)) for family in LAYER_AND_HEAD if family != "mamba"]
    listed += [(f"{family}-sdpa", family, {"attn_implementation": "sdpa"}) for family in SDPA]
    listed += [
        (f"{family}-{kind}", family, {"experts_implementation": kind})
        for family in MIXTURES
        for kind in ("eager", "grouped_mm", "batched_mm")
    ]
    for family in DTYPES:
        experts = {"experts_implementation": "eager"} if family in MIXTURES else {}  # the grouped kernel lacks float64
        listed.append((f"{family}-float64", family, {"dtype": torch.float64, **experts}))
        listed.append((f"{family}-bfloat16", family, {"dtype": torch.bfloat16}))
    return listed + flipped_biases()


def flipped_biases() -> list[Variant]:
    """For each family that can have biases or not, all its bias fields turned the other way."""
    found = []
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if family in UNBUILDABLE:
            continue
        default = CONFIG_MAPPING[family]()
        fields = {name: getattr(default, name) for name in BIAS_FIELDS if name in _fields(family)}
        flipped = {name: not value for name, value in fields.items() if isinstance(value, bool)}
        if flipped:
            found.append((f"{family}-biases-flipped", family, flipped))
    return found


def _one_head(family: str) -> dict[str, Any]:
    asked = {
        "num_attention_heads": 1,
        "n_head": 1,
        "num_key_value_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
    }
    return {name: value for name, value in asked.items() if name in _fields(family)}


def _fields(family: str) -> set[str]:
    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
