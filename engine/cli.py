"""The command line: flags in, one call out. Heavy imports sit inside the commands."""

import errno
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train hundreds of small networks at once and say how much each remembers.",
)

INTERRUPTED = "interrupted: finished models are kept; the same command goes on from here"
SIGINT = 130
NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the study; repeatable."),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.command()
def run(
    study: Annotated[str, typer.Option(help="A shipped study's name or a .toml file.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where run directories go.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    executor: Annotated[str, typer.Option(help="Where stacks train: local or ray.")] = "local",
    address: Annotated[
        str, typer.Option(help="A Ray cluster: local, auto or HOST:PORT (default: the job's own).")
    ] = "",
    insecure_cluster: Annotated[
        bool, typer.Option("--insecure-cluster", help="Accept a Ray cluster that asks no token.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Never download.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print study and cost; write nothing.")
    ] = False,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Train what is missing of a study, attack it, report.

    Running the same command again trains nothing that is finished.
    """
    from engine.run import Options, run_study
    from engine.studyfile import load_study

    options = Options(
        out=out,
        device=device,
        executor=executor,
        address=address,
        insecure_cluster=insecure_cluster,
        offline=offline,
        dry_run=dry_run,
    )
    run_study(load_study(study, [*(overrides or []), *(more or [])]), options, _console())


@app.command()
def studies() -> None:
    """List the shipped studies: question and cost."""
    from rich.table import Table

    from engine.studyfile import load_study, shipped_studies

    table = Table("study", "question", "cost", show_lines=True)
    for name in shipped_studies():
        study = load_study(name)
        table.add_row(name, study.question, study.cost)
    _console().print(table)


@app.command()
def status(path: RunPath) -> None:
    """Say what of a run is finished, missing or damaged."""
    from engine.status import print_status
    from engine.store import open_run

    print_status(open_run(path), _console())


@app.command()
def attack(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="A run, or scores in a known layout.")
    ],
    names: Annotated[
        list[str], typer.Option("--attack", metavar="NAME[,NAME]", help="Attacks by name.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the attacks; repeatable."),
    ] = None,
    targets: Annotated[str, typer.Option(help="all, last, or numbers joined by commas.")] = "all",
    groups: Annotated[
        str, typer.Option(help="Groups of samples: kind, class, decile (of memorization).")
    ] = "kind",
    out: Annotated[
        Path | None, typer.Option(help="A new folder for tables, scores and figures.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Attack a run of ours or other people's scores; names MIX/ARM after the path pick cells."""
    from engine.attack import attack as run_attack
    from engine.attack.table import print_attacked, warnings_as_lines

    extra = more or []
    cells = [text for text in extra if "=" not in text]
    chosen = [*(settings or []), *(text for text in extra if "=" in text)]
    with warnings_as_lines():
        found = run_attack(
            path, names, settings=chosen, targets=targets, cells=cells, groups=groups, out=out
        )
    print_attacked(found, _console())


@app.command()
def report(path: RunPath) -> None:
    """Attack a finished run again and rebuild its report."""
    from engine.run import report as rebuild
    from engine.store import open_run

    rebuild(open_run(path), _console())


@app.command()
def export(
    path: RunPath,
    out: Annotated[Path, typer.Option(help="The .npz file or the folder to write.")],
    format: Annotated[str, typer.Option(help="npz or tf.")] = "npz",
) -> None:
    """Hand over scores, masks and labels for other tools."""
    from engine.export import export as write
    from engine.store import open_run

    write(open_run(path), format, out)
    _console().print(f"wrote {out}", highlight=False, soft_wrap=True)


def _console() -> Console:
    """Terminals keep their width; files and pipes get lines wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def main() -> None:
    """The console script: user errors become one sentence and a non-zero exit."""
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):  # None where it was closed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may lack the signs we print
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        _fail(INTERRUPTED, SIGINT)
    except SystemExit as end:
        if end.code == SIGINT:  # typer's own answer to an interrupt, which says nothing
            _fail(INTERRUPTED, SIGINT)
        raise
    except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
        if os.environ.get("SHADOW_DEBUG"):
            raise
        _fail(_sentence(error), 1)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a run in order, like Ctrl-C; a second one at once."""
    signal.signal(number, signal.SIG_DFL)
    _fail(INTERRUPTED, 128 + number)


def _sentence(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory ({error}): lower resources.stack, resources.processes or train.batch"
    if isinstance(error, RecursionError):
        return "the study is nested too deeply: tables hold tables of values"
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        advice = ": free space or choose another --out" if error.errno in NO_PLACE else ""
        return f"{error.strerror.lower()}{where}{advice}"
    return str(error)


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"engine: {sentence}", file=sys.stderr)
    raise SystemExit(code)
