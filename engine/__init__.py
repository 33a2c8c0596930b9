"""Shadow-training engine: studies, data, models, stacked training, storage and reports."""

from pathlib import Path

import kernels

if Path(kernels.__path__[0]).resolve().parent != Path(__file__).resolve().parent.parent:
    raise ImportError(
        f"another distribution shadows the package 'kernels' (found at {kernels.__path__[0]}); "
        "shadow-engine needs its own: uninstall the other one or use a separate environment"
    )
