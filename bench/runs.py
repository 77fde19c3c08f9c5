#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The runs that are kept: all of one day on one machine in a folder of their own.

    bench/runs.py list 2026-11-26               the runs of a day
    bench/runs.py show 2026-11-26 12-run1       one of them, as JSON
    bench/runs.py summary                       write every summary.md anew

A folder bench/runs/DATE-MACHINE/ has

    machine.json   the machine
    raw.jsonl      a line for each run: its name, the revision of the programs (since
                   2026-11-29), and the report as the lab printed it
    summary.md     a table of them, for people
    *.txt          logs of torture and of tests

bench/figures.py adds runs; nothing here measures.
"""

import json
import re
import sys
from pathlib import Path

RUNS = Path(__file__).resolve().parent / "runs"

# Of the facts of a report, those that tell what was asked and what came out, in this order.
ASKED = (
    "server door disk disks layout file_system kind streams readers writers clients streams_most"
    " copies seconds bitrate preroll_ms start sequence analyser storm_rate seed"
).split()
CAME_OUT = (
    "streams_admitted streams_kept frames late_frames late_frames_admitted worst_lateness_ms"
    " first_frame_ms_max device_late_blocks mb_per_s mb_per_s_synced copy_mb_per_s"
    " client_mb_per_s_min fragments_max cpu_s_per_gib server_cpu_s bytes_wrong stolen_cpu_s"
).split()


def machine_of(facts):
    """A short name of a machine, of its processors alone."""
    brand = re.sub(r"\(r\)|processor|@.*", " ", facts.get("cpu", "unknown").lower())
    brand = re.sub(r"[^a-z0-9]+", "-", brand).strip("-")
    return f"{brand}-{facts.get('cpu_count', 0)}"


def folder_of(date):
    """The folders of a day: one for each machine."""
    found = sorted(RUNS.glob(f"{date}-*"))
    if not found:
        sys.exit(f"runs: nothing was kept on {date}; expected one of {', '.join(days())}")
    return found


def days():
    """All days of which something is kept."""
    return sorted({folder.name[:10] for folder in RUNS.iterdir() if folder.is_dir()})


def read(folder):
    """The runs of a folder: name and report, in the order in which they were made."""
    path = folder / "raw.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["run"], line["report"]) for line in lines]


def folder_for(date, facts):
    """The folder of this day and machine, made if it is the first run."""
    folder = RUNS / f"{date}-{machine_of(facts)}"
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "machine.json"
    if not note.exists():
        note.write_text(json.dumps(facts, indent=1) + "\n")
    return folder


def add(folder, name, revision, report):
    """Keep a run; never over an earlier one of that name: a good one must not hide a bad one."""
    taken = {run for run, _ in read(folder)}
    serial, free = 2, name
    while free in taken:
        free = f"{name}.{serial}"
        serial += 1
    with (folder / "raw.jsonl").open("a") as raw:
        line = {"run": free, "revision": revision, "report": report}
        raw.write(json.dumps(line, separators=(",", ":")) + "\n")
    summarise(folder)
    return free


def said(value):
    """A fact, short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/")


def facts_of(report, names):
    """Those facts of a report that it has."""
    if not isinstance(report, dict):
        return ""
    return ", ".join(f"{name} {said(report[name])}" for name in names if said(report.get(name)) not in ("None", ""))


def summarise(folder):
    """Write the table of a folder."""
    note = folder / "machine.json"
    facts = json.loads(note.read_text()) if note.exists() else {}
    machine = ", ".join(f"{key} {value}" for key, value in facts.items()) or "not noted"
    lines = [
        f"# Runs of {folder.name[:10]}",
        "",
        f"Machine: {machine}.",
        "",
        "One run as JSON: `bench/runs.py show "
        f"{folder.name[:10]} NAME`. Units are those of the lab's reports.",
        "",
        "| run | what | asked | came out |",
        "|---|---|---|---|",
    ]
    for name, report in read(folder):
        of = report if isinstance(report, dict) else {}
        what = of.get("experiment") or of.get("trial") or ("play" if "streams" in of else "")
        asked, out = facts_of(report, ASKED), facts_of(report, CAME_OUT)
        lines.append(f'| <a id="{name}"></a>{name} | {what} | {asked} | {out} |')
    logs = sorted(path.name for path in folder.glob("*.txt"))
    if logs:
        lines += ["", "Logs: " + ", ".join(f"[{log}]({log})" for log in logs) + "."]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")


def main(words):
    """The command."""
    match words:
        case ["list", date]:
            for folder in folder_of(date):
                for name, report in read(folder):
                    print(f"{folder.name}  {name}  {facts_of(report, CAME_OUT)}")
        case ["show", date, run]:
            for folder in folder_of(date):
                for name, report in read(folder):
                    if name == run:
                        print(json.dumps(report, indent=1))
                        return 0
            print(f"runs: no run {run} on {date}; see: bench/runs.py list {date}", file=sys.stderr)
            return 1
        case ["summary"]:
            for folder in sorted(path for path in RUNS.iterdir() if path.is_dir()):
                summarise(folder)
        case _:
            print(__doc__.strip(), file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
