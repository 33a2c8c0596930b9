"""The run directory: declared first, written atomically, checksummed, resumable.

A model is done when a shard file holds it and the file matches its checksum. Shard files hold the
arrays of consecutive models of one (mix, arm), stacked along a leading model axis. Nothing here is
ever unpickled. Only the process that called `run` writes.
"""

import contextlib
import fcntl
import itertools
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from engine import files, shardfile
from engine.outliers import SampleTable
from engine.plan import ModelRef, ModelResult
from engine.study import Study
from engine.studyfile import load_study, to_toml

FORMAT = 1
MEMBERSHIP = KEEP, SAMPLES = "keep.npy", "samples.npz"
STUDY = "study.toml"
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A shard file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What a scan of the shard folder found: (file, row) of every finished model; bad files."""

    rows: Mapping[ModelRef, tuple[Path, int]]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything the M models of one (mix, arm) left behind, with its mask and sample table."""

    keep_MN: npt.NDArray[np.bool_]
    samples: SampleTable
    arrays: Mapping[str, Array]
    """Per-model arrays stacked along M, under the names of engine.train.run_stack."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory with its resolved study and manifest."""

    path: Path
    study: Study
    digest: str
    manifest: Mapping[str, Any]

    def refs(self) -> tuple[ModelRef, ...]:
        """Every model of the study, in order of mix, arm and model_id."""
        return study_refs(self.study)

    def scan(self, cells: str = "*/*") -> Shards:
        """Verify shard files (size, checksum, study, names) and list what is finished.

        cells: which MIX/ARM folders to look into, all by default.
        """
        rows: dict[ModelRef, tuple[Path, int]] = {}
        rejected = []
        for path in sorted((self.path / "shards").glob(f"{cells}/*.safetensors")):
            try:
                models = _verified_models(path, self.digest)
            except ValueError as error:
                rejected.append(Rejected(path=path, reason=str(error)))
                continue
            mix, arm = path.parts[-3:-1]
            for row, model_id in enumerate(models):
                rows[ModelRef(mix=mix, arm=arm, model_id=model_id)] = (path, row)
        return Shards(rows=rows, rejected=tuple(rejected))

    def load(self, mix: str, arm: str) -> Cell:
        """The cell of one mix and arm.

        Raises:
            ValueError: models are missing or their shards are damaged.
        """
        shards = self.scan(f"{mix}/{arm}")
        refs = [ModelRef(mix=mix, arm=arm, model_id=m) for m in range(self.study.models)]
        missing = [ref.model_id for ref in refs if ref not in shards.rows]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(refs)} models of {mix}/{arm} are not finished in "
                f"{self.path}: run the study again to train what is missing"
            )
        arrays: dict[str, Array] = {}
        for path, group in itertools.groupby(refs, key=lambda ref: shards.rows[ref][0]):
            ids = [ref.model_id for ref in group]
            rows = [shards.rows[ModelRef(mix=mix, arm=arm, model_id=m)][1] for m in ids]
            for name, values in _read(path).items():
                if name not in arrays:
                    arrays[name] = np.empty((len(refs), *values.shape[1:]), values.dtype)
                arrays[name][ids] = values[rows]
        keep_MN, samples = self.membership(mix)
        return Cell(keep_MN=keep_MN, samples=samples, arrays=arrays)

    def membership(self, mix: str) -> tuple[npt.NDArray[np.bool_], SampleTable]:
        """The keep mask (M, N) and the sample table of a mix.

        Raises:
            ValueError: a file is not the one that the manifest's checksum was taken of.
        """
        folder = self.path / "mixes" / mix
        known = _recorded(self.manifest, mix)
        for name in MEMBERSHIP:
            if name not in known or not _intact(folder / name, known[name]):
                raise ValueError(
                    f"'{folder / name}' is missing or damaged: run the study again, which writes "
                    "it anew and trains nothing that is finished"
                )
        keep_MN = np.load(folder / KEEP, allow_pickle=False)
        with np.load(folder / SAMPLES, allow_pickle=False) as table:
            samples = SampleTable(**{name: table[name] for name in table.files})
        return keep_MN[: self.study.models], samples


def study_refs(study: Study) -> tuple[ModelRef, ...]:
    """Every model of a study, in order of mix, arm and model_id."""
    triples = itertools.product(study.mixes, study.arms, range(study.models))
    return tuple(ModelRef(mix=mix, arm=arm, model_id=m) for mix, arm, m in triples)


