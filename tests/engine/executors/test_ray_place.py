"""Places for shards, counted on made-up nodes; no Ray needed."""

import dataclasses
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from engine.cost import CPU_STACK_SMALL
from engine.executors import ray_place
from engine.executors.base import Job
from engine.executors.ray import _Session
from engine.executors.ray_ledger import Ledger
from engine.executors.ray_place import (
    KIND,
    MOST,
    NODE,
    Demand,
    Offers,
    bytes_per_shard,
    main_kind,
    models_that_fit,
    slots,
    survey,
)
from engine.executors.ray_shard import Policy, Shard, Sign
from engine.executors.ray_travel import Ticket
from engine.plan import ModelRef
from engine.prepare import prepare
from engine.study import Resources
from engine.studyfile import load_study

GIB = 2**30
TICKET = Ticket("digest", "folder", None)


def node(name, cpus, gpus=0, kind="", alive=True, gib=8):
    labels = {KIND: kind} if kind else {}
    resources = {"CPU": cpus, "memory": gib * GIB, **({"GPU": gpus} if gpus else {})}
    return {"NodeID": name, "Alive": alive, "Resources": resources, "Labels": labels}


NODES = [
    node("head", 0),
    node("cpu", 8),
    node("two", 16, 2, "A100"),
    node("four", 3, 4, "H100"),
    node("old", 4, 1),
    node("gone", 64, 8, "B200", alive=False),
]


@pytest.mark.parametrize(
    ("demand", "places"),
    [
        (Demand(), {"cpu": 8, "two": 16, "four": 3, "old": 4}),
        (Demand(shards_per_gpu=1), {"two": 2, "four": 3, "old": 1}),
        (Demand(shards_per_gpu=3), {"two": 6, "four": 3, "old": 3}),
        (Demand(shards_per_gpu=1, kind="H100"), {"four": 3}),
        (Demand(shards_per_gpu=1, kind="B200"), {}),
    ],
)
def test_a_shard_takes_a_cpu_and_a_gpu_or_its_share_of_the_right_kind(demand, places):
    assert slots(NODES, demand) == places


@pytest.mark.parametrize("per_gpu", range(1, 12))
def test_as_many_shares_fit_on_a_gpu_as_planned(per_gpu):
    share = Demand(shards_per_gpu=per_gpu).resources()["num_gpus"]
    assert share * per_gpu <= 1 < share * (per_gpu + 1)
    assert round(share * 10_000) == pytest.approx(share * 10_000)  # what Ray keeps


def test_the_kind_with_most_gpus_is_used_and_the_dead_do_not_count():
    assert main_kind(NODES) == "H100"
    assert main_kind([node("a", 1, 1), node("b", 1)]) == ""
    assert main_kind([]) == ""


def test_processes_that_share_a_gpu_share_its_memory_and_pay_for_their_contexts():
    assert bytes_per_shard(80 * GIB, 1) == int(72 * GIB)
    assert 2 * bytes_per_shard(80 * GIB, 2) == 71 * GIB
    assert bytes_per_shard(GIB, 4) < 0  # the planner then says what one model needs


def fake_ray(nodes):
    total = sum(n["Resources"].get("GPU", 0) for n in nodes if n["Alive"])
    return SimpleNamespace(
        nodes=lambda: nodes, cluster_resources=lambda: {"GPU": total} if total else {}
    )


