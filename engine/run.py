"""`run_study`: plan, train, attack, report. The whole story of a run in one place."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from engine import cost, store
from engine import manifest as facts
from engine.data.arrays import cache_dir
from engine.executors.base import Job, Place, Watch
from engine.executors.local import LocalPlace
from engine.membership import odd_one_out, without_complement
from engine.plan import ModelRef, ModelResult, stacks
from engine.prepare import Prepared, prepare
from engine.progress import TrainingProgress, clock, size
from engine.status import forget_figures, write_figures
from engine.study import Mix, Study, unknown
from engine.studyfile import summary_lines

FEWEST_FOR_LIRA, FEWEST_FOR_INTERVALS = 6, 8
"""Paired models: two a side without the target's pair, and without another pair besides."""
FOR_GPUS_FROM = 30 * 86400.0
"""Seconds of training on a CPU from which on a study is meant for GPUs."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run, as opposed to what (the study)."""

    out: Path = Path("runs")
    device: str = "auto"
    executor: str = "local"
    address: str = ""
    insecure_cluster: bool = False
    offline: bool = False
    dry_run: bool = False


def run_study(study: Study, options: Options, console: Console) -> Path | None:
    """Run a study to its report; train only what is missing.

    Returns:
        The run directory, or None after a dry run.

    Raises:
        ValueError: the study, its data or this machine cannot do it; nothing was trained.
        RuntimeError: training broke off; finished models are kept.
    """
    if options.executor not in PLACES:
        raise ValueError(unknown("executor", options.executor, PLACES))
    if options.executor != "ray" and (options.address or options.insecure_cluster):
        raise ValueError(
            "--address and --insecure-cluster are for --executor ray: add it or leave them out"
        )
    _print_study(study, console)
    if options.dry_run:
        place = LocalPlace(resolve_device(options.device))
        sizes = cost.known_sizes(study) or _sizes(_without_writing(study, options))
        missing = _left(study, _started(study, options.out))
        _print_cost(study, sizes, missing, place, console)
        return None
    _check_out(options.out)
    if options.executor == "ray":
        console.print("connecting to Ray …")
    with PLACES[options.executor](study, options) as chosen:
        return _run(study, options, chosen, console)


def _run(study: Study, options: Options, place: Place, console: Console) -> Path:
    console.print("reading the data …")
    prepared = prepare(study, offline=options.offline)
    folder = options.out / f"{study.name}-{prepared.digest}"
    missing = _missing(study, folder, prepared, place)
    planned = _print_cost(study, _sizes(prepared), missing, place, console)
    folder.mkdir(parents=True, exist_ok=True)
    with store.locked(folder):
        run = _declare(folder, study, prepared, place, options.executor)
        missing = _set_aside_damaged(run, console)
        if missing:
            _train(run, prepared, missing, planned, place, console)
        return report(run, console)


@contextlib.contextmanager
def _local(study: Study, options: Options) -> Iterator[Place]:
    yield LocalPlace(resolve_device(options.device))


@contextlib.contextmanager
def _ray(study: Study, options: Options) -> Iterator[Place]:
    from engine.executors.ray import Where, opened

    where = Where(address=options.address, insecure=options.insecure_cluster)
    with opened(study, where, device=options.device, out=options.out) as place:
        yield place


PLACES: dict[str, Callable[[Study, Options], AbstractContextManager[Place]]] = {
    "local": _local,
    "ray": _ray,
}
"""Executor's name -> what opens the place where it trains."""


def _without_writing(study: Study, options: Options) -> Prepared:
    """The study prepared for its sizes alone: the cache stays as it is.

    Sets that OOD images come from are left out: such images replace others.
    """
    data = dataclasses.replace(study.data, loader="resident", spread="memory")
    mixes = {name: mix for name, mix in study.mixes.items() if mix.kind != "ood"}
    study = dataclasses.replace(study, data=data, mixes=mixes or {"clean": Mix()})
    return prepare(study, offline=options.offline)


