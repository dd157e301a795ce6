"""Language models of transformers, one entry each: the config that makes the published model small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fusion_pass.zoo.base import VOCABULARY, Builder, Inputs, Settings, cycle, token_ids

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}

Options = Callable[[int], dict[str, Any]]
"""Number of layers -> options of the config beside `_SIZES`. An option that is None is left out of the call."""


def _causal_lm(config: str, options: Options = lambda layers: {}, model: str | None = None) -> Builder:
    """Builder of `transformers.<model>(transformers.<config>(...))`; by default the causal LM of the config."""

    def build(settings: Settings) -> tuple[nn.Module, Inputs]:
        import transformers

        chosen = {**_SIZES, "num_hidden_layers": settings.layers, **options(settings.layers)}
        made = getattr(transformers, config)(**{key: value for key, value in chosen.items() if value is not None})
        if model is None:
            module = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=settings.attention)
        else:
            made._attn_implementation = settings.attention
            module = getattr(transformers, model)(made)
        return module, {"input_ids": token_ids(), "use_cache": False}

    return build


def _kinds(*kinds: str) -> Options:
    return lambda layers: {"layer_types": cycle(kinds, layers)}


_GPT_J = {
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 256,
    "rotary_dim": 8,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

_ALIBI = {"head_dim": None, "num_key_value_heads": None, "hidden_dropout": 0.0, "attention_dropout": 0.0}

MODELS: dict[str, Builder] = {
    "llama": _causal_lm("LlamaConfig"),
    "qwen3": _causal_lm("Qwen3Config", _kinds("full_attention")),
    "gemma2": _causal_lm(
        "Gemma2Config",
        lambda n: {"layer_types": cycle(("sliding_attention", "full_attention"), n), "sliding_window": 8},
    ),
    "gemma3": _causal_lm(
        "Gemma3TextConfig",
        lambda n: {"layer_types": cycle(("sliding_attention", "full_attention"), n), "sliding_window": 8},
        model="Gemma3ForCausalLM",
    ),
    "gemma4": _causal_lm(
        "Gemma4TextConfig",
        lambda n: {
            "layer_types": cycle(("full_attention",), n),
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
        model="Gemma4ForCausalLM",
    ),
    "olmo2": _causal_lm("Olmo2Config", lambda n: {"head_dim": None}),
    "llama4": _causal_lm(
        "Llama4TextConfig",
        lambda n: {
            "num_local_experts": 2,
            "intermediate_size_mlp": 128,
            "moe_layers": [],
            "attention_chunk_size": 64,
        },
        model="Llama4ForCausalLM",
    ),
    "gpt_oss": _causal_lm(
        "GptOssConfig",
        lambda n: {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": cycle(("full_attention", "sliding_attention"), n),
            "sliding_window": 8,
        },
    ),
    "qwen3_next": _causal_lm(
        "Qwen3NextConfig",
        lambda n: {
            "layer_types": cycle(("full_attention",), n),
            "num_experts": 0,
            "decoder_sparse_step": 0,
            "mlp_only_layers": list(range(n)),
        },
    ),
    "deepseek_v3": _causal_lm(
        "DeepseekV3Config",
        lambda n: {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": n,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe": _causal_lm(
        "Glm4MoeConfig",
        lambda n: {
            "use_qk_norm": True,
            "first_k_dense_replace": n,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 1,
        },
    ),
    "ernie4_5": _causal_lm("Ernie4_5Config"),
    "gpt_neox": _causal_lm("GPTNeoXConfig", lambda n: {"head_dim": None, "num_key_value_heads": None}),
    "gptj": _causal_lm("GPTJConfig", lambda n: {**_GPT_J, "n_layer": n}),
    "glm4": _causal_lm("Glm4Config"),
    "bloom": _causal_lm("BloomConfig", lambda n: {**_ALIBI, "n_head": 4, "n_layer": n}),
    "mpt": _causal_lm(
        "MptConfig",
        lambda n: {
            **_ALIBI,
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": n,
            "expansion_ratio": 2,
            "max_seq_len": 256,
        },
    ),
    "falcon_rw": _causal_lm(
        "FalconConfig",
        lambda n: {**_ALIBI, "alibi": True, "multi_query": False, "new_decoder_architecture": False},
    ),
}
