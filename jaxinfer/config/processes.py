"""Which processes run a model together."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxinfer.errors import ConfigError
from jaxinfer.values import as_integer, shown

DETECT = "auto"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """How a process finds the others, as jax.distributed does. Without a coordinator there are no others.

    Attributes:
      coordinator: HOST:PORT of process 0, or "auto": what SLURM, Kubernetes or Open MPI say, which JAX knows how to ask.
      num_processes, process_id: how many there are and which one this is, from 0; not given with "auto".
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        count, index = as_integer(self.num_processes), as_integer(self.process_id)
        if self.coordinator is None or self.coordinator == DETECT:
            if (self.num_processes, self.process_id) != (None, None):
                raise ConfigError(
                    "num_processes and process_id need coordinator=HOST:PORT, process 0's address"
                )
            return
        found = _ADDRESS.fullmatch(self.coordinator) if isinstance(self.coordinator, str) else None
        if not found or not 0 < int(found[2]) < 2**16:
            raise ConfigError(f"coordinator must be HOST:PORT or {DETECT}, got {shown(self.coordinator)}")
        if count is None or count < 1:
            raise ConfigError(
                f"num_processes must be an integer of at least 1, got {shown(self.num_processes)}"
            )
        if index is None or not 0 <= index < count:
            raise ConfigError(f"process_id must be 0 to {count - 1}, got {shown(self.process_id)}")

    @property
    def several(self) -> bool:
        return self.coordinator is not None and self.num_processes != 1
