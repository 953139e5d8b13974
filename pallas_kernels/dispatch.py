"""How every op with a C++ kernel chooses between it and XLA."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels import native

IMPLEMENTATIONS = ("auto", "reference", "native")


def choose(
    impl: str,
    *arrays: jax.Array,
    kernel: Callable[..., jax.Array],
    reference: Callable[..., jax.Array],
    fits: bool,
) -> jax.Array:
    """kernel(*arrays) or reference(*arrays).

    Args:
      impl: "reference"; "native", an error where the kernel cannot serve; or "auto": the kernel on CPU where it can, else XLA.
        The platform is the one that is compiled for, which may be another than JAX's default.
      fits: the kernel can do these shapes and dtypes.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "reference" or not fits or not native.available():
        if impl == "native":
            raise ValueError(
                f"the C++ kernel cannot do {' by '.join(f'{a.dtype}{a.shape}' for a in arrays[:2])}"
            )
        return reference(*arrays)
    if impl == "native":
        return kernel(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=kernel, default=reference)
