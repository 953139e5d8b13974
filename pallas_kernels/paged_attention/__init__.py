"""Attention of query rows over a paged KV cache, for decode and chunked prefill alike."""

from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
