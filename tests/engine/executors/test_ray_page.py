"""docs/ray.md shows the last results of the fault tests, all of them and nothing else."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import table

TESTS = Path(__file__).with_name("test_ray_faults.py").read_text()


def test_the_page_shows_the_recorded_rows():
    assert table.on_page() == table.markdown()


def test_every_recorded_fault_has_words_and_every_fault_with_words_is_recorded_by_a_test():
    assert set(table.rows()) <= set(table.FAULTS)
    for fault in table.FAULTS:
        name, _, training = fault.partition(", ")
        assert re.search(rf'"{name}"', TESTS), name
        assert training in ("", "real training")


def test_a_fault_without_a_row_is_called_untried(monkeypatch):
    rows = table.rows()
    monkeypatch.setattr(table, "rows", lambda: {k: v for k, v in rows.items() if k != "join_node"})
    assert "| a node joins | | | | untried | |" in table.markdown().splitlines()
    monkeypatch.setattr(table, "rows", dict)
    assert table.markdown().count("untried") == len(table.FAULTS)
