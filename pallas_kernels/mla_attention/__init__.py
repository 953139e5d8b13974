"""Multi-head latent attention over paged latents, for decode and chunked prefill alike."""

from pallas_kernels.mla_attention.api import mla_attention
from pallas_kernels.mla_attention.reference import latent_attention

__all__ = ["latent_attention", "mla_attention"]
