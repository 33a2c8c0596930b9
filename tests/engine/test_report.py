"""The page: self-contained, the same bytes, every gap told, readable in the dark, torch-free."""

import dataclasses
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from synthetic_run import ARMS, KEEP, MIXES, OOD, a_study, make_run

from engine.analysis import analyse
from engine.report import render, write_report
from engine.report.figures import ARM_INKS, draw_all
from engine.study import Mix

FLIP5 = {"flip5": MIXES["flip5"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    study = a_study({**MIXES, **OOD}, query=KEEP)
    return make_run(tmp_path_factory.mktemp("run"), study)


@pytest.fixture(scope="module")
def findings(run):
    return analyse(run)


@pytest.fixture(scope="module")
def page(run, findings):
    return write_report(run, findings).read_text()


def plain(page):
    return page.replace("\N{NO-BREAK SPACE}", " ")


class Reader(HTMLParser):
    """Collects text, ids and whatever could load something; fails on unbalanced tags."""

    VOID = ("meta", "path", "use", "br", "rect", "line")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.text, self.tags = [], [], [], [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        named = dict(attributes)
        self.ids += [named["id"]] if "id" in named else []
        self.links += [v for n, v in attributes if n in ("src", "href", "xlink:href", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page.replace("\N{NO-BREAK SPACE}", " "))
    assert reader.open == []
    return reader


def test_page_is_well_formed_and_loads_nothing(page):
    reader = read(page)
    assert {"script", "link", "img", "iframe"}.isdisjoint(reader.tags)
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    assert not re.search(r"@import|url\((?!#)", page)


def test_page_leads_with_the_answer_and_holds_the_promised_parts(page, findings):
    text = " ".join(read(page).text)
    assert findings.answer in plain(page)
    gap = findings.contrasts[2].differences["outlier_gap"].value
    assert f"the difference is +{100 * gap:.1f} points" in page
    assert plain(page).index(findings.answer) < page.index("Claims") < page.index("ROC")
    for told in (findings.question, "eval mode", "0123456789ab", "2.14.1", "a processor"):
        assert told in text
    assert "cpu: conv2d; reference: max_pool" in text
    assert "lenet with batch norm, γ/σ penalty (hinge, λ = 0.01)" in text
    assert "20 of 400 samples carry a wrong label" in text
    assert "20 of 400 samples replaced by images of mnist with random labels" in text
    assert "6 epochs of SGD, batch 32, learning rate 0.05 (cosine)" in text
    for title in ("Learning", "Memorization", "γ/σ", "Left out", "How to read this"):
        assert title in text


def test_page_and_figures_have_the_same_bytes_every_time(run, findings, page):
    before = {p.name: p.read_bytes() for p in (run.path / "figures").iterdir()}
    assert write_report(run, findings).read_text() == page
    assert {p.name: p.read_bytes() for p in (run.path / "figures").iterdir()} == before
    assert "differences.svg" in before
    assert "learning_ood1.svg" in before


def test_figures_are_svg_without_dates_that_open_alone(run, page):
    for path in (run.path / "figures").iterdir():
        ElementTree.fromstring(path.read_text())
        assert "dc:date" not in path.read_text()
        assert "var(--" not in path.read_text()


def test_an_arm_has_one_colour_in_all_figures_and_the_dark_theme_swaps_it(findings, page):
    drawn = {d.name: d.svg for d in draw_all(findings)}
    for arm, ink in zip(ARMS, ARM_INKS, strict=False):
        for name in ("roc", "learning_flip5", "memorization"):
            assert ink in drawn[name], (arm, name)
    assert ARM_INKS[1] not in drawn["gamma_sigma"]
    svg = page[page.index("<svg") :]
    for ink in (*ARM_INKS, "#1c2024", "#fefefe"):
        assert svg.count(ink) == svg.count(f", {ink})")
    assert page.count("--arm-0:") == 2
    texts = re.findall(r"<text ([^>]*)>", svg)
    assert texts
    assert all("fill: var(--ink" in attributes for attributes in texts)


@pytest.mark.parametrize(
    ("models", "told"), [(2, "at least six"), (6, "too few models"), (1, "at least six")]
)
def test_small_runs_say_in_words_what_is_missing(tmp_path, models, told):
    run = make_run(tmp_path, a_study(FLIP5, ("bn", "nobn"), models=models))
    page = write_report(run, analyse(run)).read_text()
    text = " ".join(read(page).text)
    assert told in text
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)
    assert "None" not in text


def test_the_number_of_models_that_would_decide_is_for_a_fresh_study(tmp_path):
    study = a_study(FLIP5, ("bn", "nobn"), models=8)
    findings = analyse(make_run(tmp_path, study, shift={"bn": 1.44, "nobn": 1.4}))
    needed = [row.models_needed for row in findings.claims if row.models_needed]
    assert needed
    page = plain(render(findings, ()))
    assert page.count("models an arm, fixed beforehand, and a new seed") == len(needed)
    assert f"a fresh study would take about {needed[0]:,} models an arm" in page


def test_an_interval_of_no_width_that_decides_nothing_says_why_beside_the_verdict(tmp_path):
    study = a_study({"clean": Mix()}, ("bn",), models=8)
    findings = analyse(make_run(tmp_path, study, shift={"bn": 3.6}))
    (row,) = findings.claims
    assert (row.measures[0].estimate.ends, row.verdict) == ((1, 1), "not decidable here")
    page = plain(render(findings, ()))
    verdict = page[page.index("not decidable here</span>") :]
    reason = verdict.index("the same in all 4 groups of models, too few to tell")
    assert reason < verdict.index("a fresh study would take about 12 models an arm")
    assert "too few for a sign test to tell" in page


def test_dashes_point_to_reasons(tmp_path):
    run = make_run(tmp_path, a_study(FLIP5, ("bn", "nobn"), models=2))
    page = write_report(run, analyse(run)).read_text()
    cells = re.findall(r'<td class="n">(.*?)</td>', page)
    assert any(cell.startswith("–") for cell in cells)
    assert all("<sup>" in cell for cell in cells if cell.startswith("–"))


def test_diverged_models_are_counted_on_the_page(tmp_path):
    study = a_study(FLIP5, ("bn", "nobn"), models=8)
    gone = [("flip5", "nobn", m) for m in range(8)]
    run = make_run(tmp_path / "all", study, diverged=gone)
    page = write_report(run, analyse(run)).read_text()
    assert "8 of 8 models of arm nobn diverged" in page
    assert "The attack was refused on flip5/nobn: every model of nobn diverged." in page
    assert "no outliers" not in page
    assert "has no batch norm" not in page
    run = make_run(tmp_path / "one", study, diverged=gone[:1])
    assert "1 of 8 models" in write_report(run, analyse(run)).read_text()


def test_a_target_with_at_most_one_non_member_in_a_group_leaves_the_page_whole(tmp_path):
    mixes = {"flip1": Mix(kind="flipped", share=0.01)}
    for samples in (100, 400):
        study = a_study(mixes, ("bn", "nobn"), models=8, design="bernoulli")
        findings = analyse(make_run(tmp_path / str(samples), study, samples=samples))
        floor = findings.cell("flip1", "bn").attack("online", "outlier").roc.floor
        assert floor == 1
        assert "flip1: outliers" in next(d.svg for d in draw_all(findings) if d.name == "roc")


def test_models_at_chance_are_told_of_beneath_the_differences(tmp_path):
    study = a_study(FLIP5, ("bn", "nobn"), models=8)
    for stuck in ((), [("flip5", "nobn", 3)]):
        findings = analyse(make_run(tmp_path / str(len(stuck)), study, stuck=stuck))
        figure = next(d for d in draw_all(findings) if d.name == "differences")
        assert ("never left chance spoil some" in figure.caption) == bool(stuck)


def test_one_arm_on_clean_data(tmp_path):
    run = make_run(tmp_path, a_study({"clean": Mix()}, ("nobn",), models=8))
    page = write_report(run, analyse(run)).read_text()
    assert "LiRA tells members of nobn from non-members" in page
    assert "No claim is tested" in page
    text = " ".join(read(page).text).split("How to read this")[0]
    assert "no outliers" in text
    assert "outliers" not in text.replace("no outliers", "")


def test_query_mode_that_leaks_is_said_first(findings):
    leaky = dataclasses.replace(findings, query_mode="train_batch_stats")
    page = render(leaky, ())
    assert page.index("leaks the batch") < page.index("Claims")


def test_names_are_escaped(findings):
    hostile = dataclasses.replace(findings, question='<script>alert("x")</script>')
    assert "<script>" not in render(hostile, draw_all(hostile))


def test_report_imports_no_torch():
    code = "import sys, engine.analysis, engine.report, engine.report.summary, engine.export\n"
    code += "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_matplotlib_is_one_sentence(findings, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"shadow-engine\[report\]"):
        draw_all(findings)