def open_run(path: str | Path) -> Run:
    """Open a run directory for reading.

    Raises:
        ValueError: the folder is no run directory, a damaged one, or one of a newer format.
    """
    path = Path(path)
    study_file = path / STUDY
    if not study_file.is_file() or not (path / "manifest.json").is_file():
        raise ValueError(
            f"'{path}' is no run directory: expected one with study.toml and manifest.json "
            "(the path that `engine run` printed)"
        )
    manifest = _manifest(path)
    found = files.sha256(study_file)
    if found != manifest.get("study_sha256", found):  # earlier runs recorded none
        raise ValueError(
            f"'{study_file}' is damaged or was edited: run the study again, which writes it anew "
            "and trains nothing that is finished (for other settings use --set)"
        )
    try:
        study = load_study(str(study_file))
    except ValueError as error:
        raise ValueError(
            f"'{study_file}' is damaged ({error}): run the study again, which writes it anew"
        ) from None
    return Run(path=path, study=study, digest=manifest["digest"], manifest=manifest)


def earlier_run(path: Path, study: Study) -> Run | None:
    """What an earlier start left in a folder that `study` is to be run in, if anything.

    Raises:
        ValueError: the manifest is damaged or of a newer format.
    """
    if not (path / "manifest.json").is_file():
        return None
    manifest = _manifest(path)
    return Run(path=path, study=study, digest=manifest["digest"], manifest=manifest)


def _manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
        version, whole = manifest["format"], isinstance(manifest["digest"], str)
    except (ValueError, KeyError, TypeError):
        whole, version = False, FORMAT
    if version != FORMAT:
        raise ValueError(f"'{path}' has format {version}, this version reads {FORMAT}")
    if not whole:
        raise damaged_manifest(path)
    return manifest


