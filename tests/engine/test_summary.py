"""The table at the end of a run, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console
from synthetic_run import MIXES, a_study, make_run

from engine.analysis import analyse
from engine.report.summary import print_summary, tables
from engine.report.text import care


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return analyse(make_run(tmp_path_factory.mktemp("run")))


def printed(findings, terminal):
    stream = io.StringIO()
    print_summary(findings, Console(file=stream, force_terminal=terminal, width=80))
    return stream.getvalue()


def test_plain_output_has_a_row_for_each_mix_group_and_arm_and_ends_with_the_answer(findings):
    text = printed(findings, terminal=False)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[-1] == findings.answer
    assert sum(line.startswith("flip5  outliers") for line in lines) == 3 + 2
    auc = findings.cell("flip5", "nobn").attack("online", "clean").auc
    row = next(line for line in lines if line.startswith("flip5  clean     nobn "))
    assert f"{auc.value:.3f} ±" in row


def test_terminal_table_fits_eighty_columns_uncut(findings):
    text = printed(findings, terminal=True)
    assert "…" not in text
    assert "\x1b" in text


def test_paired_differences_carry_their_intervals(findings):
    _, rows = tables(findings)[1]
    difference = findings.contrasts[2].differences["auc/online/all"]
    row = next(r for r in rows if r[:3] == ("flip5", "all", "bn − nobn"))
    assert row[3].startswith(f"+{100 * difference.value:.1f} [+")


def test_models_that_never_left_chance_are_named(tmp_path):
    flip5 = {"flip5": MIXES["flip5"]}
    study = a_study(flip5, ("bn", "nobn"), models=8)
    assert "never left chance" not in printed(analyse(make_run(tmp_path / "fine", study)), False)
    gone = [("flip5", "nobn", 1), ("flip5", "nobn", 6)]
    findings = analyse(make_run(tmp_path / "stuck", study, stuck=gone))
    assert findings.cell("flip5", "nobn").untrained == (1, 6)
    assert findings.cell("flip5", "bn").untrained == ()
    assert "2 of 8 models of flip5/nobn never left chance" in printed(findings, False)
    compared = [row for row in findings.claims if "nobn" in row.arms]
    assert compared
    for row in compared:
        assert row.verdict == "not decidable here"
        assert row.why == "2 of 8 models of nobn never left chance"
    assert any(row.arms == ("bn",) and "chance" not in row.why for row in findings.claims)


def test_what_is_missing_is_said(tmp_path):
    flip5 = {"flip5": MIXES["flip5"]}
    gone = [("flip5", "bn", 1)]
    run = make_run(tmp_path, a_study(flip5, ("bn", "nobn"), models=4), diverged=gone)
    text = printed(analyse(run), terminal=False)
    assert "at least six" in text
    assert "1 of 4 models of flip5/bn diverged" in text
    assert "nan" not in text.lower().split()


def test_an_attack_refused_on_one_arm_is_said_of_that_arm(tmp_path):
    flip5 = {"flip5": MIXES["flip5"]}
    gone = [("flip5", "bn", m) for m in range(4)]
    study = a_study(flip5, ("bn", "nobn"), models=8)
    findings = analyse(make_run(tmp_path, study, diverged=gone))
    refused = findings.cell("flip5", "bn").refused
    assert f"– {refused} (flip5/bn)" in printed(findings, terminal=False).splitlines()
    assert f"as the attack on bn was refused: {refused}." in findings.answer
    assert f"The attack was refused on flip5/bn: {refused}." in care(findings)
