"""Settings of one engine: how much it may hold and how it cuts work into steps."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.errors import ConfigError
from jaxinfer.values import as_integer, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and sizes; each is a count unless its comment gives a unit.

    A prompt of P tokens with max_tokens M is accepted when P + 1 <= max_model_len; generation ends with
    finish_reason "length" once prompt and generated tokens together reach max_model_len.
    """

    max_model_len: int  # longest prompt + generation, tokens
    max_num_seqs: int = 64  # sequences in one step
    max_prefill_tokens: int = 512  # prompt tokens computed in one step, over all sequences (chunked prefill)
    prefill_block: int = 32  # prefill chunks are padded to a multiple of this many tokens
    page_size: int = 16  # tokens a KV page holds
    num_pages: int | None = (
        None  # KV pages of all devices, each one's page 0 (the dump) included; None: sized from kv_cache_bytes
    )
    kv_cache_bytes: int | None = None  # memory for the KV cache, bytes; None: a share of what is free
    max_media_tokens: int = (
        16_384  # rows of image embeddings that running prompts may hold at once; one prompt's limit as well
    )
    max_waiting: int = 100_000  # requests waiting before new ones are refused as overload
    enable_prefix_caching: bool = True
    kv_dtype: str = "auto"  # "auto": the model's dtype; else "float32", "bfloat16", "float8_e4m3fn"

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_prefill_tokens",
            "page_size",
            "prefill_block",
            "max_media_tokens",
            "max_waiting",
            "num_pages",
            "kv_cache_bytes",
        ):
            value = getattr(self, name)
            if value is None and name in ("num_pages", "kv_cache_bytes"):
                continue
            number = as_integer(value)
            if number is None:
                raise ConfigError(f"{name} must be an integer, got {shown(value)}")
            if number < 1:
                raise ConfigError(f"{name} must be at least 1, got {number}")
            object.__setattr__(self, name, number)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching must be True or False, got {shown(self.enable_prefix_caching)}"
            )
        if self.prefill_block % self.page_size:
            raise ConfigError(
                f"prefill_block={self.prefill_block} must be a multiple of page_size={self.page_size}: a block fills whole pages"
            )
        if self.max_prefill_tokens % self.prefill_block:
            raise ConfigError(
                f"max_prefill_tokens={self.max_prefill_tokens} must be a multiple of prefill_block={self.prefill_block}"
            )
