"""The two styles of vision_config, the published sizes, and numbers that disagree."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from jaxinfer.config.vision import llama4_vision_from_hf, moonvit_from_hf
from jaxinfer.errors import ConfigError

SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {"hidden_size": 5120},
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "rope_theta": 10000,
        "vision_output_dim": 4096,
    },
}
KIMI_HUB: dict[str, Any] = {
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "text_config": {"hidden_size": 7168},
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": 7168,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}
KIMI_NEW: dict[str, Any] = {
    "model_type": "kimi_k25",
    "projection_hidden_size": 1152,
    "projection_layer_norm_eps": 1e-05,
    "text_config": {"hidden_size": 7168},
    "vision_config": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "merge_kernel_size": [2, 2],
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "pos_emb_height": 64,
        "pos_emb_time": 4,
        "pos_emb_width": 64,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    },
}


def changed(config: dict[str, Any], **vision: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config["vision_config"] |= vision
    return config


def test_llama4_in_both_styles():
    old = llama4_vision_from_hf(SCOUT)
    new = changed(SCOUT, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    del new["vision_config"]["rope_theta"]
    assert old == llama4_vision_from_hf(new)
    assert old is not None
    assert (old.grid, old.tokens_per_tile, old.shuffle, old.text_hidden_size) == (24, 144, 2, 5120)


def test_kimi_in_both_styles():
    hub = moonvit_from_hf(KIMI_HUB)
    assert hub == moonvit_from_hf(KIMI_NEW)
    assert hub is not None
    assert (hub.num_layers, hub.table, hub.merge, hub.projector_eps) == (27, (64, 64, 4), (2, 2), 1e-5)


def test_reading_changes_nothing():
    before = copy.deepcopy((SCOUT, KIMI_HUB))
    llama4_vision_from_hf(SCOUT)
    moonvit_from_hf(KIMI_HUB)
    assert before == (SCOUT, KIMI_HUB)


def test_text_models_have_no_tower():
    assert llama4_vision_from_hf({"model_type": "llama4_text"}) is None
    assert moonvit_from_hf({"model_type": "deepseek_v3"}) is None


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"intermediate_size": 5000}, "intermediate_size=5000"),
        ({"projector_input_dim": 2048}, "2048"),
        ({"vision_output_dim": 7680}, "7680"),
        ({"image_size": 350}, "image_size=350"),
        ({"image_size": [336, 448]}, "both sides"),
        ({"pixel_shuffle_ratio": 0.3}, "pixel_shuffle_ratio=0.3"),
        ({"num_attention_heads": 15}, "num_attention_heads=15"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_llama4_numbers_that_disagree(vision: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        llama4_vision_from_hf(changed(SCOUT, **vision))


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"mm_projector_type": "patchmergerv2"}, "mm_projector_type 'patchmergerv2'"),
        ({"mm_hidden_size": 1024}, "width 1024"),
        ({"vt_num_attention_heads": 12}, None),
        ({"vt_num_attention_heads": 7}, "num_attention_heads=7"),
        ({"vt_intermediate_size": None}, "intermediate_size"),
        ({"merge_kernel_size": [0, 2]}, "merge_kernel_size"),
    ],
)
def test_kimi_numbers_that_disagree(vision: dict[str, Any], words: str | None):
    if words is None:
        assert moonvit_from_hf(changed(KIMI_HUB, **vision)) is not None
        return
    with pytest.raises(ConfigError, match=words):
        moonvit_from_hf(changed(KIMI_HUB, **vision))
