"""A head for multi-token prediction computed plainly, in NumPy, from a checkpoint's own weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.mtp_checkpoints import prefix_of
from tests.tiny_models import Kind

Array = np.ndarray[Any, np.dtype[np.float64]]


class ReferenceHead:
    """The head of one architecture, for one sequence from its first position on."""

    def __init__(self, kind: Kind, config: dict[str, Any], weights: dict[str, Any]) -> None:
        self._kind, self._config = kind, config
        prefix = prefix_of(kind, config)
        self._weights = {
            name.removeprefix(prefix): np.array(weight, np.float64)
            for name, weight in weights.items()
        }
        self._block = "layers.0." if kind == "qwen3_next" else ""

    def __call__(self, embedded: Array, hidden: Array) -> Array:
        """Return the hidden states of the head (length, dim), of those of the model and embeddings
        of the tokens after them, both (length, dim)."""
        norms, projection, last = {
            "mimo": (("token_layernorm", "hidden_layernorm"), "input_proj", "final_layernorm"),
            "qwen3_next": (("pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc", "norm"),
        }.get(self._kind, (("enorm", "hnorm"), "eh_proj", "shared_head.norm"))
        token, state = self._norm(norms[0], embedded), self._norm(norms[1], hidden)
        both = (state, token) if self._kind == "mimo" else (token, state)
        x = np.concatenate(both, axis=-1) @ self._weights[f"{projection}.weight"].T
        attend = self._latents if self._kind == "deepseek_v3" else self._attention
        x = x + attend(self._norm(f"{self._block}input_layernorm", x))
        y = self._norm(f"{self._block}post_attention_layernorm", x)
        x = x + (self._mlp("mlp", y) if self._kind == "mimo" else self._experts(y))
        return self._norm(last, x)

    def _norm(self, name: str, x: Array, eps: float | None = None) -> Array:
        weight = self._weights[f"{name}.weight"] + (self._kind == "qwen3_next")
        eps = self._config["rms_norm_eps"] if eps is None else eps
        result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
        return result

    def _linear(self, name: str, x: Array) -> Array:
        name = self._block + name
        result: Array = x @ self._weights[f"{name}.weight"].T
        return result + self._weights.get(f"{name}.bias", 0.0)

    def _rotated(self, x: Array, dims: int, *, in_pairs: bool) -> Array:
        """Rotate the first ``dims`` of (heads, length, dim), neighbours or halves together."""
        rates = self._config["rope_theta"] ** (-np.arange(0, dims, 2) / dims)
        angles = np.arange(x.shape[1])[:, None] * rates
        at = (
            (slice(0, dims, 2), slice(1, dims, 2))
            if in_pairs
            else (slice(0, dims // 2), slice(dims // 2, dims))
        )
        first, second = (x[..., part] for part in at)
        result = x.copy()
        result[..., at[0]] = first * np.cos(angles) - second * np.sin(angles)
        result[..., at[1]] = second * np.cos(angles) + first * np.sin(angles)
        return result

    def _attention(self, x: Array) -> Array:
        config, kind = self._config, self._kind
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config["head_dim"]
        query = self._linear("self_attn.q_proj", x).reshape(len(x), heads, -1)
        query, gate = query[..., :size], query[..., size:]
        keys = self._linear("self_attn.k_proj", x).reshape(len(x), kv_heads, size)
        values = self._linear("self_attn.v_proj", x).reshape(len(x), kv_heads, size)
        if kind != "mimo":
            query = self._norm(f"{self._block}self_attn.q_norm", query)
            keys = self._norm(f"{self._block}self_attn.k_norm", keys)
        dims = size if kind == "mimo" else int(size * config["partial_rotary_factor"])
        query = self._rotated(query.swapaxes(0, 1), dims, in_pairs=False)
        keys = self._rotated(keys.swapaxes(0, 1), dims, in_pairs=False)
        keys, values = (
            np.repeat(each, heads // kv_heads, axis=0) for each in (keys, values.swapaxes(0, 1))
        )
        out = _attend(query, keys, values, size**-0.5)
        if kind == "qwen3_next":
            out = out * _sigmoid(gate.reshape(len(x), -1))
        return self._linear("self_attn.o_proj", out)

    def _latents(self, x: Array) -> Array:
        config = self._config
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        low = self._norm("self_attn.q_a_layernorm", self._linear("self_attn.q_a_proj", x), 1e-6)
        query = self._linear("self_attn.q_b_proj", low).reshape(len(x), heads, -1).swapaxes(0, 1)
        both = self._linear("self_attn.kv_a_proj_with_mqa", x)
        latent = self._norm("self_attn.kv_a_layernorm", both[:, :rank], 1e-6)
        wide = self._linear("self_attn.kv_b_proj", latent).reshape(len(x), heads, -1)
        wide = wide.swapaxes(0, 1)
        turned = self._rotated(both[None, :, rank:], rope, in_pairs=True)
        keys = np.concatenate([wide[..., :nope], np.repeat(turned, heads, axis=0)], axis=-1)
        asked = self._rotated(query[..., nope:], rope, in_pairs=True)
        query = np.concatenate([query[..., :nope], asked], axis=-1)
        out = _attend(query, keys, wide[..., nope:], (nope + rope) ** -0.5)
        return self._linear("self_attn.o_proj", out)

    def _mlp(self, name: str, x: Array) -> Array:
        gate = self._linear(f"{name}.gate_proj", x)
        return self._linear(
            f"{name}.down_proj", gate * _sigmoid(gate) * self._linear(f"{name}.up_proj", x)
        )

    def _experts(self, x: Array) -> Array:
        config = self._config
        scores = self._linear("mlp.gate", x)
        if self._kind == "qwen3_next":
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores = ranked = scores / scores.sum(-1, keepdims=True)
            gate = _sigmoid(self._linear("mlp.shared_expert_gate", x))
            out = gate * self._mlp("mlp.shared_expert", x)
        else:
            scores = _sigmoid(scores)
            ranked = scores + self._weights["mlp.gate.e_score_correction_bias"]
            out = self._mlp("mlp.shared_experts", x)
        for row, best in enumerate(np.argsort(-ranked)[:, : config["num_experts_per_tok"]]):
            total = scores[row, best].sum()
            for expert in best:
                part = self._mlp(f"mlp.experts.{expert}", x[row : row + 1])[0]
                out[row] += scores[row, expert] / total * part
        return out


def _attend(query: Array, keys: Array, values: Array, scale: float) -> Array:
    """Return causal attention (length, heads * dim) over (heads, length, dim)."""
    scores = query @ keys.swapaxes(1, 2) * scale
    length = scores.shape[-1]
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return (shares @ values).swapaxes(0, 1).reshape(length, -1)


def _sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result
