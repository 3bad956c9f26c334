"""The common part of the configs of most tiny models: sizes, and the usual names of config.json."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320
LAYERS = 4
WINDOW = 32
"""Short, so that a few dozen tokens exceed it."""
CONTEXT = 1024

Config = dict[str, Any]

_COMMON: Config = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "hidden_size dim_model_base": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_traditional attention_bias mlp_bias use_bias use_qkv_bias": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "sliding_window attention_window_size": WINDOW,
    "query_pre_attn_scalar": 16,
    # experts
    "num_experts num_local_experts n_routed_experts": 4,
    "num_experts_per_tok num_experts_per_token moe_topk": 2,
    "n_shared_experts num_shared_experts num_shared_expert": 1,
    "shared_expert_intermediate_size shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size moe_intermediate_size": 32,
    "first_k_dense_replace num_dense_layers decoder_sparse_step moe_layer_freq": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    # latent attention
    "kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim": 16,
    "q_lora_rank": 24,
    # recurrent layers
    "conv_kernel mamba_d_conv": 4,
    "conv_L_cache linear_conv_kernel_dim": 3,
    "conv_bias use_conv_bias": True,
    "state_size ssm_state_size mamba_d_state": 8,
    "mamba_expand layer_group_size group_norm_size": 2,
    "mamba_proj_bias": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim linear_value_head_dim": 16,
    # scales
    "logits_scaling embedding_multiplier residual_multiplier scale_emb": 1.0,
    "attention_multiplier": 0.25,
    "scale_depth": 1.4,
}
"""A key contains the config names for one property, or for properties with the same size."""

COMMON: Config = {name: value for names, value in _COMMON.items() for name in names.split()}
