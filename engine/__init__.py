"""Shadow-training engine: studies, data, models, stacked training, storage and reports."""

import importlib.util
from pathlib import Path


def _check_neighbour(name: str) -> None:
    """Other distributions use the name `kernels` too: the one imported must lie beside us."""
    spec = importlib.util.find_spec(name)
    found = Path(spec.origin).resolve() if spec and spec.origin else None
    if found is None or found.parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"the package '{name}' found at {found} is not shadow-engine's: another distribution "
            "shadows it, so uninstall that one or use a separate environment"
        )


_check_neighbour("kernels")
_check_neighbour("attacks")
