"""Rotary position embeddings. Phases are float32 whatever the model's dtype: bfloat16 loses positions past 256."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.config.model import RopeConfig

RopeTables = tuple[Float[Array, "T half"], Float[Array, "T half"]]  # cos, sin


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, *, max_len: int | None = None
) -> tuple[np.ndarray, float]:
    """Rotation speed of each pair of dimensions, float32 [head_dim / 2] in radians a token, and the factor on cos and sin.

    max_len (tokens) matters to "dynamic" alone: the base is stretched for it when it exceeds the trained length.
    Follows transformers' modeling_rope_utils, which checkpoints are trained and tested against.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    theta = rope.theta
    if rope.type == "dynamic":
        trained = rope.original_max_position or 1
        length = max(max_len or 0, trained)
        theta = theta * (rope.factor * length / trained - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if rope.frequency_divisors is not None:
        return inv_freq / np.asarray(rope.frequency_divisors, np.float32), 1.0
    if rope.type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.type == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq, 1.0


def _llama3(inv_freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    original = rope.original_max_position or 1
    wavelength = 2 * math.pi / inv_freq
    # Llama 4 Scout's factors are equal: nothing lies between them.
    width = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
    smooth = (original / wavelength - rope.low_freq_factor) / width
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * inv_freq / rope.factor + smooth * inv_freq).astype(np.float32)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature: 0.1 m ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(inv_freq: np.ndarray, rope: RopeConfig, dim: int) -> tuple[np.ndarray, float]:
    original = rope.original_max_position or 1
    if rope.attention_factor is not None:
        attention_factor = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        attention_factor = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(
            rope.factor, rope.mscale_all_dim
        )
    else:
        attention_factor = yarn_mscale(rope.factor)

    def dimension_turning(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp  # 1: turns fast, keep as trained; 0: interpolate
    return (inv_freq / rope.factor * (1 - keep) + inv_freq * keep).astype(np.float32), attention_factor


def rope_tables(positions: Int[Array, " T"], inv_freq: np.ndarray, attention_factor: float) -> RopeTables:
    """cos and sin of each position's phases, float32, scaled by YaRN's attention factor."""
    phase = positions[:, None].astype(jnp.float32) * jnp.asarray(inv_freq)[None, :]
    tables = jnp.cos(phase) * attention_factor, jnp.sin(phase) * attention_factor
    # Without a barrier XLA recomputes sines inside every layer's rotation, once for each element it writes.
    return jax.lax.optimization_barrier(tables)


def apply_rope(
    x: Float[Array, "T H hd"], tables: RopeTables, *, interleaved: bool = False
) -> Float[Array, "T H hd"]:
    """Rotates dimension i with i + half (the halves layout of Hugging Face checkpoints); the rest passes through.

    interleaved: dimension 2i turns with 2i + 1 instead, as in checkpoints that treat pairs as complex numbers.
    """
    cos, sin = (t[:, None, :] for t in tables)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        pairs = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
        rotated = [pairs.reshape(turned.shape).astype(x.dtype)]
    else:
        x1, x2 = turned[..., :half], turned[..., half:]
        rotated = [(x1 * cos - x2 * sin).astype(x.dtype), (x2 * cos + x1 * sin).astype(x.dtype)]
    return jax.lax.concatenate([*rotated, rest] if rest.shape[-1] else rotated, dimension=2)
