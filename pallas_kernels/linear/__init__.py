"""Products with weights in the checkpoint's [out, in] layout."""

from pallas_kernels.linear.api import linear

__all__ = ["linear"]
