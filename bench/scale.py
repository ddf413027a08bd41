"""How much is measured: all of it, a few minutes of it, or just enough to see that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["Scale", "ScaleName"]

ScaleName = Literal["full", "quick", "smoke"]
T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """full: the sizes of the table. quick: smaller where that saves minutes. smoke: tiny, nothing is judged."""

    name: ScaleName

    def pick(self, full: T, quick: T, smoke: T) -> T:
        """The one for this scale."""
        return {"full": full, "quick": quick, "smoke": smoke}[self.name]

    @property
    def judged(self) -> bool:
        """Do figures of this scale get a verdict?"""
        return self.name != "smoke"
