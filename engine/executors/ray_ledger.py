"""Which shards wait, run, are done or failed, and what each fault costs: decisions, no Ray.

A shard is a stack to train. Seconds are of one monotonic clock, passed in.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.executors.ray_shard import Attempt, Policy, Shard, Sign, describe
from engine.executors.ray_snapshot import Snapshot, WorkerSpeed
from engine.plan import ModelRef

GIVEN_UP = "given up: "


@dataclass
class Ledger:
    """The whole study's shards. Every method is a fact reported or a decision asked for."""

    policy: Policy
    shards: list[Shard]
    attempts: dict[int, Attempt] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    failed: list[Shard] = field(default_factory=list)
    retrained: int = 0
    suspected: set[str] = field(default_factory=set)
    refusing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._waiting = deque(self.shards)
        self._parts_of: dict[int, list[Shard]] = {}
        for shard in self.shards:
            self._parts_of.setdefault(shard.origin, []).append(shard)
        self._next = 0
        self._last_event = 0.0
        self._durations: list[float] = []
        self._speeds: dict[str, WorkerSpeed] = {}
        self._late: set[int] = set()
        self.models_done = self.shards_done = 0

    @property
    def unfinished(self) -> bool:
        """Whether anything is still to be trained."""
        # backwards, since shards are trained in order: the first looked at is the usual answer
        return any(shard.state in ("waiting", "running") for shard in reversed(self.shards))

    @property
    def hopeless(self) -> bool:
        """Whether shards keep failing and nothing succeeds."""
        return not self.models_done and len(self.failed) >= self.policy.hopeless

    def take(self, now: float, most: int = 0) -> tuple[int, Attempt] | None:
        """The next shard to submit, as a numbered attempt; None when none waits.

        Args:
            now: the time.
            most: models that fit where it is to be trained; of a larger shard the rest waits on.
        """
        while self._waiting:
            shard = self._waiting.popleft()
            if shard.state != "waiting":
                continue
            if 0 < most < len(shard.stack):
                pieces = -(-len(shard.stack) // most)
                first = -(-len(shard.stack) // pieces)
                shard, rest = self._parts(shard, first, halved=shard.halved)
                self._waiting.appendleft(rest)
            shard.state = "running"
            self._next += 1
            self.attempts[self._next] = Attempt(
                shard=shard, submitted=now, avoids=frozenset(self.avoided), most=most
            )
            return self._next, self.attempts[self._next]
        return None

    def hear(self, signs: Mapping[int, Sign], now: float) -> list[tuple[int, int]]:
        """Note signs of life; returns (origin, its epochs done) of what moved on."""
        moved = []
        for number, sign in signs.items():
            attempt = self.attempts.get(number)
            if attempt is None:
                continue
            if attempt.begun is None:
                attempt.begun = now
                self._began(number, now, attempt.most)
            shard = attempt.shard
            if attempt.sign is None or sign.epochs > shard.epochs:
                shard.epochs = max(shard.epochs, sign.epochs)
                moved.append((shard.origin, self.epochs(shard.origin)))
            attempt.sign = sign
            if sign.age < self.policy.silence / 3:
                self.suspected.discard(sign.node)
        return moved

    def epochs(self, origin: int) -> int:
        """Epochs done of a caller's stack: of its parts on average, where it was cut."""
        parts = [shard for shard in self._parts_of[origin] if shard.state != "split"]
        done = sum(len(shard.stack) * shard.epochs for shard in parts)
        return done // sum(len(shard.stack) for shard in parts)

    def succeeded(self, number: int, now: float, epochs: int = 0) -> bool:
        """An attempt returned a valid result; False when another one was first."""
        attempt = self.attempts.pop(number)
        shard = attempt.shard
        self._began(number, now, attempt.most)
        if shard.state in ("done", "failed", "split"):
            return False
        shard.state, shard.epochs = "done", epochs
        self.shards_done += 1
        self.models_done += len(shard.stack)
        seconds = now - (attempt.submitted if attempt.begun is None else attempt.begun)
        self._durations.append(seconds / len(shard.stack))
        if attempt.sign is not None:
            old = self._speeds.get(attempt.sign.worker, WorkerSpeed(models=0, seconds=0.0))
            self._speeds[attempt.sign.worker] = WorkerSpeed(
                models=old.models + len(shard.stack), seconds=old.seconds + seconds
            )
        return True

    def diverged(self, ref: ModelRef) -> None:
        """A finished model is no number: it is stored, marked so, and said."""
        self.reasons.append(f"{describe((ref,))} diverged; it is kept, marked as such")

    def needless(self) -> list[int]:
        """Attempts, named once, at shards whose result is here: a silent worker's came first."""
        found = [
            number
            for number, attempt in self.attempts.items()
            if attempt.shard.state == "done" and not attempt.abandoned
        ]
        for number in found:
            self.attempts[number].abandoned = True
        return found

    def lost(self, number: int, reason: str, *, killed: bool = False) -> None:
        """The worker, its node or its result is gone: train the shard again, a few times.

        After the second time in two halves: a kernel that is out of memory kills without a word.
        killed: the worker process was, so that memory may be the cause.
        """
        shard = self._close(number, reason)
        if shard is None:
            return
        shard.crashes += 1
        shard.killed = shard.killed or killed
        if shard.crashes > self.policy.retries:
            remedy = f"; if memory was short, {_remedy(shard)}" if shard.killed else ""
            self._fail(shard, f"lost {shard.crashes} times, last: {reason}{remedy}")
        elif shard.crashes == 2 and len(shard.stack) > 1 and not shard.halved:
            self._split(shard, halved=True)
        else:
            self._again(shard)

    def too_big(self, number: int, reason: str) -> None:
        """Out of memory: two halves instead, once."""
        shard = self._close(number, reason)
        if shard is None:
            return
        if shard.halved or len(shard.stack) == 1:
            self._fail(shard, f"{reason}: {_remedy(shard)}")
        else:
            self._split(shard, halved=True)

    def raised(self, number: int, reason: str) -> None:
        """An exception of ours repeats: halve until the model that raises it is alone."""
        shard = self._close(number, reason)
        if shard is None:
            return
        if len(shard.stack) == 1:
            self._fail(shard, reason)
        else:
            self._split(shard, halved=shard.halved)

    def refused(self, number: int, node: str, reason: str) -> None:
        """A node cannot run the numeric plan: no fault of the shard, but keep off that node."""
        shard = self._close(number, reason)
        self.refusing[node] = reason
        if shard is not None:
            self._again(shard)

    def abandon(self, number: int, reason: str) -> None:
        """Stop waiting for an attempt; should it still deliver first, its result counts."""
        attempt = self.attempts[number]
        attempt.abandoned = True
        shard = attempt.shard
        if shard.state != "running":
            return
        self._note(shard, reason)
        if attempt.sign is not None:  # what never began is not to blame
            shard.crashes += 1
            self.suspected.add(attempt.sign.node)
        if shard.crashes > self.policy.retries:
            self._fail(shard, f"given up {shard.crashes} times, last: {reason}")
        else:
            self._again(shard)

    def suspects(self, now: float, alive: Iterable[str], free: bool) -> dict[int, str]:
        """Attempts to abandon, with the reason.

        Args:
            now: the time.
            alive: the nodes that the cluster counts as alive.
            free: whether a worker is free, so that nothing submitted should still be queued.
        """
        living, silence = set(alive), self.policy.silence
        found = {}
        for number, attempt in self.attempts.items():
            if attempt.abandoned:
                continue
            sign = attempt.sign
            if sign is None:
                overtaken = None if attempt.overtaken is None else now - attempt.overtaken
                queued = now - max(attempt.submitted, self._last_event)
                if overtaken is not None and overtaken > silence:
                    found[number] = f"not started {overtaken:.0f} s after shards submitted later"
                elif free and queued > 10 * silence:
                    found[number] = f"not started within {queued:.0f} s though a worker is free"
            elif sign.node not in living:
                found[number] = f"node {sign.worker} left the cluster"
            elif sign.age > silence:
                what = "result arrived" if sign.over else "sign of life"
                found[number] = f"no {what} from {sign.worker} for {sign.age:.0f} s"
        return found

    def stranded(self, now: float, free: bool) -> list[int]:
        """Attempts still queued that keep off a node which is trusted again: they wait anew.

        Suspicion ends when a node is heard from, when no other is left, or when something has been
        queued because of it for `silence` seconds while a worker is free and nothing is trained.
        """
        live = {number: a for number, a in self.attempts.items() if not a.abandoned}
        queued = {number: a for number, a in live.items() if a.sign is None}
        if free and len(queued) == len(live):
            since = max(self._last_event, *(a.submitted for a in queued.values()), 0.0)
            if now - since > self.policy.silence:
                self.suspected.clear()
        found = [number for number, attempt in queued.items() if attempt.avoids - self.avoided]
        for number in reversed(found):
            attempt = self.attempts[number]
            attempt.abandoned, attempt.shard.state = True, "waiting"
            self._waiting.appendleft(attempt.shard)
        return found

    def forgive(self, now: float) -> None:
        """Signs of life were not recorded for a while: count silence from now on."""
        self._last_event = now
        for attempt in self.attempts.values():
            attempt.overtaken = None
            if attempt.sign is not None:
                attempt.sign = dataclasses.replace(attempt.sign, age=0.0)

    @property
    def avoided(self) -> set[str]:
        """Nodes to keep off: suspected ones, and those that cannot run the numeric plan."""
        return self.suspected | set(self.refusing)

    def trust(self, node: str) -> None:
        """A suspected node did what it was asked to."""
        self.suspected.discard(node)

    def check_places(self, alive: Iterable[str]) -> None:
        """Give suspected nodes another chance when no other is left.

        Raises:
            RuntimeError: no living node can run the numeric plan.
        """
        living = set(alive)
        if living and living <= set(self.refusing):
            reason = next(iter(self.refusing.values()))
            raise RuntimeError(f"no node can go on with this run: {reason}")
        if living <= self.avoided:
            self.suspected.clear()

    def name_stragglers(self, now: float) -> None:
        """Note, once each, running shards that take far longer than the finished ones."""
        if len(self._durations) < 3:
            return
        usual = statistics.median(self._durations)
        for number, attempt in self.attempts.items():
            if attempt.begun is None or attempt.sign is None:
                continue
            if attempt.abandoned or number in self._late:
                continue
            running = now - attempt.begun
            ratio = running / len(attempt.shard.stack) / usual
            if running > self.policy.noticeable and ratio > self.policy.straggling:
                self._late.add(number)
                place = attempt.sign.worker
                self._note(attempt.shard, f"on {place} takes {ratio:.1f} times as long as usual")

    def snapshot(self) -> Snapshot:
        """The figures for people and metrics."""
        live = [a for a in self.attempts.values() if not a.abandoned]
        running = sum(attempt.begun is not None for attempt in live)
        left = sum(len(s.stack) for s in self.shards if s.state in ("waiting", "running"))
        each = statistics.fmean(self._durations) if self._durations else None
        return Snapshot(
            waiting=sum(s.state in ("waiting", "running") for s in self.shards) - running,
            running=running,
            done=self.shards_done,
            failed=len(self.failed),
            retrained=self.retrained,
            models_done=self.models_done,
            models_left=left,
            seconds_left=None if each is None or not running else each * left / running,
            speeds=dict(self._speeds),
            reasons=tuple(self.reasons),
        )

    def failure(self) -> str:
        """What is left undone, in one sentence."""
        models = sum(len(shard.stack) for shard in self.failed)
        first = next(r for r in self.reasons if r.startswith(GIVEN_UP)).removeprefix(GIVEN_UP)
        return (
            f"{models} models could not be trained, first {describe(self.failed[0].stack)} "
            f"({first}); finished models are kept: mend the cause and run the same command again"
        )

    def _began(self, number: int, now: float, most: int) -> None:
        """Ray starts shards for the same nodes in order: whatever still waits was overtaken."""
        self._last_event = now
        for other, attempt in self.attempts.items():
            waits = attempt.sign is None and attempt.overtaken is None
            if other < number and waits and attempt.most == most:
                attempt.overtaken = now

    def _close(self, number: int, reason: str) -> Shard | None:
        """Drop an attempt; its shard if something is to be decided about it."""
        attempt = self.attempts.pop(number)
        if attempt.abandoned or attempt.shard.state != "running":
            return None
        self._note(attempt.shard, reason)
        return attempt.shard

    def _note(self, shard: Shard, reason: str) -> None:
        self.reasons.append(f"{describe(shard.stack)}: {reason}")

    def _again(self, shard: Shard) -> None:
        shard.state = "waiting"
        self.retrained += 1
        self._waiting.appendleft(shard)

    def _split(self, shard: Shard, *, halved: bool) -> None:
        for half in self._parts(shard, (len(shard.stack) + 1) // 2, halved=halved):
            self._again(half)

    def _parts(self, shard: Shard, first: int, *, halved: bool) -> list[Shard]:
        """Two shards instead of one: its first models, and the rest."""
        shard.state = "split"
        parts = [
            dataclasses.replace(shard, stack=stack, epochs=0, halved=halved, state="waiting")
            for stack in (shard.stack[:first], shard.stack[first:])
        ]
        self.shards += parts
        self._parts_of[shard.origin] += parts
        return parts

    def _fail(self, shard: Shard, reason: str) -> None:
        shard.state = "failed"
        self.failed.append(shard)
        self.reasons.append(f"{GIVEN_UP}{describe(shard.stack)}: {reason}")


def _remedy(shard: Shard) -> str:
    if len(shard.stack) > 1:
        return "lower resources.stack"
    return "let its node train fewer at once (resources.processes, --num-cpus) or lower train.batch"
