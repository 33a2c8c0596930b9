"""What a fault costs: decided without Ray, so tested without it."""

import pytest

from engine.executors.ray_ledger import Ledger
from engine.executors.ray_shard import Policy, Shard, Sign
from engine.executors.ray_travel import Board
from engine.plan import ModelRef


def ledger(*sizes, **policy):
    first, shards = 0, []
    for origin, size in enumerate(sizes):
        ids = range(first, first + size)
        stack = tuple(ModelRef(mix="clean", arm="bn", model_id=m) for m in ids)
        shards.append(Shard(origin=origin, stack=stack))
        first += size
    return Ledger(policy=Policy(**policy), shards=shards)


def sign(node="n1", age=0.0, epochs=0):
    return Sign(epochs=epochs, node=node, pid=1, age=age)


def models(attempt):
    return [ref.model_id for ref in attempt.shard.stack]


def test_every_shard_is_handed_out_once_and_counted_when_done():
    book = ledger(2, 2, 1)
    numbers = [book.take(0.0)[0] for _ in range(3)]
    assert book.take(0.0) is None
    assert all(book.succeeded(number, 1.0) for number in numbers)
    assert not book.unfinished
    assert (book.snapshot().done, book.snapshot().models_done) == (3, 5)


def test_a_lost_worker_costs_its_shard_only_and_at_most_three_repeats():
    book = ledger(1)
    for repeat in range(3):
        number, attempt = book.take(0.0)
        book.lost(number, "killed", killed=repeat == 1)
        assert (book.retrained, models(attempt)) == (repeat + 1, [0])
    book.lost(book.take(0.0)[0], "killed")
    assert (len(book.failed), book.unfinished) == (1, False)
    assert "lost 4 times, last: killed; if memory was short, let its node" in book.reasons[-1]


def test_memory_is_no_advice_where_no_worker_was_killed():
    book = ledger(1)
    for _ in range(4):
        book.lost(book.take(0.0)[0], "its result was lost")
    assert book.reasons[-1] == "given up: clean/bn model 0: lost 4 times, last: its result was lost"


def test_a_stack_lost_twice_is_halved_as_a_kernel_kills_for_memory_without_a_word():
    book, trained = ledger(4), []
    while (taken := book.take(0.0)) is not None:
        trained.append(models(taken[1]))
        book.lost(taken[0], "killed", killed=True)
    assert trained[:2] == [[0, 1, 2, 3]] * 2
    assert sorted(trained[2:]) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [len(shard.stack) for shard in book.failed] == [2, 2]
    assert "lost 4 times, last: killed; if memory was short, lower resources" in book.reasons[-1]


def test_out_of_memory_halves_a_stack_once():
    book = ledger(4)
    book.too_big(book.take(0.0)[0], "out of memory")
    (first, one), (second, two) = book.take(0.0), book.take(0.0)
    assert sorted([models(one), models(two)]) == [[0, 1], [2, 3]]
    book.too_big(first, "out of memory")
    assert len(book.failed) == 1
    assert book.reasons[-1].endswith("out of memory: lower resources.stack")
    assert book.succeeded(second, 1.0)
    assert book.snapshot().models_done == 2


def test_a_single_model_out_of_memory_needs_a_larger_share_of_its_node():
    book = ledger(1)
    book.too_big(book.take(0.0)[0], "out of memory")
    assert "out of memory: let its node train fewer at once (res" in book.reasons[-1]


def test_an_exception_is_narrowed_down_to_the_model_that_raises_it():
    book, trained = ledger(5), []
    while taken := book.take(0.0):
        number, attempt = taken
        if 3 in models(attempt):
            book.raised(number, "ValueError: model 3")
        else:
            trained += models(attempt)
            book.succeeded(number, 1.0)
    assert sorted(trained) == [0, 1, 2, 4]
    assert [models_ for shard in book.failed for models_ in (r.model_id for r in shard.stack)] == [
        3
    ]


def test_a_study_in_which_everything_fails_is_given_up():
    book = ledger(*[1] * 10, hopeless=3)
    for _ in range(3):
        assert not book.hopeless
        book.raised(book.take(0.0)[0], "ValueError: no")
    assert book.hopeless


def test_a_shard_is_cut_evenly_for_workers_with_less_memory():
    book, trained = ledger(8, 3), []
    for most, expected in ((3, [0, 1, 2]), (0, [3, 4, 5, 6, 7]), (2, [8, 9]), (9, [10])):
        number, attempt = book.take(0.0, most)
        assert (models(attempt), attempt.most) == (expected, most)
        trained.append(number)
    assert book.take(0.0) is None
    assert all(book.succeeded(number, 1.0) for number in trained)
    assert not book.unfinished
    assert book.retrained == 0
    assert (book.snapshot().models_done, book.snapshot().models_left) == (11, 0)
    book = ledger(8)
    assert [len(book.take(0.0, 7)[1].shard.stack) for _ in range(2)] == [4, 4]


