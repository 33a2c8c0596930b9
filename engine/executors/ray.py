"""Training on a Ray cluster: one task a stack, every result written by the driver alone.

Ray schedules; this file submits, listens and decides with `ray_ledger` what a fault costs. Ray's
own retries are off, because they repeat memory faults without end and without a word.
"""

import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.executors import ray_place, ray_travel, ray_worker
from engine.executors.base import Job, OnProgress, OnResult, Stack, Watch
from engine.executors.ray_check import checked
from engine.executors.ray_cluster import Where, connected, in_job
from engine.executors.ray_interrupt import Deadline, Interrupts
from engine.executors.ray_ledger import Ledger
from engine.executors.ray_metrics import displays
from engine.executors.ray_place import Demand, Limit
from engine.executors.ray_shard import Attempt, Policy, Shard, Sign
from engine.executors.ray_travel import Ticket
from engine.executors.ray_worker import Order, OutOfMemory, Train, TrainStack, WrongMachine, sent
from engine.plan import ModelResult
from engine.study import Study

__all__ = ["RayExecutor", "RayPlace", "Where", "opened"]

POLL_SECONDS = 0.5
LOOK_SECONDS = 1.0
"""Between looks at signs of life and at the cluster's nodes."""

TASK = f"{ray_worker.__name__}:{ray_worker.task.__name__}"

FETCH_SECONDS = 120.0
"""A result that does not arrive within this is lost."""

RAY_DIED = (
    "Ray on this machine died: finished models are kept; run the same command again (a cluster "
    "that you started yourself has to be started again before)"
)


@contextlib.contextmanager
def opened(study: Study, where: Where, *, device: str, out: Path) -> Iterator["RayPlace"]:
    """Connect to a cluster for one study.

    Raises:
        ValueError: the cluster cannot be used or has not what the study asks for.
        RuntimeError: Ray is missing or did not start.
    """
    if in_job() and not out.is_absolute():
        raise ValueError(
            f"--out '{out}' is relative, and a job's folder is deleted with the job: give an "
            "absolute path on the head"
        )
    wanted = study.resources.processes
    if where.cpus is None and wanted != "auto":
        where = dataclasses.replace(where, cpus=wanted)
    own = (where.address or ("auto" if in_job() else "local")) == "local"
    with Deadline(), connected(where) as ray:
        ticket = ray_travel.ticket(own_path=own)
        yield RayPlace(ray, ray_place.survey(ray, device, wanted, ticket), ticket)


class RayPlace:
    """A connected cluster: what planning asks about it, and its executor."""

    def __init__(self, ray: Any, found: ray_place.Survey, ticket: Ticket) -> None:
        self._ray, self.found, self.device = ray, found, found.device
        self._ticket = ticket

    def workers(self, study: Study) -> int:
        """Shards that the cluster trains at once now; more when nodes join."""
        return self.found.slots

    def fit(self, study: Study, workers: int) -> Study:
        """The study with as much memory as the largest worker has, times the workers.

        Workers with less are given fewer models at a time.
        """
        if study.resources.memory_gib:
            return study
        gib = self.found.bytes_per_slot * workers / 2**30
        return dataclasses.replace(
            study, resources=dataclasses.replace(study.resources, memory_gib=gib)
        )

    def numerics(self) -> Mapping[str, Any]:
        """As found on a worker; every worker compares itself with it before it trains."""
        return self.found.numerics

    def hardware(self) -> Mapping[str, Any]:
        """Of that worker, with the size of the cluster at the start."""
        return {**self.found.hardware, "nodes": self.found.nodes, "slots": self.found.slots}

    def executor(self, workers: int, watch: Watch) -> "RayExecutor":
        """Trains on all nodes that the cluster has at any time, whatever `workers` says."""
        found, train = self.found, TrainStack(numerics=self.found.numerics)
        limit = ray_place.models_that_fit if found.device == "cpu" else None
        return RayExecutor(
            self._ray,
            train,
            watch,
            demand=found.demand,
            limit=limit,
            ticket=self._ticket,
            close=True,
        )


