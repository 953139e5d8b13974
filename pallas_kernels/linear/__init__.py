"""Products with weights in the checkpoint's [out, in] layout."""

from pallas_kernels.linear.api import Weight, linear
from pallas_kernels.linear.blocks import BLOCK, BlockKind, BlockWeights

__all__ = ["BLOCK", "BlockKind", "BlockWeights", "Weight", "linear"]