def damaged_manifest(path: Path) -> ValueError:
    """What to say of a manifest that lacks what it should hold."""
    return ValueError(
        f"'{path / 'manifest.json'}' is damaged: delete it and run the study again, which writes "
        "it anew and trains nothing that is finished"
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run directory for writing; a second process is refused, not queued."""
    with open(path / ".lock", "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another process is running this study in {path}: wait for it or use --out"
            ) from None
        yield


def declare(
    path: Path,
    study: Study,
    masks: Mapping[str, npt.NDArray[np.bool_]],
    samples: Mapping[str, SampleTable],
    manifest: Mapping[str, Any],
) -> Run:
    """Write masks, sample tables, study and manifest, in that order (the manifest last).

    Raises:
        ValueError: the folder holds masks or sample tables that this study did not write.
    """
    earlier = earlier_run(path, study)
    membership = {}
    for mix, table in samples.items():
        folder = path / "mixes" / mix
        folder.mkdir(parents=True, exist_ok=True)
        known = {} if earlier is None else _recorded(earlier.manifest, mix)
        for name in MEMBERSHIP:
            if (folder / name).is_file() and not _intact(folder / name, known.get(name)):
                set_aside(folder / name)
        _same_or_new(folder / SAMPLES, table)
        _same_or_grown(folder / KEEP, masks[mix])
        membership[mix] = {name: files.sha256(folder / name) for name in MEMBERSHIP}
    files.write_text(path / STUDY, to_toml(study))
    manifest = {**manifest, "membership": membership, "study_sha256": files.sha256(path / STUDY)}
    write_manifest(path, manifest)
    return Run(path=path, study=study, digest=manifest["digest"], manifest=manifest)


def _recorded(manifest: Mapping[str, Any], mix: str) -> dict[str, str]:
    """The checksums of a mix's files by the manifest; empty where it has none."""
    try:
        return {name: str(manifest["membership"][mix][name]) for name in MEMBERSHIP}
    except (KeyError, TypeError):
        return {}


def _intact(file: Path, checksum: str | None) -> bool:
    """Whether a file has its checksum or, where none is known, can be read as arrays."""
    if not file.is_file():
        return False
    if checksum is not None:
        return files.sha256(file) == checksum
    try:
        with open(file, "rb") as stream:
            found = np.load(stream, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                for name in found.files:
                    found[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return False
    return True


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest atomically."""
    files.write_text(path / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def clean(path: Path, rejected: Iterable[Rejected]) -> None:
    """Set rejected shards aside (renamed, never deleted) and drop unfinished temporary files."""
    for bad in rejected:
        for member in (bad.path, bad.path.with_suffix(".json")):
            if member.exists():
                set_aside(member)
    for part in path.rglob(".*.part"):
        part.unlink(missing_ok=True)


def set_aside(file: Path) -> None:
    """Rename a file that cannot be used; earlier ones keep their names."""
    for count in itertools.count(1):
        number = "" if count == 1 else f"-{count}"
        aside = file.with_name(f"{file.name}.rejected{number}")
        if not aside.exists():
            file.rename(aside)
            return


def write_results(run: Run, results: Sequence[ModelResult]) -> tuple[Path, ...]:
    """Write the results of a trained stack: one shard for each run of consecutive models."""
    written = []
    ordered = sorted(results, key=lambda result: result.ref)

    def group(item: tuple[int, ModelResult]) -> tuple[str, str, int]:
        position, result = item
        return (result.ref.mix, result.ref.arm, result.ref.model_id - position)

    for (mix, arm, _), members in itertools.groupby(enumerate(ordered), key=group):
        written.append(_write_shard(run, mix, arm, [result for _, result in members]))
    return tuple(written)


def _write_shard(run: Run, mix: str, arm: str, results: Sequence[ModelResult]) -> Path:
    models = [result.ref.model_id for result in results]
    folder = run.path / "shards" / mix / arm
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _shard_name(models)
    identity = {"digest": run.digest, "mix": mix, "arm": arm, "models": json.dumps(models)}
    # under one key: the library, whose bytes these are, writes several in an order of chance
    blocks = shardfile.blocks([r.arrays for r in results], {"identity": json.dumps(identity)})
    summary = {**identity, "models": models}

    def write(stream: BinaryIO) -> None:
        summary["sha256"] = files.write_hashed(stream, blocks)

    def summarise(stream: BinaryIO) -> None:
        stream.write((json.dumps(summary, indent=2) + "\n").encode())

    files.write_together({path: write, path.with_suffix(".json"): summarise})
    return path


def _shard_name(models: Sequence[int]) -> str:
    """Of the file that holds these models."""
    return f"{models[0]:05d}-{models[-1]:05d}.safetensors"


def _verified_models(path: Path, digest: str) -> list[int]:
    """The model ids in a shard file, after checking that the file is whole and belongs here."""
    from safetensors import SafetensorError, safe_open

    try:
        summary = json.loads(path.with_suffix(".json").read_text())
        expected, models = summary["sha256"], [int(m) for m in summary["models"]]
        named = _shard_name(models)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise ValueError("its checksum file is missing or unreadable") from None
    try:
        found = files.sha256(path)
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from None
    if found != expected:
        raise ValueError("it does not match its checksum (truncated or altered)")
    if path.name != named:
        raise ValueError(f"it is a copy of {named}, by the models in it")
    mix, arm = path.parts[-3:-1]
    try:
        with safe_open(path, framework="numpy") as shard:
            identity = shard.metadata()
    except SafetensorError:
        raise ValueError("it is no safetensors file") from None
    wanted = {"digest": digest, "mix": mix, "arm": arm, "models": json.dumps(models)}
    if identity not in ({"identity": json.dumps(wanted)}, wanted):  # earlier shards: key by key
        raise ValueError("it belongs to another study, mix, arm or range of models")
    return models


def _read(path: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    return dict(load_file(path))


def _same_or_grown(path: Path, keep_MN: npt.NDArray[np.bool_]) -> None:
    if path.is_file():
        kept = np.load(path, allow_pickle=False)
        shared = min(len(kept), len(keep_MN))
        same = kept.dtype == bool and kept.shape[1:] == keep_MN.shape[1:]
        if not same or (kept[:shared] != keep_MN[:shared]).any():
            raise ValueError(f"'{path}' is not this study's keep mask: use another --out")
        if len(kept) >= len(keep_MN):
            return
    files.write_atomic(path, lambda stream: np.save(stream, keep_MN))


def _same_or_new(path: Path, table: SampleTable) -> None:
    arrays = {name: getattr(table, name) for name in SampleTable.__dataclass_fields__}
    if path.is_file():
        with np.load(path, allow_pickle=False) as old:
            same = set(old.files) == set(arrays) and all(
                np.array_equal(old[name], arrays[name]) for name in arrays
            )
        if not same:
            raise ValueError(f"'{path}' is not this study's sample table: use another --out")
        return
    files.write_atomic(path, lambda stream: np.savez(stream, **arrays))