def test_epochs_of_a_stack_that_was_cut_are_those_of_its_parts_on_average():
    book = ledger(8, 2)
    first, second = (book.take(0.0, most)[0] for most in (2, 6))
    assert book.hear({first: sign(epochs=4)}, 1.0) == [(0, 1)]
    assert book.hear({second: sign(epochs=2)}, 1.0) == [(0, 2)]
    book.succeeded(first, 2.0, epochs=8)
    assert (book.epochs(0), book.epochs(1)) == (3, 0)
    book.lost(second, "killed")
    assert book.epochs(0) == 3
    again, _ = book.take(3.0)
    assert book.hear({again: sign(epochs=0)}, 4.0) == [(0, 3)]
    book.succeeded(again, 9.0, epochs=8)
    assert book.epochs(0) == 8


def test_a_worker_that_is_done_but_whose_result_does_not_come_is_not_called_silent():
    book = ledger(1, 1, silence=10.0)
    (first, _), (second, _) = book.take(0.0), book.take(0.0)
    done = Sign(epochs=3, node="n1", pid=1, age=11.0, over=True)
    book.hear({first: done, second: sign(age=11.0)}, 11.0)
    found = book.suspects(11.0, ["n1"], free=False)
    assert found[first] == "no result arrived from n1/1 for 11 s"
    assert found[second] == "no sign of life from n1/1 for 11 s"


def test_a_beat_that_comes_late_does_not_undo_the_end():
    board = Board()
    board.hear(7, 2, "n1", 1)
    assert not board.signs([7])[7]["over"]
    board.hear(7, 3, "n1", 1, True)
    board.hear(7, 3, "n1", 1)
    assert board.signs([7])[7]["over"]
    assert board.signs([8]) == board.signs([7]) == {}


def test_only_shards_for_the_same_nodes_overtake_one_another():
    book = ledger(1, 1, silence=10.0)
    book.take(0.0, most=1)
    other, _ = book.take(0.0, most=2)
    book.hear({other: sign()}, 1.0)
    assert book.suspects(50.0, ["n1"], free=False) == {}


def suspicious(**policy):
    """Of two nodes n1 fell silent, and a shard is queued that keeps off it."""
    book = ledger(1, **policy)
    first, _ = book.take(0.0)
    book.hear({first: sign(node="n1", age=60.0)}, 60.0)
    book.abandon(first, "silent")
    book.check_places(["n1", "n2"])
    queued, attempt = book.take(60.0)
    assert attempt.avoids == {"n1"}
    assert book.stranded(61.0, free=True) == []
    return book, first, queued


def goes_anywhere(book, queued):
    assert book.attempts[queued].abandoned
    number, attempt = book.take(99.0)
    assert (models(attempt), attempt.avoids) == ([0], frozenset())
    book.lost(queued, "cancelled")
    assert book.succeeded(number, 100.0)
    assert (book.retrained, book.unfinished) == (1, False)


def test_a_queued_shard_goes_to_a_suspected_node_when_no_other_is_left():
    book, _, queued = suspicious()
    book.check_places(["n1"])
    assert book.stranded(62.0, free=False) == [queued]
    goes_anywhere(book, queued)


def test_a_suspected_node_that_is_heard_from_is_trusted_again():
    book, first, queued = suspicious()
    book.hear({first: sign(node="n1", age=61.0)}, 61.0)
    assert book.stranded(62.0, free=True) == []
    book.hear({first: sign(node="n1", age=0.5)}, 62.0)
    assert book.stranded(63.0, free=True) == [queued]
    goes_anywhere(book, queued)


def test_a_suspected_node_that_answers_is_trusted_again():
    book, _, queued = suspicious()
    book.trust("n1")
    assert book.stranded(62.0, free=False) == [queued]
    goes_anywhere(book, queued)


def test_a_suspected_node_is_left_alone_while_others_train():
    book = ledger(1, 1, 1, silence=10.0)
    first, other = (book.take(0.0)[0] for _ in range(2))
    book.hear({first: sign(node="n1", age=60.0), other: sign(node="n2")}, 60.0)
    book.abandon(first, "silent")
    queued, _ = book.take(60.0)
    assert book.stranded(99.0, free=True) == []
    book.succeeded(other, 99.0)
    assert book.stranded(108.0, free=True) == []
    assert book.stranded(110.0, free=True) == [queued]


def test_suspicion_ends_when_shards_wait_for_its_sake_and_nothing_is_trained():
    book, _, queued = suspicious(silence=10.0)
    assert book.stranded(69.0, free=True) == []
    assert book.stranded(71.0, free=False) == []
    assert book.stranded(71.0, free=True) == [queued]
    assert book.stranded(72.0, free=True) == []
    goes_anywhere(book, queued)


def test_a_shard_that_never_began_is_not_to_blame():
    book = ledger(1)
    for _ in range(6):
        book.abandon(book.take(0.0)[0], "not started")
    assert (book.failed, book.unfinished) == ([], True)


