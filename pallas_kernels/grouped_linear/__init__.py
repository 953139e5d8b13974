"""Products of groups of rows with a matrix of their own each, as mixtures of experts need."""

from pallas_kernels.grouped_linear.api import GroupedWeight, grouped_linear

__all__ = ["GroupedWeight", "grouped_linear"]
