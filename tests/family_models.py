"""A tiny random model of every causal language model type of transformers, small by the names of its settings."""

import inspect
import re
from pathlib import Path

import torch
import transformers
from tiny_models import save
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 264
MOST = 6_000_000  # parameters; a larger model has a size that SIZES does not know
# Regular expression of a whole name -> value, the first that matches; only settings that are positive integers change.
SIZES = {
    r"(entity|pronunciation|shape|audio)_vocab_size|encoder_hash_byte_group_vocab": 32,
    r"vocab_size(_per_layer_input)?": VOCABULARY,
    r"(max_position_embeddings|n_positions|max_seq\w*_len\w*|max_sequence_length)": 128,
    r"(num_hidden|num|n|decoder|encoder)_layers?": 2,
    r"first_k_dense_replace|n_group|topk_group|num_mem_blocks|mamba_n_groups|n_groups|n_shared_experts": 1,
    r"max_window_layers|moe_num_shared_experts|num_shared_experts": 1,
    r"mtp_num_hidden_layers|num_nextn_predict_layers": 0,
    r"num_experts_per_tok\w*|moe_top_?k|moe_k|top_k_experts|num_codebooks|index_n_heads": 2,
    r"(num_key_value|num_kv|linear_num_key)_heads|num_query_groups": 2,
    r"(num|n)_(local_|routed_)?experts|moe_num_experts": 4,
    r"(mamba_)?(num|n)_heads?|num_attention_heads|(en|de)coder_attention_heads|linear_num_(value_)?heads": 4,
    r"mamba_n_heads|mamba_num_heads|mamba_d_conv|index_topk|mamba_dt_rank|time_step_rank": 4,
    r"(qk_nope_|qk_rope_|v_|global_|index_|linear_key_|linear_value_)?head_dim|rotary_dim": 8,
    r"qk_head_dim|mamba_(d_head|head_dim)|(kv|q)_lora_rank": 16,
    r"(mamba_d_|ssm_)?state_size?|mamba_d_state|(mamba_)?chunk_size|sliding_window|window_size|laurel_rank": 8,
    r"hidden_size_per_layer_input|adapter_rank|q_proj_dim|attention_chunk_size": 8,
    r"(moe_|shared_expert_|moe_shared_expert_|shared_|expert_ffn_)(intermediate_size|hidden_size)": 16,
    r"(intermediate|ffn_hidden|feed_forward)_size\w*|(encoder_|decoder_)?ffn_dim|dff|d_ff|n_inner": 64,
    r"hidden_size|n_embd|d_model|dim|emb_dim|embedding_size|word_embed_proj_dim|lru_width|attention_hidden_size": 32,
    r"pad_token_id": 0,
    r"bos_token_id": 1,
    r"eos_token_id": 2,
}
VISION = {r"image_size": 16, r"patch_size": 8, r"num_attention_heads": 2, r"hidden_size": 16} | SIZES
MIXED = ["sliding_attention", "full_attention"]
ZAMBA = {
    **{"num_hidden_layers": 6, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4},
    "layers_block_type": 2 * ["linear_attention", "linear_attention", "hybrid"],
}
# What a type needs besides these sizes, such as as many key and value heads as heads, or two kinds of blocks.
MORE = {
    **{key: {"num_key_value_heads": 4} for key in ["axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"]},
    **{key: {"num_key_value_heads": 4} for key in ["glm_moe_dsa", "minicpm3", "youtu", "dots3_note_text"]},
    **{key: {"num_local_experts": 4} for key in ["qwen3_moe", "kolibri1", "mellum"]},
    **{key: {"head_dim": 8} for key in ["hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"]},
    **{key: {"num_hidden_layers": 4} for key in ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]},
    **{key: {"num_hidden_layers": 4} for key in ["minimax", "deepseek_v4", "afmoe"]},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": 2},
    "moshi": {"audio_vocab_size": 32},
    "bailing_hybrid": {"num_key_value_heads": 4, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": MIXED,
        "rope_parameters": {key: {"rope_type": "default", "rope_theta": 10000.0} for key in MIXED},
    },
    "dbrx": {
        **{"n_heads": 4, "max_seq_len": 128, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * MIXED},
        **{"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    },
    "gemma4_text": {
        **{"layer_types": MIXED, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        **{"moe_intermediate_size": 16, "num_kv_shared_layers": 0},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"num_hidden_layers": 5, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "longcat_flash": {"zero_expert_num": 2, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "modernbert-decoder": {"num_hidden_layers": 3},
    "nemotron_h": {
        **{"num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "head_dim": 8},
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        **{"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
        **{"local_attn_chunk_length": 8, "attention_head_size": 8},
    },
    "zamba": ZAMBA,
    "zamba2": ZAMBA | {"num_mem_blocks": 1, "use_shared_attention_adapter": True},
    "zaya": {"num_experts_per_tok": 1},
}


def small_settings(config_class: type, sizes: dict[str, int]) -> dict[str, int]:
    """Name -> size for the positive integers among the settings of the class."""
    names = {name for one in config_class.__mro__ for name in getattr(one, "__annotations__", {})}
    names |= set(inspect.signature(config_class.__init__).parameters)
    defaults, found = config_class(), {}
    for name in sorted(names - set(config_class.attribute_map)):
        value = next((size for pattern, size in sizes.items() if re.fullmatch(pattern, name)), None)
        try:
            default = getattr(defaults, name, None)
        except Exception:  # one that differs from layer to layer
            default = 1
        positive = isinstance(default, int) and not isinstance(default, bool) and default > 0
        if value is not None and (positive or name.endswith("_token_id")):
            found[name] = value
    return found


def family_model(name: str) -> torch.nn.Module:
    """A tiny random model of the type in float32; no weight matrix is zero.

    Raises:
        Exception: transformers has no small model of this type; of many types.
    """
    config_class, more = transformers.CONFIG_MAPPING[name], MORE.get(name, {})
    settings = small_settings(config_class, SIZES)
    for part, default in (getattr(config_class, "sub_configs_defaults", None) or config_class.sub_configs).items():
        kind = getattr(default, "model_type", None)
        part_class = default if isinstance(default, type) else transformers.CONFIG_MAPPING[kind]
        if part_class is not transformers.AutoConfig:
            sizes = SIZES if re.search("text|decoder|thinker", part) else VISION
            settings[part] = small_settings(part_class, sizes) | MORE.get(part_class.model_type, {})
            settings[part] |= {} if isinstance(default, type) else {"model_type": kind}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**settings | more), dtype=torch.float32)
    if (count := model.num_parameters()) > MOST:
        largest = max(model.named_parameters(), key=lambda one: one[1].numel())
        raise ValueError(f"{name}: {count:,} parameters, most in {largest[0]} {list(largest[1].shape)}")
    for weight in model.parameters():
        if weight.ndim > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.02)
    return model.eval()


def save_family(name: str, folder: Path) -> Path:
    """The model in bfloat16 and a byte tokenizer as a folder for `from_pretrained`."""
    return save(family_model(name).to(torch.bfloat16), folder)
