"""Fields that the config of an architecture needs besides `zoo.common.COMMON`."""

from __future__ import annotations

from zoo.common import CONTEXT, LAYERS, VOCAB_SIZE, WINDOW, Config

ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)

GPT: Config = {
    "n_ctx": CONTEXT,
    "n_positions": CONTEXT,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_inner": 96,
    "rotary_dim": 8,
}

LONGCAT: Config = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

INDEXER: Config = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 12}

KDA: Config = {
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "kda_layers": [1, 3],
        "short_conv_kernel_size": 4,
    },
    "model_max_length": CONTEXT,
}

YARN: Config = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": CONTEXT,
}

LLAMA4_ROPE: Config = {
    "rope_theta": 10_000.0,
    "type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": WINDOW,
}

NAS_ATTENTION: Config = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
NO_ATTENTION: Config = {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
NAS_FFN: Config = {"ffn_mult": 1.3, "no_op": False, "replace_with_linear": False}

ROPE_OF_EACH: Config = {
    "full_attention": {"rope_theta": 10_000.0},
    "sliding_attention": {"rope_theta": 1_000.0},
}

SPECIAL: dict[str, Config] = {
    "Klear": {"decoder_sparse_step": 2, "mlp_only_layers": [0]},
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2}
    | {"num_heads": 4, "num_kv_heads": 2},
    "afmoe": {"layer_types": ALTERNATING},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "bailing_moe_linear": {"num_key_value_heads": 4},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": LAYERS,
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v32": INDEXER,
    "deepseek_v41": INDEXER
    | {
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone": {"num_layers": LAYERS},
    "exaone4": {"sliding_window_pattern": "LLGL"},
    "exaone_moe": {"layer_types": ALTERNATING, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "falcon_mamba": {"model_type": "falcon_mamba", "use_bcdt_rms": True, "time_step_rank": 4},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "rope_local_base_freq": 1_000.0,
        "final_logit_softcapping": 30.0,
        "layer_types": ALTERNATING,
        "activation_sparsity_pattern": [0.5] * LAYERS,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 4,
        "altup_coef_clip": 1.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "layer_types": ALTERNATING,
    },
    "glm_moe_dsa": INDEXER | {"rope_parameters": {"rope_theta": 10_000.0}},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": ALTERNATING},
    "gptj": GPT,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": KDA | {"hidden_act": "situ", "attn_res_block_size": 2, "mla_use_output_gate": True},
    "kimi_linear": KDA,
    "laguna": {"layer_types": ALTERNATING},
    "lfm2": {
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "lfm2_moe": {"use_expert_bias": True, "layer_types": ["conv", "full_attention"] * 2},
    "lille-130m": {
        "block_size": CONTEXT,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_heads": 2,
        "n_layer": LAYERS,
    },
    "llama4": {
        "attention_chunk_size": WINDOW,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [0, 0, 1, 1]},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT | {"emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {"time_step_rank": 4},
    "mamba2": {
        "num_heads": 8,
        "n_groups": 2,
        "time_step_limit": [0.01, 10.0],
        "time_step_rank": "auto",
    },
    "mellum": {"layer_types": ALTERNATING, "rope_parameters": ROPE_OF_EACH},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10_000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": CONTEXT}},
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "dense_intermediate_size": 96,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "sparse_attention_freq": [0, 1, 0, 1],
    },
    "ministral3": {"layer_types": ALTERNATING, "rope_parameters": LLAMA4_ROPE},
    "mistral4": {"rope_parameters": LLAMA4_ROPE | YARN},
    "muse_glimmer": {"layer_types": ALTERNATING},
    "muse_spark": {
        "layer_types": ALTERNATING,
        "layer_rope_theta": [10_000.0, 0.0] * 2,
        "rope_parameters": {"rope_theta": 10_000.0},
        "post_norm_eps": 1e-5,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.2,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "nanbeige": {"num_loops": 2},
    "nemotron-nas": {
        "block_configs": [
            {"attention": NAS_ATTENTION, "ffn": NAS_FFN},
            {"attention": NO_ATTENTION, "ffn": NAS_FFN},
        ]
        * 2
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "E", "M", "*"],
        "num_hidden_layers": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "time_step_limit": [0.01, 10.0],
    },
    "olmo3": {"layer_types": ALTERNATING},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "num_transformer_layers": LAYERS,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "vocab_size": 100_352,  # it masks tokens that lie beyond 100,000
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 4,
    },
    "phixtral": {
        "num_vocab": VOCAB_SIZE,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": LAYERS,
        "rotary_dim": 8,
    },
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "mamba_chunk_size": 16,
        "full_attention_idx": [1],
    },
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {"hidden_size": 128, "full_attention_interval": 2},
    "qwen": {"kv_channels": 16},
    "qwen3_5": {"num_experts": 0, "full_attention_interval": 2},
    "qwen3_5_moe": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {f"{name}_low_rank_dim": 16 for name in ("a", "v", "gate", "decay")},
    "spark2_5": {"hidden_act": "gelu", "layer_types": ALTERNATING, "rope_parameters": ROPE_OF_EACH},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": ALTERNATING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
    },
}
