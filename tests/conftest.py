"""Fixtures for all tests."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests run beside each other: OpenMP threads of one would spin while those of another wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FOLDER = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """`real_data("cifar10" | "mnist" | "fashion_mnist")`: the path of that set's .npz.

    Brings the sets where they are missing (a minute, once).
    """

    def path(name: str) -> Path:
        file = FOLDER / f"{name}.npz"
        if not file.is_file():
            fetch = ["bash", str(FOLDER / "fetch.sh"), str(FOLDER)]
            done = subprocess.run(fetch, stdin=subprocess.DEVNULL, check=False)
            if done.returncode != 0 or not file.is_file():
                pytest.fail(f"{file} is missing and could not be brought: run {' '.join(fetch)}")
        return file

    return path
