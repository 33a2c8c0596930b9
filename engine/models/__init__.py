"""The networks that ship with the engine: ordinary modules of one model, built by name.

`engine.models.catalog` lists them without importing torch; `build` is looked up on first use so
that reading the catalog stays cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.models.shipped import build

__all__ = ["build"]


def __getattr__(name: str) -> Any:
    if name == "build":
        from engine.models.shipped import build

        return build
    raise AttributeError(f"module 'engine.models' has no attribute '{name}'")
