"""Scores: the statistic, the views, who is asked what, in which mode."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_studies import digits_data, refs, study_of

from engine import signals, train
from engine.outliers import sample_table
from engine.plan import MixTable
from engine.study import Arm, Mix, Query, Train

ARMS = {"bn": Arm(net="lenet", norm="batch")}
BRIEF = Train(epochs=1, batch=16, lr=0.05)


@given(st.integers(2, 12), st.integers(0, 2**32 - 1), st.floats(0.1, 300))
def test_phi_is_the_log_odds_of_the_label_without_saturating(classes, seed, scale):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(6, classes)) * scale
    labels = generator.integers(0, classes, 6)
    top = logits.max(1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    for row, (label, value) in enumerate(zip(labels, signals.phi(logits, labels), strict=True)):
        rest = np.logaddexp.reduce(np.delete(log_p[row], label))
        assert value == pytest.approx(log_p[row, label] - rest, rel=1e-9, abs=1e-9)
        assert signals.loss(np.array([value]))[0] == pytest.approx(
            -log_p[row, label], rel=1e-9, abs=1e-9
        )


def test_phi_of_logits_that_are_not_finite_is_nan_without_a_warning():
    logits = np.array([[np.nan, 1.0], [np.inf, np.inf]])
    assert np.isnan(signals.phi(logits, np.array([0, 1]))).all()


def test_the_eighteen_views_differ_and_the_first_is_plain():
    looks = signals.views(18, 28)
    assert len(set(looks)) == 18
    assert looks[0] == signals.View(dy=0, dx=0, flip=False)
    assert {(look.dy, look.dx) for look in looks} == {
        (y, x) for y in (-3, 0, 3) for x in (-3, 0, 3)
    }


def untrained(study, models, **kw):
    data = digits_data(study, samples=200, population=40, **kw)
    these = refs("bn", range(models))
    skeleton, state = train.start(study, these, data)
    state = state.to("cpu", torch.float32)
    torch.manual_seed(0)
    for name, buffer in state.buffers.items():  # running statistics of no batch in particular
        buffer.copy_(0.3 + 0.1 * torch.rand(buffer.shape) if "mean" in name else buffer * 1.7)
    return data, these, skeleton, state, signals.pictures(data, "cpu", torch.float32)


def test_every_view_shows_the_shifted_and_flipped_image():
    study = study_of(ARMS, BRIEF, query=Query(views=6))
    data, these, skeleton, state, shown = untrained(study, 2)
    asked = signals.query_stack(study, these, data, skeleton, state, shown)[1]["phi_NQ"]
    image = data.images_RHWC[:1, :, :, 0] / 255
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1)), mode="reflect")
    for q, (dy, dx, flip) in enumerate([(0, 0, 0), (0, 0, 1), (-1, 0, 0), (-1, 0, 1), (1, 0, 0)]):
        seen = padded[:, 1 + dy : 9 + dy, 1 + dx : 9 + dx]
        seen = seen[:, :, ::-1] if flip else seen
        pixels = torch.tensor((seen - data.mean_C[0]) / data.std_C[0]).float()[:, None]
        net = train.maker(study, "bn", data)().eval()
        net.load_state_dict(state.unstack(1))
        wanted = signals.phi(net(pixels).detach().numpy(), data.tables["flip10"].label_N[:1])
        assert asked[0, q] == pytest.approx(wanted[0], rel=1e-4), q


def test_eval_mode_asks_about_each_image_alone_and_batch_statistics_do_not():
    study = study_of(ARMS, BRIEF)
    _, _, skeleton, state, shown = untrained(study, 1)
    looks, labels = signals.views(1, 8), np.zeros((1, 30), dtype=np.int64)
    rows, others = np.arange(30), np.r_[np.arange(15), np.arange(100, 115)]

    def scores(chosen, statistics):
        answers = signals.ask(
            skeleton, state, shown, chosen, labels, looks=looks, batch_statistics=statistics
        )
        return answers.phi_MXQ[0, :15, 0]

    before = {name: buffer.clone() for name, buffer in state.buffers.items()}
    np.testing.assert_allclose(scores(rows, 0), scores(others, 0), rtol=1e-5)
    assert (
        np.abs(scores(rows, 30) - scores(others, 30)).max() > 1e-3
    )  # forty times what eval mode allows
    assert all(torch.equal(before[name], buffer) for name, buffer in state.buffers.items())


def test_a_last_batch_is_filled_up_from_the_first_images():
    study = study_of(ARMS, BRIEF)
    _, _, skeleton, state, shown = untrained(study, 1)
    looks = signals.views(1, 8)

    def scores(chosen):
        labels = np.zeros((1, len(chosen)), dtype=np.int64)
        return signals.ask(
            skeleton, state, shown, chosen, labels, looks=looks, batch_statistics=16
        ).phi_MXQ[0, :, 0]

    rows = np.arange(20)
    filled = scores(np.r_[rows, rows[:12]])
    np.testing.assert_array_equal(scores(rows), filled[:20])


def test_models_of_mixes_with_other_images_are_asked_about_their_own():
    mixes = {"clean": Mix(), "ood10": Mix(kind="ood", share=0.1, source="mnist")}
    study = study_of(ARMS, BRIEF, mixes=mixes)
    plain = study_of(ARMS, BRIEF, mixes={"clean": Mix()})
    data = digits_data(plain, samples=200, population=40)
    clean = data.tables["clean"]
    table = sample_table(mixes["ood10"], study.seed, clean.label_N, 10, source_count=40)
    replaced = np.where(table.kind_N == 2, 200 + table.source_N, np.arange(200))
    data.tables["ood10"] = MixTable(
        label_N=table.label_N,
        true_label_N=table.true_label_N,
        kind_N=table.kind_N,
        image_N=replaced,
        keep_MN=clean.keep_MN,
    )
    together = [*refs("bn", [1], "ood10"), *refs("bn", [1, 2], "clean")]
    results = train.run_stack(study, together, data, "cpu", lambda epoch: None)
    for result in results:
        alone = train.run_stack(study, [result.ref], data, "cpu", lambda epoch: None)[0]
        for name, value in alone.arrays.items():
            np.testing.assert_array_equal(value, result.arrays[name], err_msg=name)
    other = table.kind_N == 2
    phi_ood, phi_clean = (results[i].arrays["phi_NQ"] for i in (0, 1))
    assert (phi_ood[other] != phi_clean[other]).all()
