"""Multi-head latent attention over paged latents, for decode and chunked prefill alike."""

from pallas_kernels.mla_attention.api import mla_attention

__all__ = ["mla_attention"]
