"""jaxinfer: LLM inference on JAX/XLA.

The public face is `LLM`, `SamplingParams` and `RequestOutput`. They are imported on first use, so that
the parts that need no JAX (scheduler, pages, text, protocol) stay importable in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.api import LLM
    from jaxinfer.engine.request import CompletionOutput, Constraint, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Constraint", "RequestOutput", "SamplingParams"]


def __getattr__(name: str):
    if name == "LLM":
        from jaxinfer.api import LLM

        return LLM
    if name in ("CompletionOutput", "Constraint", "RequestOutput", "SamplingParams"):
        from jaxinfer.engine import request

        return getattr(request, name)
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
