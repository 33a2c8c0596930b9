"""Studies: every key checked, nearest valid one named, round trip through TOML, digest."""

import dataclasses
import tomllib

import pytest

from engine.studyfile import load_study, shipped_studies, to_toml


@pytest.fixture
def study_file(tmp_path):
    def write(text=""):
        path = tmp_path / "mine.toml"
        path.write_text(
            'question = "?"\nmodels = 4\n[data]\nname = "digits"\n[mixes.clean]\n'
            '[arms.bn]\nnet = "lenet"\nnorm = "batch"\n[arms.nobn]\nnet = "lenet"\n'
            'norm = "none"\n[train]\nepochs = 2\nbatch = 16\nlr = 0.1\n' + text
        )
        return str(path)

    return write


@pytest.mark.parametrize("name", shipped_studies())
def test_shipped_studies_are_valid_and_say_question_cost_and_expectation(name):
    study = load_study(name)
    assert study.name == name
    assert study.question.endswith("?")
    assert study.cost
    assert study.expected


@pytest.mark.parametrize("name", shipped_studies())
def test_a_resolved_study_reads_back_as_itself(name, tmp_path):
    study = load_study(name)
    copy = tmp_path / "study.toml"
    copy.write_text(to_toml(study))
    assert load_study(str(copy)) == study


def test_overrides_take_toml_values_and_bare_words(study_file):
    overrides = ["train.epochs=3", "mixes.flip.kind=flipped", "mixes.flip.share=0.05"]
    study = load_study(study_file(), [*overrides, "query.keep_epochs=[1,2]", "name=other"])
    assert study.train.epochs == 3
    assert study.mixes["flip"].share == 0.05
    assert study.query.keep_epochs == (1, 2)
    assert study.name == "other"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epoch=3", ("'train.epoch'", "did you mean 'train.epochs'?")),
        ("arms.bn.norm=bach", ("'bach'", "did you mean 'batch'?", "lenet")),
        ("arms.bn.net=lenett", ("'lenett'", "did you mean 'lenet'?")),
        ("data.name=cifar", ("'cifar'", "cifar10")),
        ("models=many", ("models is 'many'", "int")),
        ("models=0", ("models is 0", "1 to 1,000,000")),
        ("models=true", ("models is True", "int")),
        ("mixes.x.kind=ood", ("share",)),
        ("mixes.x.share=0.1", ("clean mix",)),
        ("arms.nobn.penalty.form=hinge", ("[arms.nobn.penalty]", "'lambda'")),
        ("data.path=/tmp/x", ("data.path is not used",)),
        ("query.views=19", ("query.views is 19", "1 to 18")),
        ("query.keep_epochs=[9]", ("9",)),
        ("attacks.contrasts=['bn - nobm']", ("'nobm'", "did you mean 'nobn'?")),
        ("attacks.contrasts=['bn - bn']", ("with itself",)),
        ("attacks.contrasts=['bn - nobn', 'bn - nobn']", ("listed twice",)),
        ("train.lr=inf", ("train.lr is inf", "finite")),
        ("resources.memory_gib=inf", ("resources.memory_gib is inf", "finite")),
        ("models=1000000000000", ("models is 1000000000000", "1,000,000")),
        ("name=../evil", ("'../evil' in name", "letters")),
        ("resources.stack=0", ("resources.stack is 0", "auto")),
        ("train=3", ("'train' is 3", "table")),
        ("train.lr.x=3", ("'train.lr' is no table",)),
        ("mixes.a/b.kind=clean", ("'a/b'",)),
        ("nonsense", ("key=value",)),
    ],
)
def test_a_bad_override_is_one_sentence_that_names_what_is_valid(study_file, override, words):
    with pytest.raises(ValueError) as error:
        load_study(study_file(), [override])
    sentence = str(error.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


def test_the_own_images_are_not_out_of_distribution(study_file):
    ood = ["mixes.x.kind=ood", "mixes.x.share=0.1", "mixes.x.source=digits"]
    with pytest.raises(ValueError, match=r"mixes\.x\.source is 'digits', the study's own images"):
        load_study(study_file(), ["data.name=digits", *ood])


def test_a_penalty_without_batch_norm_is_refused(study_file):
    text = '[arms.x]\nnet = "lenet"\nnorm = "none"\npenalty = { form = "hinge", lambda = 1.0 }\n'
    with pytest.raises(ValueError, match="needs norm = 'batch'"):
        load_study(study_file(text))


def test_an_unknown_study_and_a_missing_file_are_told_apart():
    with pytest.raises(ValueError, match="did you mean 'digits_bn_vs_nobn'"):
        load_study("digits_bn_vs_nobm")
    with pytest.raises(ValueError, match="no study file at"):
        load_study("missing/study.toml")


def test_the_digest_covers_what_changes_arrays_and_nothing_else(study_file):
    study = load_study(study_file())
    digest = study.digest("data")
    same = ["models=8", "resources.stack=2", "attacks.level=0.9", "question=why", "name=other"]
    for override in [*same, "data.loader=resident", "data.cache=/tmp/elsewhere"]:
        assert load_study(study_file(), [override]).digest("data") == digest, override
    others = ["seed=1", "train.lr=0.2", "query.views=2", "mixes.more.kind=clean", "data.limit=9"]
    for override in [*others, "arms.bn.lr=0.3", "membership.design=balanced"]:
        assert load_study(study_file(), [override]).digest("data") != digest, override
    assert study.digest("other data") != digest


def test_balanced_masks_do_not_grow_so_the_digest_counts_models(study_file):
    four, eight = (
        load_study(study_file(), ["membership.design=balanced", f"models={m}"]).digest("d")
        for m in (4, 8)
    )
    assert four != eight


def test_contrasts_default_to_the_first_arm_minus_the_others(study_file):
    study = load_study(study_file())
    assert study.contrasts() == (("bn", "nobn"),)
    attacks = dataclasses.replace(study.attacks, contrasts=("nobn - bn",))
    assert dataclasses.replace(study, attacks=attacks).contrasts() == (("nobn", "bn"),)


def test_toml_of_a_penalty_keeps_its_spelling(study_file):
    text = '[arms.p]\nnet = "lenet"\nnorm = "batch"\npenalty = { form = "square", lambda = 1.0 }\n'
    raw = tomllib.loads(to_toml(load_study(study_file(text))))
    assert raw["arms"]["p"]["penalty"]["lambda"] == 1.0


def test_a_study_file_with_dots_in_its_name_gives_a_folder_name(tmp_path):
    file = tmp_path / "digits.v2.toml"
    file.write_text(shipped_studies()["digits_bn_vs_nobn"].read_text())
    assert load_study(str(file)).name == "digits_v2"


def test_what_an_override_asks_else_is_told_with_the_question(study_file):
    file = study_file("[resources]\nstack = 2\n")
    told = {
        "train.epochs=3": "? (with train.epochs=3)",
        "data.loader=resident": "?",
        "models=6": "?",
        "question=Mine?": "Mine?",
    }
    for override, question in told.items():
        assert load_study(file, [override]).question == question
    shipped = "fashion_mnist_small"
    assert load_study(shipped, ["data.path=mine.npz", "models=4"]).expected
    changed = load_study(shipped, ["data.limit=100", "mixes.flip5.share=0.1"])
    assert changed.question.endswith("? (with data.limit=100, mixes.flip5.share=0.1)")
    assert (changed.cost, changed.expected) == ("", "")
