"""GPUs that are not there: devices that programs can be compiled for, on a machine without any.

`targets/` describes each kind as XLA does. The whole of XLA's GPU pipeline runs, ptxas included, and `memory_analysis()` of the result is what the
real device would need. Only autotuning, which measures, is left out.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from jaxinfer.errors import ConfigError

_TARGETS = Path(__file__).parent / "targets"


@dataclass(frozen=True, slots=True)
class Topology:
    """So many GPUs of one kind in one machine.

    Attributes:
      target: XLA's description of one, a text proto (`stream_executor.GpuTargetConfigProto`).
    """

    kind: str
    count: int
    target: str

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return self._figure("device_memory_size")

    @property
    def memory_bandwidth(self) -> int:
        """Of one device, bytes a second."""
        return self._figure("memory_bandwidth")

    def devices(self) -> list[Any]:
        """Devices for a mesh whose programs are compiled and never run. ConfigError when the CUDA plugin cannot be used.

        Needs the extra cuda12, and JAX_PLATFORMS=cpu where there is no GPU.
        """
        # Read when JAX starts: without it the plugin refuses machines that have no driver.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        try:
            found = topologies.get_topology_desc(
                "", platform="cuda", target_config=self.target, topology=f"1x{self.count}x1"
            )
        except Exception as e:  # a missing plugin and an unusable one raise whatever comes
            reason = (str(e).splitlines() or [repr(e)])[0]
            raise ConfigError(
                f"cannot compile for {self.count}x{self.kind}: install jaxinfer[cuda12], and set JAX_PLATFORMS=cpu and "
                f"JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before Python starts ({reason})"
            ) from e
        return list(found.devices)

    def _figure(self, name: str) -> int:
        found = re.search(rf"\b{name}: (\d+)", self.target)
        assert found is not None, f"targets/{self.kind}.txtpb has no {name}"
        return int(found[1])


def kinds() -> list[str]:
    """Names of the GPUs that are described."""
    return sorted(path.stem for path in _TARGETS.glob("*.txtpb"))


def topology(name: str) -> Topology:
    """The topology of a name such as "8xh100", or "h100" for one. ConfigError for any other."""
    found = re.fullmatch(r"(?:(\d{1,5})x)?([a-z0-9]+)", name.strip().lower())
    if found is None or found[2] not in kinds() or found[1] == "0":
        raise ConfigError(
            f"topology {name!r} is not COUNTxKIND, such as 8xh100; known kinds: {', '.join(kinds())}"
        )
    target = (_TARGETS / f"{found[2]}.txtpb").read_text()
    return Topology(found[2], int(found[1] or 1), target)