def test_more_processes_than_gpus_are_planned_as_shares_with_less_memory_each(monkeypatch):
    monkeypatch.setattr(ray_place, "_ask_workers", lambda *_: ({}, {}, 80 * GIB))
    alone, shared = (survey(fake_ray(NODES), "auto", p) for p in ("auto", 6))
    assert (alone.demand, alone.slots) == (Demand(shards_per_gpu=1, kind="H100"), 3)
    assert shared.demand == Demand(shards_per_gpu=2, kind="H100")
    assert shared.bytes_per_slot == bytes_per_shard(80 * GIB, 2) < alone.bytes_per_slot / 2
    on_cpu = survey(fake_ray(NODES), "cpu", 6)
    assert (on_cpu.demand, on_cpu.slots) == (Demand(), 31)
    assert on_cpu.bytes_per_slot == int(0.9 * 8 * GIB // 3)


@pytest.mark.parametrize(
    ("nodes", "device", "words"),
    [
        ([node("a", 4)], "cuda", "Ray finds no GPU: add nodes that have one or use --device cpu"),
        ([node("a", 0)], "auto", "no node of the cluster has a CPU to offer"),
        ([node("a", 0, 4)], "auto", "no node of the cluster has a CPU and a GPU to offer"),
        ([node("a", 4)], "tpu", "known are auto, cpu, cuda"),
    ],
)
def test_clusters_that_cannot_train_the_study_are_refused_in_one_sentence(nodes, device, words):
    with pytest.raises(ValueError, match=words):
        survey(fake_ray(nodes), device)


@pytest.mark.parametrize(("others", "selector"), [([], {}), (["b"], {NODE: "!in(a)"})])
def test_a_suspected_node_is_kept_off_only_while_there_is_another(others, selector):
    ray = MagicMock()
    ray.nodes.return_value = [node(name, 1) for name in ("a", *others)]
    stack = (ModelRef(mix="clean", arm="bn", model_id=0),)
    ledger = Ledger(policy=Policy(), shards=[Shard(origin=0, stack=stack)])
    job = MagicMock()
    job.data.table = None
    session = _Session(ray, MagicMock(), TICKET, Offers(Demand(), lambda nbytes: MOST), job, ledger)
    session.submit()
    ledger.hear({1: Sign(epochs=0, node="a", pid=1, age=99.0)}, 0.0)
    ledger.abandon(1, "silent")
    session.submit()
    assert set(ledger.attempts) == {1, 2}
    assert ray.remote.return_value.options.call_args.kwargs["label_selector"] == selector


def per_gib(nbytes):
    """A model a GiB, four at most."""
    return min(4, nbytes // GIB)


def test_nodes_are_told_apart_by_how_many_models_a_worker_holds():
    offers = Offers(Demand(), per_gib)
    offers.see([node("a", 2, gib=16), node("b", 1, gib=3), node("c", 1, gib=64), node("d", 9)])
    assert list(offers.by_size().items()) == [(4, {"a": 2, "c": 1}), (2, {"b": 1})]
    assert offers.slots == {"a": 2, "b": 1, "c": 1}  # nothing fits on d
    assert offers.labels({"a": 2, "c": 1}, ["c", "b"]) == {NODE: "in(a)"}
    offers.see([node("a", 2, gib=16), node("c", 1, gib=64), node("d", 9)])
    assert list(offers.by_size()) == [4]
    assert offers.labels({"a": 2, "c": 1}, []) == {NODE: "!in(d)"}
    assert offers.labels({"a": 2, "c": 1}, ["a", "x"]) == {NODE: "!in(a,d)"}
    offers.see([node("d", 9)])
    assert offers.slots == {"d": 9}


def test_larger_nodes_are_given_larger_stacks():
    ray, job = MagicMock(), MagicMock()
    ray.nodes.return_value = [node("a", 1, gib=5), node("b", 2, gib=3)]
    job.data.table = None
    refs = [ModelRef(mix="m", arm="x", model_id=i) for i in range(36)]
    shards = [Shard(origin=i, stack=tuple(refs[4 * i : 4 * i + 4])) for i in range(9)]
    ledger = Ledger(policy=Policy(), shards=shards)
    session = _Session(ray, MagicMock(), TICKET, Offers(Demand(), per_gib), job, ledger)
    ray.remote.return_value.options.reset_mock()
    session.submit()
    calls = ray.remote.return_value.options.call_args_list
    selectors = [call.kwargs["label_selector"] for call in calls]
    sizes = [len(attempt.shard.stack) for attempt in ledger.attempts.values()]
    large, small = ({NODE: f"in({name})"} for name in "ab")
    assert sizes == [4, 1, 1, 2, 4, 1, 1]  # 2 are left of a stack that was cut for b
    assert selectors == [large, small, small, large, large, small, small]
    session.submit()
    assert len(ledger.attempts) == 7


@pytest.mark.parametrize("wanted", ["auto", 6])
def test_what_fits_is_what_the_planner_reckons_for_one_worker(wanted):
    study = load_study("digits_bn_vs_nobn", ["data.limit=240", "data.loader=resident"])
    study = dataclasses.replace(study, resources=Resources(stack=wanted))
    job = Job(study=study, data=prepare(study).data, device="cpu", kernel_plan={})
    fits = [models_that_fit(job, nbytes) for nbytes in range(0, 24 * 2**20, 2**19)]
    assert fits == sorted(fits)
    assert fits[0] == 0
    assert set(fits) == set(range(fits[-1] + 1))
    assert fits[-1] == (CPU_STACK_SMALL if wanted == "auto" else 6)
    named = dataclasses.replace(study, resources=Resources(memory_gib=0.1))
    assert models_that_fit(dataclasses.replace(job, study=named), 0) == MOST


def test_a_node_that_puts_down_its_frozen_worker_is_trusted_again():
    ray, job = MagicMock(), MagicMock()
    ray.nodes.return_value = [node("a", 1), node("b", 1)]
    ray.get.return_value = {}
    ray.wait.return_value = ([], [])
    job.data.table = None
    stack = (ModelRef(mix="clean", arm="bn", model_id=0),)
    ledger = Ledger(policy=Policy(silence=9.0), shards=[Shard(origin=0, stack=stack)])
    session = _Session(ray, MagicMock(), TICKET, Offers(Demand(), lambda nbytes: MOST), job, ledger)
    session.submit()
    ledger.hear({1: Sign(epochs=0, node="a", pid=1, age=99.0)}, 0.0)
    session._looked = time.monotonic() - 2
    session.look()
    session.submit()
    assert (ledger.avoided, ledger.attempts[2].avoids) == ({"a"}, {"a"})
    (asked,) = session._asked
    ray.wait.return_value = ([asked], [])
    session._looked = time.monotonic() - 2
    session.look()
    assert ledger.avoided == set()
    assert ledger.attempts[2].abandoned
    session.submit()
    assert ledger.attempts[3].avoids == frozenset()
