"""When requests of an open loop come, whatever becomes of those before them."""

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from common.errors import InvalidArgument

Kind = Literal["poisson", "constant", "gamma"]


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """rate: requests a second. shape: of the gamma distribution of the gaps; below 1 requests come in bursts, 1 is
    Poisson, above 1 they are more even. The gaps' mean is 1 / rate in every case.
    """

    rate: float
    kind: Kind = "poisson"
    shape: float = 0.25

    def __post_init__(self) -> None:
        for name in ("rate", "shape"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name} must be above 0", field=name)

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds after the beginning, without end. The same draws stand behind every rate."""
        at = 0.0
        while True:
            yield at
            match self.kind:
                case "constant":
                    gap = 1.0
                case "poisson":
                    gap = rng.expovariate(1.0)
                case "gamma":
                    gap = rng.gammavariate(self.shape, 1.0 / self.shape)
            at += gap / self.rate