class RayExecutor:
    """Trains stacks as Ray tasks; `train` is what a worker does with one.

    demand: what a stack occupies, by default one CPU. limit: how many models fit into a worker's
    memory; larger stacks are cut for it. ticket: the sources that workers must have, by default
    those of this process. close: let go of the cluster after the last stack, before anything else
    is done.
    """

    name = "ray"

    def __init__(
        self,
        ray: Any,
        train: Train,
        watch: Watch,
        *,
        demand: Demand | None = None,
        limit: Limit | None = None,
        policy: Policy | None = None,
        ticket: Ticket | None = None,
        close: bool = False,
    ) -> None:
        self._ray, self._train, self._policy = ray, train, policy or Policy()
        self._demand, self._limit = demand or Demand(), limit or ray_place.unlimited
        self._ticket = ticket or ray_travel.ticket(own_path=False)
        self._watch, self._close = watch, close

    def run(
        self, job: Job, stacks: Sequence[Stack], on_result: OnResult, on_progress: OnProgress
    ) -> None:
        """Train every stack; see `Executor.run`.

        Raises:
            RuntimeError: some stacks could not be trained; all others are handed over.
            KeyboardInterrupt, SystemExit: SIGINT or SIGTERM, within seconds.
        """
        shards = [Shard(origin=i, stack=stack) for i, stack in enumerate(stacks)]
        ledger = Ledger(policy=self._policy, shards=shards)
        shows, told = displays(), 0
        offers = ray_place.Offers(self._demand, functools.partial(self._limit, job))
        session = _Session(self._ray, self._train, self._ticket, offers, job, ledger)
        with Interrupts() as interrupts:
            try:
                while ledger.unfinished and not ledger.hopeless:
                    interrupts.check()
                    session.submit()
                    for origin, results in session.receive():
                        on_progress(origin, ledger.epochs(origin))
                        on_result(results)
                        del results
                    for moved in session.look():
                        on_progress(*moved)
                    for sentence in ledger.reasons[told:]:
                        self._watch.say(sentence)
                    told = len(ledger.reasons)
                    if session.fresh or not ledger.unfinished:
                        shown = ledger.snapshot()
                        self._watch.figures(shown.to_json())
                        for display in shows:
                            display.show(shown)
            finally:
                session.end()
                if self._close:
                    self._ray.shutdown()
        self._watch.figures(ledger.snapshot().to_json())
        if ledger.failed:
            raise RuntimeError(ledger.failure())