def resolve_device(name: str) -> str:
    """`auto`, `cpu` or `cuda` to the device to use.

    Raises:
        ValueError: CUDA was asked for and there is none.
    """
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device '{name}': known are auto, cpu, cuda")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device cuda was asked for, but torch finds no GPU: use --device cpu")
    return "cuda" if name != "cpu" and available else "cpu"


def _check_out(out: Path) -> None:
    """Find out before hours of training whether results can be written; leave nothing behind."""
    if (out / "manifest.json").exists():
        raise ValueError(
            f"'{out}' is itself a run directory: --out names the folder that holds run directories"
        )
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ValueError(f"'{existing}' is no folder: choose another --out")
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(bytes(2**20))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise ValueError(
            f"cannot write to the output folder '{out}' ({error.strerror}): choose another --out"
        ) from None


def _sizes(prepared: Prepared) -> cost.Sizes:
    data = prepared.data
    pool = next(iter(data.tables.values())).label_N
    height, width, channels = data.images_RHWC.shape[1:]
    return cost.Sizes(
        pool=len(pool),
        population=len(data.population_labels_Z),
        image=(height, width, channels),
        classes=data.classes,
        mapped=data.table is not None,
    )


def _print_study(study: Study, console: Console) -> None:
    console.print(f"[bold]{study.name}[/bold]: {study.question}", highlight=False)
    for line in summary_lines(study):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    if study.models < FEWEST_FOR_INTERVALS:
        console.print(
            f"note: {study.models} models an arm are few: LiRA needs {FEWEST_FOR_LIRA} at least, "
            f"its intervals {FEWEST_FOR_INTERVALS}; accuracies are reported in any case",
            highlight=False,
            soft_wrap=True,
        )
    odd = odd_one_out(study.membership.design, study.models)
    if odd:
        console.print(f"note: {odd}", highlight=False, soft_wrap=True)


def _print_cost(
    study: Study, sizes: cost.Sizes, missing: list[ModelRef], place: Place, console: Console
) -> cost.Cost:
    """Print what is finished and what the rest will take; an impossible stack raises."""
    every = len(store.study_refs(study))
    if len(missing) < every:
        console.print(f"{every - len(missing)} of {every} models are finished already")
    workers = max(1, min(place.workers(study), len(missing)))
    fitted = place.fit(study, workers)
    found = cost.estimate(fitted, sizes, missing, place.device, workers, cache_dir(study.data))
    largest = max(map(len, stacks(study, missing, found.stack, found.workers)), default=0)
    basis = "from this machine's earlier runs" if found.measured else "a rough estimate"
    console.print(
        f"cost: {found.models} models to train on {place.device}, about {clock(found.seconds)} "
        f"({basis}), {size(found.memory_bytes)} of memory, {size(found.disk_bytes)} of disk; "
        f"{found.workers} process(es), stacks of up to {largest} models",
        highlight=False,
    )
    if place.device == "cpu" and found.seconds > FOR_GPUS_FROM:
        told = study.cost or "the file does not say what it costs there"
        console.print(f"note: this study is sized for GPUs ({told})", highlight=False)
    return found


def _missing(study: Study, folder: Path, prepared: Prepared, place: Place) -> list[ModelRef]:
    """What is left to train, without touching the folder.

    Raises:
        ValueError: the folder belongs to another study, or was started with other arithmetic.
    """
    run = store.earlier_run(folder, study)
    if run is None:
        return _left(study, None)
    if not facts.complete(run.manifest):
        raise store.damaged_manifest(folder)
    if run.digest != prepared.digest:
        raise ValueError(f"'{folder}' is the run directory of another study: use another --out")
    missing = _left(study, run)
    if missing:
        facts.adopt(run.manifest["numerics"], place.numerics(), folder)
    return missing


def _started(study: Study, out: Path) -> store.Run | None:
    """The run that this study would go on with, if its data are what they were: none are read."""
    for folder in sorted(out.glob(f"{study.name}-*")):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged manifest
            run = store.earlier_run(folder, study)
            if run and run.digest == study.digest(run.manifest["data"]["digest"]):
                return run
    return None


def _left(study: Study, run: store.Run | None) -> list[ModelRef]:
    """The models that no whole shard holds."""
    done = {} if run is None else run.scan().rows
    return [ref for ref in store.study_refs(study) if ref not in done]


