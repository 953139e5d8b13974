"""How many devices a model is spread over, and along which axes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from jaxinfer.errors import ConfigError
from jaxinfer.values import as_integer, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Degrees of parallelism; their product is the number of devices.

    Attributes:
      dp: data: copies of the model, each with requests of its own.
      pp: pipeline: consecutive layers on each.
      ep: expert: experts of each mixture spread out.
      tp: tensor: heads, hidden widths and the vocabulary cut into as many parts.
    """

    dp: int = 1
    pp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = as_integer(value)
            if number is None or number < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {shown(value)}")
            object.__setattr__(self, name, number)

    @property
    def num_devices(self) -> int:
        return self.dp * self.pp * self.ep * self.tp