class _Session:
    """The Ray side of one run: references in flight and what came of them."""

    def __init__(
        self,
        ray: Any,
        train: Train,
        ticket: Ticket,
        offers: ray_place.Offers,
        job: Job,
        ledger: Ledger,
    ) -> None:
        self._ray, self._offers, self._job = ray, offers, job
        self._ledger, self._run = ledger, uuid.uuid4().hex
        self._numbers: dict[Any, int] = {}
        self._asked: dict[Any, str] = {}
        self._task = ray_place.launcher(ray, ticket, TASK, train)
        self._shared = ray.put(sent(job))
        self._board = _board(ray)
        self._looked, self._result_bytes = 0.0, 0
        self.fresh = False
        offers.see(ray.nodes())

    def submit(self) -> None:
        """Keep a quarter more shards submitted than the cluster trains at once.

        Nodes whose workers hold equally many models share a queue, which is Ray's. Every worker has
        a shard before others are queued.
        """
        self._ledger.check_places(self._offers.slots)  # what keeps off all would wait for ever
        groups = self._offers.by_size()
        for most, places in groups.items():
            self._fill(most, places, sum(places.values()))
        for most, places in groups.items():
            slots = sum(places.values())
            window = max(slots + 2, slots + slots // 4)
            if self._result_bytes:
                window = min(window, max(slots, 2**30 // self._result_bytes))
            self._fill(most, places, window)

    def _fill(self, most: int, places: Mapping[str, int], window: int) -> None:
        ledger = self._ledger
        if set(places) <= ledger.avoided:
            return
        live = sum(a.most == most and not a.abandoned for a in ledger.attempts.values())
        while live < window and (taken := ledger.take(time.monotonic(), most)):
            self._start(*taken, self._offers.labels(places, ledger.avoided))
            live += 1

    def _start(self, number: int, attempt: Attempt, labels: dict[str, str]) -> None:
        order = Order(run=self._run, number=number, stack=attempt.shard.stack)
        first = self._ray.cloudpickle.dumps(order)
        shared = [self._shared, self._ledger.policy.fetch]
        options = {**self._offers.demand.resources(), "max_retries": 0, "label_selector": labels}
        reference = self._task.options(**options).remote(first, shared, self._board)
        self._numbers[reference] = number

    def receive(self) -> Iterator[tuple[int, list[ModelResult]]]:
        """The checked results that arrived, by the caller's stack; faults go to the ledger."""
        if not self._numbers:
            time.sleep(POLL_SECONDS)
            return
        arrived, _ = self._ray.wait(list(self._numbers), timeout=POLL_SECONDS)
        for reference in arrived:
            number = self._numbers.pop(reference)
            origin = self._ledger.attempts[number].shard.origin
            results = self._outcome(reference, number)
            epochs, now = self._job.study.train.epochs, time.monotonic()
            if results is not None and self._ledger.succeeded(number, now, epochs):
                nbytes = sum(a.nbytes for r in results for a in r.arrays.values())
                self._result_bytes = max(self._result_bytes, nbytes)
                for twin in self._ledger.needless():
                    self._cancel(twin)
                for result in results:
                    if result.arrays.get("diverged", False):
                        self._ledger.diverged(result.ref)
                yield origin, results
            del reference, results

    def _outcome(self, reference: Any, number: int) -> list[ModelResult] | None:
        errors, ledger = self._ray.exceptions, self._ledger
        attempt = ledger.attempts[number]
        try:
            received = self._ray.get(reference, timeout=FETCH_SECONDS)
            if type(received) is dict:
                self._refused(number, received["node"], received["refused"])
                return None
            return checked(received, attempt.shard.stack, self._job)
        except errors.OutOfMemoryError:
            ledger.too_big(number, "out of memory on its node")
        except errors.TaskCancelledError:
            ledger.lost(number, "cancelled")
        except errors.RayTaskError as error:
            self._raised(number, error.cause)
        except errors.RuntimeEnvSetupError as error:
            ledger.raised(number, f"its environment could not be set up: {_line(error)}")
        except errors.ObjectLostError:
            ledger.lost(number, "its result was lost")
        except errors.LocalRayletDiedError:
            raise RuntimeError(RAY_DIED) from None
        except errors.WorkerCrashedError:
            ledger.lost(number, "its worker process was killed", killed=True)
        except errors.RayError as error:
            ledger.lost(number, _KINDS.get(type(error).__name__, _line(error)))
        except ValueError as error:  # last: what Ray raises for a task's ValueError is one, too
            ledger.raised(number, f"a worker sent something unexpected: {error}")
        return None

    def _raised(self, number: int, cause: BaseException) -> None:
        if isinstance(cause, OutOfMemory):
            self._ledger.too_big(number, f"out of memory ({_line(cause)})")
        elif isinstance(cause, WrongMachine):
            self._refused(number, *cause.args)
        elif isinstance(cause, self._ray.exceptions.RayError):
            self._shared = self._ray.put(sent(self._job))
            self._ledger.lost(number, f"the study's data did not arrive ({_line(cause)})")
        else:
            self._ledger.raised(number, f"{type(cause).__name__}: {_line(cause)}")

    def _refused(self, number: int, node: str, sentence: str) -> None:
        self._ledger.refused(number, node, f"node {node[:6]} cannot join in: {sentence}")

    def look(self) -> list[tuple[int, int]]:
        """Once a second: signs of life, nodes that came or went, shards to give up."""
        now = time.monotonic()
        self.fresh = now - self._looked >= LOOK_SECONDS
        if not self.fresh:
            return []
        paused, self._looked = now - self._looked > 10, now
        self._offers.see(self._ray.nodes())
        alive = self._offers.slots
        try:
            asked = self._board.signs.remote(list(self._ledger.attempts))
            heard = self._ray.get(asked, timeout=5)
        except self._ray.exceptions.RayError:
            self._board = _board(self._ray)
            self._ledger.forgive(now)
            return []
        signs = {number: Sign(**fields) for number, fields in heard.items()}
        moved = self._ledger.hear(signs, now)
        if paused:
            self._ledger.forgive(now)
        self._ledger.name_stragglers(now)
        begun = sum(a.begun is not None for a in self._ledger.attempts.values())
        free = begun < sum(alive.values())
        self._hear_answers()
        for number in self._ledger.stranded(now, free):
            self._cancel(number)
        for number, reason in self._ledger.suspects(now, alive, free).items():
            self._ledger.abandon(number, reason)
            self._cancel(number)
            self._put_down(self._ledger.attempts[number].sign)
        return moved

    def _cancel(self, number: int) -> None:
        for reference, known in self._numbers.items():
            if known == number:
                self._ray.cancel(reference, force=True)

    def _put_down(self, sign: Sign | None) -> None:
        """A frozen process hears no cancelling: have it killed, so that its place is free.

        Not one whose result got lost: it may be training the same shard again.
        """
        if sign is not None and not sign.over and sign.node in self._offers.slots:
            pinned = {
                "num_cpus": 0,
                "max_retries": 0,
                "label_selector": {ray_place.NODE: sign.node},
            }
            asked = self._ray.remote(ray_travel.put_down).options(**pinned).remote(sign.pid)
            self._asked[asked] = sign.node

    def _hear_answers(self) -> None:
        """A node that put down the process it was asked to is not frozen itself."""
        if not self._asked:
            return
        asked_all = list(self._asked)
        for asked in self._ray.wait(asked_all, num_returns=len(asked_all), timeout=0)[0]:
            node = self._asked.pop(asked)
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(asked, timeout=1)
                self._ledger.trust(node)

    def end(self) -> None:
        """Stop what still runs; nobody waits for it."""
        with contextlib.suppress(Exception):
            for reference in self._numbers:
                self._ray.cancel(reference, force=True)
            self._ray.kill(self._board)
        self._numbers.clear()


def _board(ray: Any) -> Any:
    """On the driver's own node, so that it is lost only with the driver."""
    here = ray.get_runtime_context().get_node_id()
    options = {"num_cpus": 0, "max_restarts": 3, "label_selector": {ray_place.NODE: here}}
    return ray.remote(ray_travel.Board).options(**options).remote()


_KINDS = {
    "NodeDiedError": "its node was lost",
    "GetTimeoutError": f"its result did not arrive within {FETCH_SECONDS:.0f} s",
}


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]
