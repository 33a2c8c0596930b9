"""docs/attacks.md: every code block runs, every name in its tables exists."""

import csv
import dataclasses
import re
from pathlib import Path

import pytest

from attacks.interop import READERS
from engine.attack.groups import BY
from engine.attack.settings import USES, Settings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/attacks.md").read_text()


def test_every_code_block_runs_in_order():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 9
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/attacks.md", "exec"), names)


def test_the_tables_name_every_attack_setting_group_and_layout():
    first = re.findall(r"^\| `(\w+)`", TEXT, flags=re.MULTILINE)
    for name in (*USES, *READERS, "npz"):
        assert name in first, name
    assert f"--groups {','.join(BY)}" in TEXT
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", TEXT, flags=re.MULTILINE))
    for field in dataclasses.fields(Settings):
        default = field.default
        shown = rows[field.name].strip().strip("`")
        if isinstance(default, tuple):
            assert shown == ",".join(f"{value:g}" for value in default)
        elif isinstance(default, float):
            assert float(shown) == default
        else:
            assert shown == (str(default) or "empty")


def test_the_coverage_told_is_the_coverage_measured():
    with (ROOT / "bench/results/interval_coverage.csv").open() as file:
        measured = list(csv.DictReader(file))
    table = re.findall(
        r"^\| (\w+) \| (\d+) \| ([\w, ]+?) \| ([\d,]+) \| (\.\d+) \| (\.\d+) \|",
        TEXT,
        flags=re.MULTILINE,
    )
    told = {(d, m, s): (n.replace(",", ""), auc, gap) for d, m, s, n, auc, gap in table}
    assert told
    for row in measured:
        statistic, _, redrawn = row["statistic"].partition(", ")
        samples = "redrawn" if redrawn else "the same"
        studies, auc, gap = told[row["design"], row["models"], samples]
        assert studies == row["studies"]
        assert float(auc if statistic == "auc" else gap) == pytest.approx(
            float(row["coverage"]), abs=0.0006
        )
