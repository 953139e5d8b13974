"""GGUF files (llama.cpp's format), shown as a Hugging Face checkpoint: names mapped back, weights dequantised to float32."""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from jaxinfer.errors import CheckpointError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights import gguf_blocks
from jaxinfer.weights.checkpoint import Checkpoint, Task
from jaxinfer.weights.companions import write_gguf_tokenizer
from jaxinfer.weights.gguf_index import TensorPlace, read_index
from jaxinfer.weights.gguf_names import ARCHITECTURES, hub_names
from jaxinfer.weights.safetensors import row_ranges
from pallas_kernels.linear import BlockKind, BlockWeights

_ROPE_FACTORS = "rope_freqs.weight"  # llama3's rotary scaling, as one divisor a frequency


class GGUFCheckpoint(Checkpoint):
    """One .gguf file of an architecture in gguf_names.ARCHITECTURES."""

    def __init__(self, path: Path):
        self.path = path
        index = read_index(path)
        self.metadata = index.metadata
        self._arch = str(self.metadata.get("general.architecture"))
        if self._arch not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: GGUF architecture {self._arch!r} is not supported; known: {', '.join(ARCHITECTURES)}"
            )
        self._all = index.tensors
        self._tensors = {
            hub_name: part
            for name, place in self._all.items()
            if name != _ROPE_FACTORS
            for hub_name, part in self._parts(name, place)
        }
        self._file = np.memmap(path, mode="r")
        self.config = self._config()
        self.generation_config = {}
        self.stored_dtype = "float32"

    def _parts(self, name: str, place: TensorPlace) -> list[tuple[str, TensorPlace]]:
        """The tensors that Hugging Face makes of one: itself, or a matrix for each expert."""
        names = hub_names(name, self.metadata.get(f"{self._arch}.expert_count", 0))
        if names is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is not one of a {self._arch} model")
        if len(place.shape) < 3:
            return [(hub_name, place) for hub_name in names]
        count, *shape = place.shape
        if count != len(names):
            raise CheckpointError(f"{self.path}: tensor {name!r} holds {count} experts, not {len(names)}")
        size = place.num_bytes // count
        return [
            (hub_name, TensorPlace(tuple(shape), place.type, place.offset + i * size, size))
            for i, hub_name in enumerate(names)
        ]

    def _config(self) -> dict[str, Any]:
        meta, arch = self.metadata, ARCHITECTURES[self._arch]

        def get(key: str, default: Any = None) -> Any:
            value = meta.get(f"{self._arch}.{key}", default)
            if value is None:
                raise CheckpointError(f"{self.path}: metadata has no '{self._arch}.{key}'")
            return value

        heads = get("attention.head_count")
        head_dim = meta.get(f"{self._arch}.attention.key_length") or get("embedding_length") // heads
        return {
            "model_type": arch.model_type,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": get("embedding_length"),
            "intermediate_size": get(
                "feed_forward_length", meta.get(f"{self._arch}.expert_feed_forward_length")
            ),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": get("context_length"),
            "rope_theta": get("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "partial_rotary_factor": get("rope.dimension_count", head_dim) / head_dim,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
            **arch.extra(get),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._all:
            divisors = self._values(self._all[_ROPE_FACTORS], _ROPE_FACTORS)
            return {"rope_type": "default", "frequency_divisors": divisors.tolist()}
        meta = self.metadata
        kind = meta.get(f"{self._arch}.rope.scaling.type", "none")
        if kind in ("none", "default"):
            return None
        scaling = {"rope_type": kind, "factor": meta.get(f"{self._arch}.rope.scaling.factor", 1.0)}
        original = meta.get(f"{self._arch}.rope.scaling.original_context_length")
        return scaling if original is None else {**scaling, "original_max_position_embeddings": original}

    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def block_kind(self, name: str) -> BlockKind | None:
        return gguf_blocks.kind_of(self._tensors[name].type)

    def read_blocks(self, name: str) -> BlockWeights:
        place = self._tensors[name]
        rows, width = place.shape
        try:
            blocks = gguf_blocks.split(self._bytes(place), place.type, (rows, width))
        except ValueError as e:
            raise self._wrong_bytes(place, name) from e
        return BlockWeights(*(self._in_order(name, field) for field in blocks))

    def read(self, name: str) -> np.ndarray:
        return self._in_order(name, self._values(self._tensors[name], name))

    def fill(self, name: str, out: np.ndarray, start: int = 0) -> list[Task]:
        # Rows whose order llama.cpp changed are to be whole heads.
        heads = self.config["head_dim"] if self._is_turned(name) else 1
        if out.ndim < 2 or start % heads or len(out) % heads:
            return super().fill(name, out, start)
        ranges = row_ranges(len(out), out.size * np.dtype(np.float32).itemsize, heads)
        return [partial(self._fill_rows, name, start + a, out[a:b]) for a, b in ranges]

    def _fill_rows(self, name: str, start: int, out: np.ndarray) -> None:
        place = self._tensors[name]
        row_bytes = place.num_bytes // place.shape[0]
        part = TensorPlace(out.shape, place.type, place.offset + start * row_bytes, len(out) * row_bytes)
        out[...] = self._in_order(name, self._values(part, name))

    def _is_turned(self, name: str) -> bool:
        """Whether llama.cpp changed the order of a tensor's rows."""
        return ARCHITECTURES[self._arch].turned and (".q_proj." in name or ".k_proj." in name)

    def _in_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows of a tensor, those of whole heads, as Hugging Face orders them."""
        return unpermute(rows, len(rows) // self.config["head_dim"]) if self._is_turned(name) else rows

    def _bytes(self, place: TensorPlace) -> np.ndarray:
        return self._file[place.offset : place.offset + place.num_bytes]

    def _values(self, place: TensorPlace, name: str) -> np.ndarray:
        kind = gguf.GGMLQuantizationType(place.type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            rows = np.asarray(self._bytes(place)).reshape(-1, place.shape[-1] // block * block_bytes)
            return dequantize(rows, kind).astype(np.float32, copy=False).reshape(place.shape)
        except NotImplementedError as e:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {kind.name}, which is not supported: choose another quantisation"
            ) from e
        except ValueError as e:
            raise self._wrong_bytes(place, name) from e

    def _wrong_bytes(self, place: TensorPlace, name: str) -> CheckpointError:
        kind = gguf.GGMLQuantizationType(place.type)
        return CheckpointError(
            f"{self.path}: tensor {name!r} of type {kind.name} does not have the bytes its shape {place.shape} needs: "
            "download the file again"
        )

    def save_companions(self, folder: Path) -> None:
        write_gguf_tokenizer(self.metadata, folder)

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_gguf(self.metadata) if "tokenizer.ggml.tokens" in self.metadata else None


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order llama.cpp gives q and k: from interleaved rotary pairs back to halves. [heads * hd, ...]."""
    half = weights.shape[0] // heads // 2
    rest = weights.shape[1:]
    return weights.reshape(heads, half, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)