def test_the_first_valid_result_wins_and_the_second_is_dropped():
    book = ledger(1)
    first, _ = book.take(0.0)
    book.hear({first: sign()}, 0.0)
    book.abandon(first, "silent")
    second, _ = book.take(1.0)
    assert book.succeeded(first, 2.0)
    assert not book.succeeded(second, 3.0)
    assert (book.snapshot().done, book.snapshot().models_done) == (1, 1)


def test_a_second_training_is_needless_once_the_first_has_delivered_after_all():
    book = ledger(1, 1)
    first, _ = book.take(0.0)
    book.hear({first: sign()}, 0.0)
    book.abandon(first, "silent")
    second, _ = book.take(1.0)
    other, _ = book.take(1.0)
    assert book.needless() == []
    book.succeeded(first, 2.0)
    assert book.needless() == [second]
    assert book.needless() == []
    book.lost(second, "cancelled")
    assert book.take(3.0) is None
    assert book.succeeded(other, 4.0)
    assert not book.unfinished


def test_the_death_of_an_abandoned_attempt_changes_nothing():
    book = ledger(1)
    first, _ = book.take(0.0)
    book.abandon(first, "silent")
    second, _ = book.take(1.0)
    book.lost(first, "killed")
    assert book.take(2.0) is None
    assert book.succeeded(second, 3.0)
    assert not book.unfinished


@pytest.mark.parametrize(
    ("heard", "alive", "suspected"),
    [
        (sign(age=5.0), ["n1"], False),
        (sign(age=11.0), ["n1"], True),
        (sign(age=1.0), ["n2"], True),
    ],
)
def test_silence_and_dead_nodes_are_suspect(heard, alive, suspected):
    book = ledger(1, silence=10.0)
    number, _ = book.take(0.0)
    book.hear({number: heard}, 1.0)
    assert (number in book.suspects(2.0, alive, free=False)) == suspected


def test_a_queued_shard_is_suspect_only_while_a_worker_is_free():
    book = ledger(1, silence=10.0)
    number, _ = book.take(0.0)
    assert not book.suspects(1000.0, ["n1"], free=False)
    assert not book.suspects(99.0, ["n1"], free=True)
    assert number in book.suspects(101.0, ["n1"], free=True)


def test_a_queued_shard_is_suspect_when_later_ones_began_long_ago():
    book = ledger(1, 1, 1, silence=10.0)
    first, second, third = (book.take(0.0)[0] for _ in range(3))
    book.hear({second: sign()}, 5.0)
    assert not book.suspects(14.0, ["n1"], free=False)
    assert list(book.suspects(16.0, ["n1"], free=False)) == [first]
    book.succeeded(second, 16.0)
    assert third not in book.suspects(99.0, ["n1"], free=False)


def test_a_suspected_node_is_avoided_until_no_other_is_left():
    book = ledger(1)
    number, _ = book.take(0.0)
    book.hear({number: sign(node="n1")}, 0.0)
    book.abandon(number, "silent")
    book.check_places(["n1", "n2"])
    assert book.avoided == {"n1"}
    book.check_places(["n1"])
    assert book.avoided == set()


def test_nodes_that_refuse_the_numeric_plan_end_the_run_when_no_other_is_left():
    book = ledger(1)
    book.refused(book.take(0.0)[0], "n1", "isa is avx2: use other nodes")
    assert book.failed == []
    book.check_places(["n1", "n2"])
    assert book.avoided == {"n1"}
    with pytest.raises(
        RuntimeError, match=r"no node can go on with this run: isa is avx2: use other"
    ):
        book.check_places(["n1"])


def test_stragglers_are_named_once_and_go_on():
    book = ledger(1, 1, 1, 1, noticeable=0.0)
    numbers = [book.take(0.0)[0] for _ in range(4)]
    book.hear({number: sign() for number in numbers}, 0.0)
    for number in numbers[:3]:
        book.succeeded(number, 10.0)
    book.name_stragglers(20.0)
    assert book.reasons == []
    for _ in range(2):
        book.name_stragglers(40.0)
    assert book.reasons == ["clean/bn model 3: on n1/1 takes 4.0 times as long as usual"]
    assert book.succeeded(numbers[3], 50.0)


def test_a_lost_board_restarts_the_patience():
    book = ledger(1, silence=10.0)
    number, _ = book.take(0.0)
    book.hear({number: sign(age=60.0)}, 0.0)
    book.forgive(60.0)
    assert not book.suspects(61.0, ["n1"], free=True)


def test_time_left_and_speeds_follow_from_finished_shards():
    book = ledger(2, 2, 2)
    numbers = [book.take(0.0)[0] for _ in range(2)]
    book.hear({number: sign() for number in numbers}, 0.0)
    book.succeeded(numbers[0], 20.0)
    shown = book.snapshot()
    assert (shown.waiting, shown.running, shown.done) == (1, 1, 1)
    assert shown.seconds_left == pytest.approx(40.0)  # 4 models, 10 s each, one worker running
    assert shown.to_json()["speeds"] == {"n1/1": pytest.approx(360.0)}
