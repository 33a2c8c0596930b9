"""What an attack run found, on its way to the files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from engine.attack.means import Mean
from engine.attack.rows import Row
from engine.attack.settings import Settings
from engine.attack.sources import Source


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that the files and the page tell; arrays: those of scores.npz by key."""

    path: Path
    sources: Sequence[Source]
    attacks: Sequence[str]
    settings: Settings
    designs: Mapping[str, str]
    rows: Sequence[Row]
    means: Sequence[Mean]
    arrays: Mapping[str, npt.NDArray[Any]]

    def mean(self, source: str, attack: str, group: str) -> Mean | None:
        """One mean by name, or None."""
        for row in self.means:
            if (row.source, row.attack, row.group) == (source, attack, group):
                return row
        return None

    def mixes(self) -> dict[str, list[Source]]:
        """The sources by mix, in their order."""
        found: dict[str, list[Source]] = {}
        for source in self.sources:
            found.setdefault(source.mix, []).append(source)
        return found
