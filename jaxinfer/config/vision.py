"""Vision towers as config.json describes them: the part "vision_config", in the style of transformers 5 or of the hub's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4VisionConfig:
    """Llama 4's tower: square tiles of one size, each with a class token; sizes are element counts, image and patch in pixels.

    Attributes:
      shuffle: patches along a side that become one row (1 / pixel_shuffle_ratio).
      adapter_size: width of the rows before the projector.
      text_hidden_size: width of the rows.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int = 3
    shuffle: int = 2
    adapter_size: int
    rope_theta: float = 10000.0
    text_hidden_size: int

    def __post_init__(self) -> None:
        _check_heads(self.hidden_size, self.num_heads)
        if self.image_size % self.patch_size or self.grid % self.shuffle:
            raise ConfigError(
                f"image_size={self.image_size} is not a whole number of {self.shuffle} x {self.shuffle} "
                f"patches of patch_size={self.patch_size}"
            )

    @property
    def grid(self) -> int:
        """Patches along a tile's side."""
        return self.image_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        return (self.grid // self.shuffle) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonViTConfig:
    """Kimi K2.5's tower (arXiv:2504.07491, with frames added): patches of images of any shape.

    Attributes:
      table: learned positions down, across and in time; images of other shapes get interpolated ones.
      merge: patches down and across that become one row.
      projector_eps: of the norm before the projector.
      text_hidden_size: width of the rows.
    """

    patch_size: int = 14
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_layers: int = 27
    num_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    table: tuple[int, int, int] = (64, 64, 4)
    merge: tuple[int, int] = (2, 2)
    rope_theta: float = 10000.0
    projector_eps: float = 1e-5
    text_hidden_size: int

    def __post_init__(self) -> None:
        _check_heads(self.hidden_size, self.num_heads)
        if min(*self.table, *self.merge, self.patch_size) < 1:
            raise ConfigError(
                f"patch_size={self.patch_size}, merge_kernel_size={self.merge} and the position table {self.table} "
                "must be at least 1"
            )

    @property
    def patches_per_row(self) -> int:
        return self.merge[0] * self.merge[1]


def llama4_vision_from_hf(config: Mapping[str, Any]) -> Llama4VisionConfig | None:
    """Of a config.json whose model_type is llama4; None where it has no images."""
    vision = config.get("vision_config")
    if vision is None:
        return None
    need = _Reader(vision, "Llama 4's vision_config")
    ratio = float(vision.get("pixel_shuffle_ratio", 0.5))
    shuffle = round(1 / ratio) if 0 < ratio <= 1 else 0
    if not shuffle or abs(shuffle * ratio - 1) > 1e-6:
        raise ConfigError(f"pixel_shuffle_ratio={ratio} is not one over a whole number")
    hidden, inner = need("hidden_size"), need("intermediate_size")
    if hidden * shuffle**2 != inner:
        raise ConfigError(
            f"the adapter takes intermediate_size={inner}, but {shuffle} x {shuffle} patches of hidden_size={hidden} "
            f"are {hidden * shuffle**2}"
        )
    widths = {name: need(name) for name in ("projector_input_dim", "projector_output_dim")}
    widths["vision_output_dim"] = int(vision.get("vision_output_dim", widths["projector_output_dim"]))
    if len(set(widths.values())) > 1:
        raise ConfigError(f"widths of the vision adapter must agree: {widths}")
    return Llama4VisionConfig(
        image_size=_square(vision, "image_size"),
        patch_size=_square(vision, "patch_size"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=need("num_hidden_layers"),
        num_heads=need("num_attention_heads"),
        num_channels=int(vision.get("num_channels", 3)),
        shuffle=shuffle,
        adapter_size=widths["projector_output_dim"],
        rope_theta=_rope_theta(vision),
        text_hidden_size=_text_width(config),
    )


def moonvit_from_hf(config: Mapping[str, Any]) -> MoonViTConfig | None:
    """Of a config.json whose model_type is kimi_k25; None where it has no images."""
    vision = config.get("vision_config")
    if vision is None:
        return None
    fixed = {
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "video_attn_type": "spatial_temporal",
    }
    for name, value in fixed.items():
        if vision.get(name, value) != value:
            raise ConfigError(f"vision_config: {name} {vision[name]!r} is not supported, {value!r} is")
    need = _Reader(vision, "Kimi's vision_config")
    merge = vision.get("merge_kernel_size", (2, 2))
    hidden = need("hidden_size", "vt_hidden_size")
    projected = config.get("projection_hidden_size") or vision.get("mm_hidden_size") or hidden
    if projected != hidden:
        raise ConfigError(f"the projector takes width {projected}, but the vision tower has {hidden}")
    return MoonViTConfig(
        patch_size=_square(vision, "patch_size"),
        hidden_size=hidden,
        intermediate_size=need("intermediate_size", "vt_intermediate_size"),
        num_layers=need("num_hidden_layers", "vt_num_hidden_layers"),
        num_heads=need("num_attention_heads", "vt_num_attention_heads"),
        hidden_act=vision.get("hidden_act") or "gelu_pytorch_tanh",
        table=(
            need("pos_emb_height", "init_pos_emb_height"),
            need("pos_emb_width", "init_pos_emb_width"),
            need("pos_emb_time", "init_pos_emb_time"),
        ),
        merge=(int(merge), int(merge)) if isinstance(merge, int) else (int(merge[0]), int(merge[1])),
        rope_theta=_rope_theta(vision),
        projector_eps=float(
            config.get("projection_layer_norm_eps") or vision.get("projector_ln_eps") or 1e-5
        ),
        text_hidden_size=_text_width(config),
    )


class _Reader:
    """Reads whole numbers by any of their names."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where

    def __call__(self, *names: str) -> int:
        for name in names:
            if self._values.get(name) is not None:
                return int(self._values[name])
        raise ConfigError(f"{self._where} has no {names[0]!r}")


def _square(values: Mapping[str, Any], name: str) -> int:
    size = values.get(name)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or sides[0] != sides[1] or not isinstance(sides[0], int) or sides[0] < 1:
        raise ConfigError(f"vision_config: {name} must be one size in pixels for both sides, got {size!r}")
    return sides[0]


def _rope_theta(vision: Mapping[str, Any]) -> float:
    inner = vision.get("rope_parameters") or {}
    return float(inner.get("rope_theta") or vision.get("rope_theta") or 10000.0)


def _text_width(config: Mapping[str, Any]) -> int:
    return _Reader(config.get("text_config") or config, "the text part of config.json")("hidden_size")


def _check_heads(width: int, heads: int) -> None:
    # A quarter of each head's dimensions turn in pairs with the row, a quarter with the column.
    if heads < 1 or width % heads or width // heads % 4:
        raise ConfigError(
            f"vision_config: hidden_size={width} is not a multiple of 4 x num_attention_heads={heads}"
        )