def _declare(
    folder: Path, study: Study, prepared: Prepared, place: Place, executor: str
) -> store.Run:
    """Adopt an earlier start's numeric plan, or decide one; write everything but results."""
    run = store.earlier_run(folder, study)
    earlier = None if run is None else run.manifest
    numerics = dict(place.numerics()) if earlier is None else earlier["numerics"]
    manifest = {
        "format": store.FORMAT,
        "study": study.name,
        "digest": prepared.digest,
        "data": dict(prepared.facts),
        "query_mode": study.query.mode,
        "without_complement": without_complement(study.membership.design, study.models),
        "seed": study.seed,
        "executor": executor,
        "numerics": numerics,
        "hardware": dict(place.hardware()),
        "versions": facts.versions(),
        "started": facts.now() if earlier is None else earlier["started"],
        "shards": {} if earlier is None else earlier.get("shards", {}),
    }
    return store.declare(folder, study, prepared.masks, prepared.samples, manifest)


def _set_aside_damaged(run: store.Run, console: Console) -> list[ModelRef]:
    """Name damaged shards, move them out of the way, and list what is to be trained."""
    shards = run.scan()
    for bad in shards.rejected:
        console.print(f"set aside {bad.path}: {bad.reason}; its models are trained again")
    store.clean(run.path, shards.rejected)
    return [ref for ref in run.refs() if ref not in shards.rows]


def _train(
    run: store.Run,
    prepared: Prepared,
    missing: list[ModelRef],
    planned: cost.Cost,
    place: Place,
    console: Console,
) -> None:
    """Train the missing models, storing each stack as it ends."""
    study = run.study
    work = stacks(study, missing, planned.stack, planned.workers)
    plan = run.manifest["numerics"]["kernels"]
    job = Job(study=study, data=prepared.data, device=place.device, kernel_plan=plan)
    seconds: dict[str, list[float]] = {arm: [] for arm in study.arms}
    with TrainingProgress(console, [len(stack) for stack in work], study.train.epochs) as progress:

        def on_result(results: Sequence[ModelResult]) -> None:
            store.write_results(run, results)
            progress.models(len(results))
            for result in results:
                seconds[result.ref.arm].append(result.seconds)

        def show(figures: Mapping[str, Any]) -> None:
            write_figures(run.path, figures)
            progress.figures(figures)

        watch = Watch(say=progress.say, figures=show)
        try:
            place.executor(planned.workers, watch).run(job, work, on_result, progress.epoch)
        except BaseException:
            forget_figures(run.path)
            raise
    _remember_speeds(study, _sizes(prepared), place.device, seconds)


def _remember_speeds(
    study: Study, sizes: cost.Sizes, device: str, seconds: Mapping[str, Sequence[float]]
) -> None:
    """Keep what was measured for later cost estimates."""
    for arm, times in seconds.items():
        if times:
            speed = len(times) * cost.trained_samples(study, sizes) / sum(times)
            key = cost.speed_key(study, study.arms[arm], sizes, device)
            cost.remember_speed(cache_dir(study.data), key, speed)


def report(run: store.Run, console: Console) -> Path:
    """Attack a finished run, write findings and report, print the summary."""
    from engine.analysis import analyse
    from engine.report import write_report
    from engine.report.summary import print_summary

    cells = [f"{mix}/{arm}" for mix in run.study.mixes for arm in run.study.arms]

    def told(cell: str) -> None:
        console.print(f"attacking {cell} ({cells.index(cell) + 1} of {len(cells)}) …")

    findings = analyse(run, told)
    page = write_report(run, findings)
    print_summary(findings, console)
    console.print(f"report: {page}", highlight=False, soft_wrap=True)
    manifest = {**run.manifest, "finished": facts.now(), "shards": _shard_states(run)}
    store.write_manifest(run.path, manifest)
    return run.path


def _shard_states(run: store.Run) -> dict[str, str]:
    files = {path for path, _ in run.scan().rows.values()}
    return {str(path.relative_to(run.path)): "done" for path in sorted(files)}
