"""Keeps what needs an interpreter or a stub driver from the start out of ordinary processes."""

import os

if "KERNEL_TIER" not in os.environ:
    collect_ignore_glob = ["checks/*", "triton_*.py", "aot.py", "moved.py", "mutants.py"]
