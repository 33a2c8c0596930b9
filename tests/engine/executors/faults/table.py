"""The last result of every fault: rows in bench/results/ray_faults.csv, a table in docs/ray.md.

python tests/engine/executors/faults/table.py     # writes the table from the rows
"""

import csv
import os
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "bench" / "results" / "ray_faults.csv"
PAGE = ROOT / "docs" / "ray.md"
BEGIN, END = "<!-- faults: written by faults/table.py -->\n", "<!-- /faults -->\n"
FIELDS = [
    "date",
    "fault",
    "models",
    "again",
    "noticed_s",
    "recovered_s",
    "bytes_equal",
    "machine",
]

FAULTS = {
    "kill_worker": "a training worker killed",
    "kill_workers": "a training worker killed, once in each of 20 studies",
    "remove_node": "a node leaves in order",
    "kill_node": "a node killed (SIGKILL to its raylet and workers) while it trains",
    "kill_raylet": "a node's raylet killed; its orphaned worker delivers after all",
    "freeze_node": "a node frozen (SIGSTOP) while it trains",
    "freeze_worker": "three workers frozen",
    "join_node": "a node joins",
    "uneven_nodes": "two nodes, stacks of 3 for the one and of 8 for the other",
    "lost_result": "a node killed with a finished result, before the driver fetched it",
    "lost_spill": "finished results deleted on the disk of an object store of 80 MiB",
    "lost_data": "the study's data deleted on the disk of an object store, all workers killed",
    "lost_board": "the actor that hears signs of life killed",
    "host_memory": "a host of 3 GiB out of memory: Ray kills the worker of a stack of 8, stacks of "
    "4 fit",
    "kernel_memory": "a host of 3 GiB out of memory: the kernel kills the worker of a stack of 8, "
    "stacks of 4 fit",
    "out_of_memory": "allocating fails for stacks of 8, stacks of 4 fit",
    "starved_store": "an object store of 80 MiB, 40 MB a shard",
    "raising_model": "one model of each cell raises; run again without the cause",
    "diverging_model": "one model of each cell diverges (bytes: of all others)",
    "full_disk": "the driver's file system full; room made, run again",
    "corrupted_shard": "a stored shard corrupted; run again",
    "own_raylet": "the driver's own raylet killed; run again",
    "kill_driver": "the driver killed twice; run again",
    "plain, real training": "real training, nothing happens",
    "two_nodes, real training": "real training on two nodes, nothing happens",
    "fashion_two_nodes, real training": "real training of Fashion-MNIST on two nodes",
    "own_copies, real training": "real training of Fashion-MNIST, each of two nodes reads its own "
    "copy of the beton",
    "one_copy, real training": "real training, one of two nodes has no copy of the beton",
    "kill_worker, real training": "real training, a worker killed",
    "kill_node, real training": "real training, a node killed",
    "raising_model, real training": "real training, one model of each cell raises; run again "
    "without the cause",
    "diverging_model, real training": "real training, one model of each cell diverges (bytes: of "
    "all others)",
}
"""Fault -> words for the page; what has no row there is untried."""


def rows() -> dict[str, dict[str, str]]:
    """The last row of every fault."""
    if not RESULTS.is_file():
        return {}
    with open(RESULTS, newline="") as stream:
        return {row["fault"]: row for row in csv.DictReader(stream)}


def write(fault: str, facts: dict, equal: bool) -> None:
    """Put this fault's row in place of its last one."""
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "fault": fault,
        "models": facts["models"],
        "again": facts["again"],
        "noticed_s": seconds(facts.get("noticed")),
        "recovered_s": seconds(facts.get("recovered")),
        "bytes_equal": "yes" if equal else "no",
        "machine": f"{os.cpu_count()} cores, ray {version('ray')}, one machine",
    }
    known = {**rows(), fault: row}
    with open(RESULTS, "w", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS)
        writer.writeheader()
        writer.writerows(known[name] for name in FAULTS if name in known)


def seconds(value: float | None) -> str:
    """With one digit; empty where nothing was timed."""
    return "" if value is None else f"{value:.1f}"


def markdown() -> str:
    """The table of the page."""
    found = rows()
    lines = [
        "| fault | models trained again | noticed | made good | bytes equal | date |",
        "|---|---|---|---|---|---|",
    ]
    for fault, words in FAULTS.items():
        row = found.get(fault)
        if row is None:
            lines.append(f"| {words} | | | | untried | |")
            continue
        times = [f"{row[name]} s" if row[name] else "" for name in ("noticed_s", "recovered_s")]
        lost = f"{row['again']} of {row['models']}"
        cells = [words, lost, *times, row["bytes_equal"], row["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |") + "\n"


def on_page() -> str:
    """The table that the page shows."""
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + markdown() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
