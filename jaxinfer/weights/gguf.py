"""GGUF files (llama.cpp's format), shown as a Hugging Face checkpoint: names mapped back, weights dequantised to float32."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from jaxinfer.errors import CheckpointError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.checkpoint import Checkpoint

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # llama3's rotary scaling, as one divisor a frequency


class GGUFCheckpoint(Checkpoint):
    """One .gguf file of the llama architecture."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except (ValueError, OSError, IndexError, KeyError) as e:
            raise CheckpointError(f"{path} is truncated or not a GGUF file ({e}): download it again") from e
        self.metadata = {key: field.contents() for key, field in self._reader.fields.items()}
        self._tensors = {}
        size = path.stat().st_size
        for tensor in self._reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise CheckpointError(
                    f"{path} is truncated: tensor {tensor.name!r} ends past the file's {size} bytes"
                )
            if tensor.name != _ROPE_FACTORS:
                self._tensors[_hub_name(tensor.name, path)] = tensor
        self.config = self._config()
        self.generation_config = {}
        self.stored_dtype = "float32"

    def _config(self) -> dict[str, Any]:
        meta = self.metadata
        arch = meta.get("general.architecture")
        if arch != "llama":
            raise CheckpointError(f"{self.path}: GGUF architecture {arch!r} is not supported; known: llama")

        def get(key: str, default: Any = None) -> Any:
            value = meta.get(f"llama.{key}", default)
            if value is None:
                raise CheckpointError(f"{self.path}: metadata has no 'llama.{key}'")
            return value

        heads = get("attention.head_count")
        head_dim = meta.get("llama.attention.key_length") or get("embedding_length") // heads
        return {
            "model_type": "llama",
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": get("context_length"),
            "rope_theta": get("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                return {"rope_type": "default", "frequency_divisors": tensor.data.tolist()}
        meta = self.metadata
        kind = meta.get("llama.rope.scaling.type", "none")
        if kind in ("none", "default"):
            return None
        scaling = {"rope_type": kind, "factor": meta.get("llama.rope.scaling.factor", 1.0)}
        original = meta.get("llama.rope.scaling.original_context_length")
        return scaling if original is None else {**scaling, "original_max_position_embeddings": original}

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except (NotImplementedError, ValueError, KeyError) as e:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} of type {tensor.tensor_type.name} cannot be dequantised ({e})"
            ) from e
        weights = weights.reshape(self.shape(name))
        for projection, heads in (
            ("q_proj", self.config["num_attention_heads"]),
            ("k_proj", self.config["num_key_value_heads"]),
        ):
            if f".{projection}." in name:
                weights = unpermute(weights, heads)
        return weights

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_gguf(self.metadata) if "tokenizer.ggml.tokens" in self.metadata else None


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order llama.cpp gives q and k: from interleaved rotary pairs back to halves. [heads * hd, ...]."""
    half = weights.shape[0] // heads // 2
    rest = weights.shape[1:]
    return weights.reshape(heads, half, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)


def _hub_name(name: str, path: Path) -> str:
    if name in _TOP:
        return _TOP[name]
    prefix, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    kind, _, suffix = rest.partition(".")
    if prefix == "blk" and index.isdigit() and kind in _LAYER and suffix in ("weight", "bias"):
        return f"model.layers.{index}.{_LAYER[kind]}.{suffix}"
    raise CheckpointError(f"{path}: tensor {name!r} is not one of a llama model")
