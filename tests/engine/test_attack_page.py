"""What `engine attack` shows people: attacks.html and the printed table."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console
from synthetic_run import a_study, foreign, make_run

from attacks.export import write_npz
from engine.attack import attack
from engine.attack.table import print_attacked


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    study = a_study(mixes={"flip5": a_study().mixes["flip5"]}, arms=("bn", "nobn"), models=8)
    return make_run(tmp_path_factory.mktemp("runs") / "run", study, samples=200)


def test_the_page_shows_every_figure_and_loads_nothing(run, tmp_path):
    found = attack(run.path, ["lira_online,rmia_offline"], out=tmp_path, settings=["fpr=0.1"])
    page = (tmp_path / "attacks.html").read_text()
    drawn = [path.stem for path in found.written if path.suffix == ".svg"]
    assert len(drawn) == 1 + 3 + 1
    assert page.count("<svg") == len(drawn)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    for words in ("LiRA online", "RMIA offline", "bn", "nobn", "guessing", "jackknife intervals"):
        assert words in page
    refusal = "TPR at 10\N{NO-BREAK SPACE}% FPR is not given where there are fewer than 10"
    assert refusal in page
    table = page[page.index("<table") :]  # heads and names may break: it fits a narrow page
    for cell in ("TPR at<br>10\N{NO-BREAK SPACE}% FPR</th>", "<td>flip5/<wbr>bn</td>"):
        assert cell in table
    best = max((m for m in found.means if m.group == "all"), key=lambda m: m.auc)
    assert f"has the highest AUC: {best.auc:.3f} [{best.interval.low:.3f} to" in page
    for mean in found.means:
        shown = np.isfinite(mean.roc.tpr_A)
        assert shown.any()
        assert (mean.roc.fpr_A[shown] >= 1 / mean.non_members).all()
        assert np.isfinite(mean.roc.low_A[shown]).all()


@pytest.mark.parametrize("names", ["loss", "loss,lira_online,attack_r"])
def test_the_page_claims_nothing_where_nothing_is_found(names, tmp_path):
    loaded = foreign(samples=400)
    null = np.random.default_rng(1).normal(size=loaded.matrix.scores_MNQ.shape)
    nothing = dataclasses.replace(
        loaded, matrix=dataclasses.replace(loaded.matrix, scores_MNQ=null)
    )
    found = attack(write_npz(tmp_path / "x.npz", nothing), [names], out=tmp_path / "out")
    assert all(mean.interval.low <= 0.5 for mean in found.means)
    page = (tmp_path / "out/attacks.html").read_text()
    answer = re.findall(r'<p class="answer">(.*?)</p>', page)[0]
    best = max(found.means, key=lambda mean: mean.auc)
    told = f"No attack here tells members from non-members: the highest AUC is {best.auc:.3f} ["
    assert answer.startswith(told)


def test_intervals_are_shown_within_the_possible_and_kept_whole(tmp_path):
    loaded = foreign(models=8, samples=60)
    loaded.matrix.scores_MNQ[loaded.matrix.keep_MN] += 1
    path, told = write_npz(tmp_path / "x.npz", loaded), io.StringIO()
    found = attack(path, ["lira_online"], out=tmp_path / "out", settings=["fpr=0.1"])
    print_attacked(found, Console(file=told, width=150))
    page = (tmp_path / "out/attacks.html").read_text()
    (kept,) = json.loads((tmp_path / "out/means.json").read_text())
    auc, tpr = kept["interval"], kept["rates"][0]["interval"]
    assert min(auc["high"], tpr["high"]) > 1
    assert f"{auc['low']:.4f} to 1.0000" in told.getvalue()
    assert f"[{auc['low']:.3f} to 1.000]" in page
    assert f"{auc['low']:.4f} to 1.0000" in page
    assert f"{100 * tpr['low']:.2f} to 100.00" in page


@pytest.mark.parametrize(("low", "shown"), [(0.50003, "0.50003"), (0.49998, "0.49998")])
def test_a_printed_auc_shows_on_which_side_of_guessing_its_interval_ends(run, low, shown):
    found = attack(run.path, ["loss"], cells=["flip5/bn"])
    close = dataclasses.replace(found.means[0].interval, low=low, high=0.7)
    means = [dataclasses.replace(found.means[0], auc=0.6, interval=close)]
    told = io.StringIO()
    print_attacked(dataclasses.replace(found, means=means), Console(file=told, width=150))
    assert f"{shown} to 0.7000" in told.getvalue()
