#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the figures of bench/PROMISES.md, one by name.

    bench/figures.py 12            as `make figure-12`
    bench/figures.py --list        their names

Each run is one `rushes lab …` and one line in bench/runs/DATE-MACHINE/raw.jsonl, see
bench/runs.py. The verdict at the end compares with the promise; the exit code is 0 when it is kept or when the
figure only reports. Nothing is measured here: the lab measures, this puts runs in order.
"""

import datetime
import json
import math
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import runs as kept

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
RUSHES = Path(os.environ.get("RUSHES", ROOT / TARGET / "release" / "rushes"))


# A folder of a real disk, for what does not fit into memory.
DISK = os.environ.get("RUSHES_BENCH_DISK", "/var/tmp")

# A run is not judged when the host of a virtual machine took more than this part of the processor time that was wanted; it is
# made again so often, after a pause. The last one is judged whatever it was.
STOLEN_MAX = 0.03
TRIES = 4
PAUSE_S = 30

# What the modelled array writes in sequence: the last value of the write row that it was fitted to.
TABLE5_MB_PER_S = 1123e6 / 8 / 1e6


def let_go_of(scratch):
    """Take down the disk that runs kept in this folder: it outlives them, and holds its memory."""
    subprocess.run([str(RUSHES), "lab", "clean", "--kept", scratch], check=False)


class Runs:
    """Runs of one figure: each is started, kept and returned as an object."""

    def __init__(self, figure, keep):
        self.figure = figure
        self.keep = keep
        facts = machine()
        self.revision = facts.pop("revision")
        self.folder = kept.folder_for(datetime.date.today().isoformat(), facts)

    def play(self, label, *words):
        """One `rushes lab play`; a label of its own within the figure."""
        # The largest set-up of all figures, so that one kept disk serves them all.
        disk = ["--keep", self.keep, "--footage-streams", "15", "--footage-copies", "2"]
        # These lay out footage of another kind; both at once would not fit the memory of a small machine.
        if "--sequence" in words or "--storm" in words:
            disk = []
            if not os.environ.get("RUSHES_LAB_KEEP"):
                let_go_of(self.keep)
        return self.lab(label, "play", *words, *disk)

    def lab(self, label, *words):
        """One `rushes lab … --json`; again when its machine was not there for it, and all of them are kept."""
        for left in reversed(range(TRIES)):
            report = self.run(label, *words)
            wanted = report.get("machine_cpu_s", 0) + report.get("stolen_cpu_s", 0)
            if report.get("stolen_cpu_s", 0) <= STOLEN_MAX * wanted or left == 0:
                break
            print(
                f"   not judged: the machine's host took {report['stolen_cpu_s']:.1f} of"
                f" {wanted:.1f} s of CPU; again in {PAUSE_S} s",
                flush=True,
            )
            time.sleep(PAUSE_S)
        return report

    def run(self, label, *words):
        """One run and its line."""
        command = [str(RUSHES), "lab", *map(str, words), "--json"]
        print(f"-- {label}: rushes {' '.join(command[1:])}", flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        failed = f"figures: {label} failed with exit code {done.returncode}; see above"
        if done.returncode != 0 and not done.stdout:
            sys.exit(failed)
        report = json.loads(done.stdout)
        self.put(label, report)
        # Wrong bytes or a failed copy: the report is kept, but is no figure.
        if done.returncode != 0:
            sys.exit(failed)
        if "device_late_blocks" in report:
            show_recording(report)
        elif "late_frames" in report:
            print(
                f"   {report['streams']} streams, {report['streams_admitted']} admitted:"
                f" {report['late_frames']} of {report['frames']} frames late"
                f" ({report['late_frames_admitted']} of admitted streams),"
                f" worst {report['worst_lateness_ms']:.0f} ms,"
                f" first frame {report['first_frame_ms_max']:.0f} ms,"
                f" copies {report['copy_mb_per_s']:.1f} MB/s,"
                f" {report['bytes_wrong']} bytes wrong,"
                f" {report['stolen_cpu_s']:.1f} s of CPU stolen",
                flush=True,
            )
        return report

    def put(self, label, report):
        """Keep it."""
        kept.add(self.folder, f"{self.figure}-{label}", self.revision, report)


def show_recording(report):
    """The line of a run that writes."""
    late = report["device_late_blocks"]
    print(
        f"   {report['server']}, {report['file_system']}: {report['writers']} writers:"
        f" {report['late_frames']} of {report['frames']} frames late,"
        f" {'?' if late is None else late} blocks late on the device,"
        f" {report['mb_per_s_synced']:.1f} MB/s with the final sync,"
        f" at most {report['fragments_max']} fragments,"
        f" {report['server_cpu_s']:.1f} s of CPU ({report['stolen_cpu_s']:.1f} s of the machine's stolen),"
        f" {report['bytes_wrong']} bytes wrong",
        flush=True,
    )


def machine():
    """What the numbers are measured on, and with; never the machine's name, nor who hosts it."""

    def said(*command):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        return done.stdout.strip()

    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = Path("/proc/meminfo").read_text().splitlines()[0].split()
    changed = said("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.machine(),
        "cpu_count": os.cpu_count(),
        "memory_kib": int(memory[1]),
        # Its numbers: what follows them names who built it.
        "kernel": re.match(r"[0-9.]*", platform.release()).group(),
        "samba": said("smbd", "--version"),
        "revision": said("git", "rev-parse", "--short", "HEAD") + (" changed" if changed else ""),
    }


# ---- verdicts ----


def clean(report, streams):
    """Everybody admitted, nobody late, no byte wrong."""
    return (
        report["streams_admitted"] == streams
        and report["late_frames"] == 0
        and report["bytes_wrong"] == 0
        and not report["copy_failures"]
        and not report["errors"]
    )


def honest(report):
    """Nobody who was admitted is late, no byte is wrong, nothing failed."""
    return (
        report["late_frames_admitted"] == 0
        and report["bytes_wrong"] == 0
        and not report["copy_failures"]
        and not report["errors"]
    )


def verdict(kept, sentence):
    """Say it and turn it into an exit code; None: reported, not promised."""
    word = {True: "KEPT", False: "BROKEN", None: "reported"}[kept]
    print(f"{word}: {sentence}")
    return 1 if kept is False else 0


# ---- the figures ----


def figure_12(runs):
    """12 streams, no late frame, five runs in a row."""
    reports = [runs.play(f"run{n}", "--streams", 12) for n in range(1, 6)]
    good = sum(clean(report, 12) for report in reports)
    return verdict(good == 5, f"12 streams without a late frame in {good} of 5 runs")


def figure_13(runs):
    """13 streams: the moonshot, without a margin; the two hundredths for best effort stay kept."""
    report = runs.play("run", "--streams", 13, "--rushes-option", 'margin="0%"')
    return verdict(
        None,
        f"13 asked, {report['streams_admitted']} admitted, {report['late_frames']} frames late",
    )


def figure_15(runs):
    """15 asked: at least 12 kept, no admitted frame late."""
    report = runs.play("run", "--streams", 15)
    admitted = report["streams_admitted"]
    return verdict(
        admitted >= 12 and honest(report),
        f"15 asked, {admitted} admitted, {report['late_frames_admitted']} of their frames late",
    )


def figure_together(runs):
    """Smallest preroll that keeps 9 to 12 streams started at once, beside stock's."""
    words = ["--servers", "rushes,stock", "--streams", "9,10,11,12", "--seconds", 12]
    answers = runs.lab("preroll", "preroll", *words, "--keep", runs.keep)
    print("  streams  server           preroll ms")
    for answer in sorted(answers, key=lambda a: (a["streams"], a["server"])):
        preroll = answer["preroll_ms"]
        text = "never" if preroll is None else f"{preroll:.0f}"
        print(f"  {answer['streams']:7}  {answer['server']:15}  {text:>10}")
    return verdict(None, "smallest preroll for streams started together, as above")


def figure_12_copies(runs):
    """12 streams beside two copies, no late frame."""
    report = runs.play("run", "--streams", 12, "--copies", 2)
    return verdict(
        clean(report, 12),
        f"12 streams beside 2 copies: {report['late_frames']} frames late,"
        f" copies {report['copy_mb_per_s']:.1f} MB/s",
    )


def figure_8_copies(runs):
    """8 streams beside two copies: no late frame, copies at least 30 MB/s together."""
    report = runs.play("run", "--streams", 8, "--copies", 2)
    rate = report["copy_mb_per_s"]
    return verdict(
        clean(report, 8) and rate >= 30,
        f"8 streams beside 2 copies: {report['late_frames']} frames late, copies {rate:.1f} MB/s",
    )


def figure_storm(runs):
    """12 streams beside four clients that stat and list 100,000 entries."""
    warm = runs.play("warm", "--streams", 12, "--storm", 4, "--storm-warm")
    cold = runs.play("cold", "--streams", 12, "--storm", 4)
    # With nobody admitted, none of theirs could be late.
    return verdict(
        clean(warm, 12) and cold["streams_admitted"] >= 1 and honest(cold),
        f"storm: warm {warm['late_frames']} frames late; cold {cold['streams_admitted']} admitted,"
        f" {cold['late_frames_admitted']} of their frames late",
    )


def figure_first_frame(runs):
    """A twelfth stream's first frame within 500 ms of its open, eleven playing."""
    report = runs.play("run", "--streams", 12, "--stagger", "2s")
    last = report["per_stream"][-1]
    first = last["first_frame_ms"]
    return verdict(
        first <= 500 and clean(report, 12), f"the twelfth stream's first frame after {first:.0f} ms"
    )


def figure_sequence(runs):
    """Ten frame sequences, no late frame; stock beside it."""
    stock = runs.play("stock", "--server", "stock", "--sequence", "--streams", 10)
    report = runs.play("rushes", "--sequence", "--streams", 10)
    return verdict(
        clean(report, 10),
        f"10 frame sequences: {report['late_frames']} frames late, stock {stock['late_frames']}",
    )


def trial(runs, name, *words):
    """A trial beside stock: prints its rows; returns whether each is as wanted."""
    result = runs.lab(name, name, *words)
    kept = result["bytes_wrong"] == 0
    for row in result["rows"]:
        # "≤ 1.0, aim 0.8": the sign and the first number are the promise; nothing: only reported.
        promise = row["wanted"].replace(",", " ").split()[:2]
        if promise:
            sign, limit = promise
            below = row["ratio"] <= float(limit)
            kept = kept and (below if sign == "≤" else row["ratio"] >= float(limit))
        print(f"   {row['what']}: {row['ratio']:.3f} × stock, wanted {row['wanted'] or '—'}")
    return kept


def figure_cache(runs):
    """From cache: server CPU per GiB and single-client throughput beside stock's."""
    return verdict(trial(runs, "hits"), "from cache, as above")


def figure_absent(runs):
    """Daemon absent: no workload slower than stock by more than 2 %."""
    # Two per cent is little beside what a shared machine does to each run: many of them.
    return verdict(trial(runs, "absent", "--repeat", 48), "without a daemon, as above")


def figure_mixed(runs):
    """Random mixed load: throughput and mean response beside stock's."""
    return verdict(trial(runs, "mixedio"), "mixed load, as above")


def figure_analyser_off(runs):
    """The main figures without the analyser."""
    alone = runs.play("12", "--streams", 12, "--no-analyser")
    beside = runs.play("12-copies", "--streams", 12, "--copies", 2, "--no-analyser")
    copies = runs.play("8-copies", "--streams", 8, "--copies", 2, "--no-analyser")
    return verdict(
        None,
        f"without the analyser: 12 streams {alone['late_frames']} frames late, beside copies"
        f" {beside['late_frames']}, 8 beside copies {copies['late_frames']}",
    )


def figure_stock(runs):
    """Stock Samba and stock tuned, alone and beside copies: what we are compared with."""
    runs.play("stock-6", "--server", "stock", "--streams", 6)
    runs.play("stock-12", "--server", "stock", "--streams", 12)
    runs.play("stock-8-copies", "--server", "stock", "--streams", 8, "--copies", 2)
    runs.play("stock-tuned-8", "--server", "stock-tuned", "--streams", 8)
    runs.play("stock-tuned-8-copies", "--server", "stock-tuned", "--streams", 8, "--copies", 2)
    return verdict(None, "stock Samba, as above")


# ---- editing ----


def edited(runs, label, *words):
    """One `rushes lab edit`; the report, after its rows."""
    report = runs.lab(label, "edit", *words)
    for row in report["medians"]:
        low, median, high = row["late_frames"]
        frames = f"{median:.0f} ({low:.0f}–{high:.0f}) of {row['frames']} late, worst {ms(row['worst_lateness_ms'])}"
        print(
            f"   {row['mix']}, {row['server']}, {row['kind']}: {frames if row['frames'] else 'no clock'};"
            f" first frame p50 {ms(row['first_frame_ms_p50'])}, p95 {ms(row['first_frame_ms_p95'])},"
            f" worst {ms(row['first_frame_ms_max'])}; {row['frames_per_s_each'][1]:.1f} frames/s each,"
            f" {row['mb_per_s'][1]:.1f} MB/s; {row['bytes_wrong']} bytes wrong",
            flush=True,
        )
    return report


def ms(value):
    """A time for people; there may be none."""
    return "—" if value is None else f"{value:.0f} ms"


def rows_of(report, mix):
    """Server → row of a mix of one kind."""
    return {row["server"]: row for row in report["medians"] if row["mix"] == mix}


def figure_timeline(runs):
    """8, 9, 10 editors with a cut every 3 s, beside stock: of 8 no frame late in five runs, first frame p95 ≤ 150 ms, worst < 500 ms."""
    words = ["--server", "rushes,stock", "--clients", "8,9,10", "--seconds", 25, "--runs", 5]
    report = edited(runs, "editors", *words)
    ours, stock = (rows_of(report, "timeline=8")[server] for server in ("rushes", "stock"))
    kept = (
        ours["late_frames"][2] == 0
        and ours["first_frame_ms_p95"] <= 150
        and ours["first_frame_ms_max"] < 500
        and report["bytes_wrong"] == 0
    )
    return verdict(
        kept,
        f"8 editors: {ours['late_frames'][1]:.0f} frames late (stock {stock['late_frames'][1]:.0f}), first frame"
        f" p95 {ms(ours['first_frame_ms_p95'])}, worst {ms(ours['first_frame_ms_max'])}",
    )


def kinds_of(report, mix, server):
    """Kind of client → its row, of a mix against a server."""
    return {row["kind"]: row for row in report["medians"] if (row["mix"], row["server"]) == (mix, server)}


def figure_timeline_again(runs):
    """9, 10, 11, 12 editors who play the same timeline twice: the second time no frame of 11 late in five runs."""
    words = ["--clients", "9,10,11,12", "--again", 1, "--seconds", 25, "--runs", 5]
    report = edited(runs, "again", *words)
    for row in report["medians"]:
        for one in row["passes"]:
            low, median, high = one["late_frames"]
            print(f"   {row['mix']}, pass {one['pass']}: {median:.0f} ({low:.0f}–{high:.0f}) of {one['frames']} late")
    second = rows_of(report, "timeline=11")["rushes"]["passes"][-1]
    kept = second["late_frames"][2] == 0 and report["bytes_wrong"] == 0
    return verdict(kept, f"11 editors, the second time: {second['late_frames'][2]:.0f} of {second['frames']} frames late in the worst run")


def figure_multicam(runs):
    """3 editors who cut three layers at once, beside stock: no frame late in five runs."""
    words = ["--clients", 3, "--layers", 3, "--server", "rushes,stock", "--seconds", 25, "--runs", 5]
    report = edited(runs, "editors", *words)
    rows = rows_of(report, "timeline=3")
    kept = rows["rushes"]["late_frames"][2] == 0 and report["bytes_wrong"] == 0
    late = {server: row["late_frames"] for server, row in rows.items()}
    return verdict(kept, f"3 editors of 3 layers, frames late (least, median, most): {late}")


def beside_players(runs, label, mix, kind, rate):
    """Ours by stock's rate of a client beside players, and the players' late frames in the worst run of ours and of stock's."""
    report = edited(runs, label, "--mix", mix, "--server", "rushes,stock", "--seconds", 25, "--runs", 5)
    ours, stock = (kinds_of(report, mix, server) for server in ("rushes", "stock"))
    times = ours[kind][rate][1] / max(stock[kind][rate][1], 1e-9)
    return times, ours["linear"]["late_frames"][2], stock["linear"]["late_frames"][2], report["bytes_wrong"]


def figure_scrub(runs):
    """A scrubber beside 6 players: at least 1.5 × stock's frames, no player late in five runs."""
    times, late, theirs, wrong = beside_players(runs, "beside-6", "linear=6,scrub=1", "scrub", "frames_per_s_each")
    return verdict(
        times >= 1.5 and late == 0 and wrong == 0,
        f"the scrubber got {times:.2f} × stock's frames; {late:.0f} frames of the players late in the worst run"
        f" (stock {theirs:.0f})",
    )


def figure_loop(runs):
    """12 clients that each play the same 20 s again and again, beside stock: no frame late in five runs."""
    words = ["--workload", "loop", "--clients", 12, "--server", "rushes,stock", "--seconds", 45, "--runs", 5]
    rows = rows_of(edited(runs, "loops", *words), "loop=12")
    late = {server: row["late_frames"] for server, row in rows.items()}
    return verdict(rows["rushes"]["late_frames"][2] == 0, f"12 loops, frames late (least, median, most): {late}")


def figure_beside(runs):
    """A bin, a conform, a render beside 4 players: at least stock's throughput, no player late in five runs."""
    short = []
    for kind in ("bin", "conform", "render"):
        times, late, _, wrong = beside_players(runs, kind, f"linear=4,{kind}=1", kind, "mb_per_s")
        if times < 1 or late or wrong:
            short.append(f"{kind}: {times:.2f} × stock's throughput, {late:.0f} frames of players late")
    return verdict(not short, "; ".join(short) or "bin, conform and render: none slower than with stock, no player late")


def figure_grow(runs):
    """2 and 4 clients that play a file 2 s behind its recorder, beside stock: no frame late in five runs."""
    words = ["--workload", "grow", "--clients", "2,4", "--server", "rushes,stock", "--seconds", 25, "--runs", 5]
    report = edited(runs, "behind", *words)
    late = {mix: kinds_of(report, mix, "rushes")["grow"]["late_frames"][2] for mix in ("grow=2", "grow=4")}
    return verdict(not any(late.values()), f"frames late in the worst run: {late}")


def figure_timeline_pool(runs):
    """29 editors (0.9 × 4 × 8) over SMB on a pool of four disks, and as many over NFS as 0.9 × 4 × what one disk keeps: no frame late in three runs."""
    words = ["--layout", "pool", "--disks", 4, "--files", 64, "--seconds", 25, "--runs", 3]
    report = edited(runs, "smb", "--clients", 29, *words)
    smb = rows_of(report, "timeline=29")["rushes"]["late_frames"][2]
    counts = (4, 6, 8, 10, 12)
    words_of_one = ["--door", "nfs", "--layout", "pool", "--clients", ",".join(map(str, counts)), "--seconds", 25, "--runs", 3]
    one = edited(runs, "nfs-one", *words_of_one)
    best = 0
    for count in counts:
        if rows_of(one, f"timeline={count}")["rushes"]["late_frames"][2]:
            break
        best = count
    if not best:
        return verdict(False, f"SMB, 29 editors: {smb:.0f} frames late in the worst run; NFS, one disk: not even 4 kept")
    count = math.ceil(0.9 * 4 * best)
    report = edited(runs, "nfs-four", "--door", "nfs", "--clients", count, *words)
    nfs = rows_of(report, f"timeline={count}")["rushes"]["late_frames"][2]
    return verdict(
        smb == 0 and nfs == 0,
        f"frames late in the worst run: SMB, 29 editors, {smb:.0f}; NFS, {count} editors, {nfs:.0f}"
        f" (one disk keeps {best})",
    )


# Beyond what runs of one server differ by among themselves. Late frames are counted; a frame a client is no difference.
NOISE = 0.05
WORKLOADS = ("timeline", "op-atom", "scrub", "shuttle", "loop", "bin", "conform", "render", "grow")
DISKS = ("table5", "ssd", "memory")


def figure_matrix(runs):
    """Every way of working × 2 to 12 clients × three disks: nowhere more late frames or less throughput than the better of stock and stock-tuned."""
    short, cells = [], 0
    for disk in DISKS:
        for workload in WORKLOADS:
            words = ["--disk", disk, "--workload", workload, "--clients", "2,4,6,8,10,12"]
            words += ["--server", "rushes,stock,stock-tuned", "--seconds", 12, "--runs", 3, "--file-bytes", "500M"]
            report = edited(runs, f"{disk}-{workload}", *words)
            for mix in dict.fromkeys(row["mix"] for row in report["medians"]):
                for kind in dict.fromkeys(row["kind"] for row in report["medians"] if row["mix"] == mix):
                    cells += 1
                    rows = {row["server"]: row for row in report["medians"] if (row["mix"], row["kind"]) == (mix, kind)}
                    if harm := harm_of(rows):
                        short.append(f"{disk} {mix} {kind}: {harm}")
    for cell in short:
        print(f"   HARM {cell}", flush=True)
    return verdict(not short, f"{cells} cells, {len(short)} of them worse than the better of stock and stock-tuned")


def harm_of(rows):
    """In words, or nothing: medians of ours beside the better of theirs."""
    ours, theirs = rows["rushes"], [rows["stock"], rows["stock-tuned"]]
    if ours["frames"]:
        late, best = ours["late_frames"][1], min(row["late_frames"][1] for row in theirs)
        clients = int(ours["mix"].split("=")[1])
        return f"{late:.0f} frames late, theirs {best:.0f}" if late > best + clients else ""
    rate, best = ours["mb_per_s"][1], max(row["mb_per_s"][1] for row in theirs)
    return f"{rate:.1f} MB/s, theirs {best:.1f}" if rate < best * (1 - NOISE) else ""


# ---- recording ----


def on_time(report):
    """Every frame acknowledged and on the device in time, nothing wrong."""
    return (
        report["late_frames"] == 0
        and report["device_late_blocks"] == 0
        and report["bytes_wrong"] == 0
        and not report["errors"]
    )


def figure_record(runs):
    """11 writers for three minutes, XFS and ext4 for media (ext4 by default beside): nothing late, acknowledged or on the device."""
    words = ["record", "--streams", 11, "--seconds", 180]
    # They are 25 GB, and more than a small machine's memory.
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        words += ["--disk-folder", folder]
        reports = {
            name: runs.lab(name, *words, *more)
            for name, *more in (
                ("xfs", "--fs", "xfs"),
                ("ext4-media", "--fs", "ext4", "--media-format"),
                ("ext4", "--fs", "ext4"),
            )
        }
    late = {name: (r["late_frames"], r["device_late_blocks"]) for name, r in reports.items()}
    return verdict(
        on_time(reports["xfs"]) and on_time(reports["ext4-media"]),
        f"11 writers, (frames, blocks on the device) late: {late}",
    )


def figure_record_stock(runs):
    """The same by rivals, for one minute."""
    for server in ("stock", "stock-strict", "stock-uring"):
        runs.lab(server, "record", "--streams", 11, "--server", server)
    return verdict(None, "11 writers, rivals, as above")


def figure_record_mixed(runs):
    """6 players, 5 recorders and a copy: nothing late."""
    words = ["mixed", "--readers", 6, "--writers", 5, "--copies", 1]
    kept = True
    for fs in ("ext4", "xfs"):
        report = runs.lab(fs, *words, "--fs", fs)
        show_recording(report["recording"])
        kept = kept and clean(report, 6) and on_time(report["recording"])
    return verdict(kept, "6 players, 5 recorders and a copy, as above")


def figure_record_mixed_stock(runs):
    """The same by rivals."""
    for server in ("stock", "stock-strict", "stock-uring"):
        words = ["--readers", 6, "--writers", 5, "--copies", 1, "--server", server]
        show_recording(runs.lab(server, "mixed", *words)["recording"])
    return verdict(None, "6 players, 5 recorders and a copy, rivals, as above")


def figure_fragments(runs):
    """Twelve files of 1 GiB written at once: at most two fragments each; server CPU a GiB."""
    words = ["record", "--streams", 12, "--bitrate", "max", "--bytes", "1GiB", "--start", "together"]
    kept = True
    made = {"ext4": ["--fs", "ext4"], "xfs": ["--fs", "xfs"]}
    # As docs/guide/recording.md recommends; rivals have it as well.
    made["ext4-media"] = ["--fs", "ext4", "--media-format"]
    for fs, format_words in made.items():
        cpu, with_kernel = {}, {}
        for server in ("rushes", "stock"):
            report = runs.lab(f"{fs}-{server}", *words, *format_words, "--server", server)
            gib = report["bytes"] / 2**30
            cpu[server] = report["server_cpu_s"] / gib
            # What the kernel writes out by itself is in no server's account.
            disk = report["disk_statistics"]["cpu_ms"] / 1e3
            others = report["writers_cpu_s"] + disk
            with_kernel[server] = (report["machine_cpu_s"] - others) / gib
            if server == "rushes":
                kept = kept and report["fragments_max"] <= 2 and report["bytes_wrong"] == 0
        ratio = cpu["rushes"] / cpu["stock"]
        whole = with_kernel["rushes"] / with_kernel["stock"]
        print(
            f"   {fs}: server CPU {ratio:.2f} × stock a GiB written, wanted at most 0.8;"
            f" with what the kernel does by itself {whole:.2f} ×"
        )
        kept = kept and ratio <= 0.8
    return verdict(kept, "twelve files of 1 GiB at once, as above")


def figure_copy_in(runs):
    """Copying in, files made long before: 1.67 × stock or 0.95 × what the disk does."""
    kept = True
    for fs in ("ext4", "xfs"):
        rates = {}
        for server in ("rushes", "stock"):
            report = runs.lab(f"{fs}-{server}", "copy-in", "--fs", fs, "--server", server)
            rates[server] = report["mb_per_s_synced"]
        limit = min(1.67 * rates["stock"], 0.95 * TABLE5_MB_PER_S)
        print(f"   {fs}: {rates['rushes']:.1f} MB/s, wanted {limit:.1f} (stock {rates['stock']:.1f})")
        kept = kept and rates["rushes"] >= limit
    return verdict(kept, "copying in, as above")


def figure_scatter(runs):
    """Small writes anywhere, then a sync: requests and bandwidth beside fio through the kernel."""
    ratios = []
    for turn in (1, 2, 3):
        ours = runs.lab(f"rushes{turn}", "scatter", "--bytes", "1GiB")
        fio = runs.lab(f"fio{turn}", "scatter", "--bytes", "1GiB", "--fio")
        # What a server costs at all, fio does not pay: clients, connections, a copy more. So the same through stock, beside it.
        stock = runs.lab(f"stock{turn}", "scatter", "--bytes", "1GiB", "--server", "stock")
        requests = fio["device_write_count"] / ours["device_write_count"]
        rate = ours["mb_per_s_synced"] / fio["mb_per_s_synced"]
        print(
            f"   {requests:.2f} × fewer requests, {rate:.2f} × the bandwidth; beside stock"
            f" {stock['device_write_count'] / ours['device_write_count']:.2f} and"
            f" {ours['mb_per_s_synced'] / stock['mb_per_s_synced']:.2f} ×"
        )
        ratios.append((requests, rate))
    requests, rate = (sorted(column)[1] for column in zip(*ratios, strict=True))
    return verdict(
        requests >= 4 and rate >= 1.38,
        f"small writes anywhere: {requests:.2f} × fewer requests, {rate:.2f} × the bandwidth",
    )


def figure_kills(runs):
    """A thousand kills of the daemon under mixed load, and 200 where each byte is followed: no wrong byte, no error, no kill that costs a request a second."""
    commands = [
        ([str(TARGET / "release" / "smb-mixed-kills")], "1000"),
        (
            ["cargo", "test", "--locked", "-p", "rushes-tests", "--test", "writing"]
            + ["--", "killed", "--nocapture", "--test-threads", "1"],
            "100",
        ),
    ]
    codes, rows = killed(commands)
    runs.put("run", {"exit_codes": codes, "rows": rows})
    kills = sum(row["kills"] for row in rows)
    longest = max((row["longest_ms"] for row in rows), default=0)
    return verdict(
        codes == [0, 0] and kills == 1200 and longest < 1000,
        f"{kills} kills, longest pause {longest} ms, exit codes {codes}",
    )


def figure_pool_kills(runs):
    """A thousand kills of the daemon under a pool in use by SMB, NFS, iSCSI and programs on its mount: no wrong byte, no error."""
    codes, rows = killed([([str(TARGET / "release" / "pool-kills")], "1000")])
    runs.put("run", {"exit_codes": codes, "rows": rows})
    kills = sum(row["kills"] for row in rows)
    longest = max((max(row["longest_ms"], row["chain_ms"]) for row in rows), default=0)
    return verdict(
        codes == [0] and kills == 1000,
        f"{kills} kills, longest request {longest} ms, exit codes {codes}",
    )


def killed(commands):
    """Run tests that kill the daemon; their exit codes, and what they say of each run."""
    rows, codes = [], []
    for command, kills in commands:
        print(f"-- {' '.join(command)}, {kills} kills", flush=True)
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "RUSHES_TEST_KILLS": kills, "RUSHES_TEST_ALL": "1"},
        )
        codes.append(done.returncode)
        print(done.stdout, flush=True)
        said = (
            r"(\d+) clients, (\d+) steps, (\d+) kills, longest (?:request|pause) (\d+) ms"
            r"(?: .*; (\d+) ms .* over (\d+) kills)?"
        )
        for row in re.findall(said, done.stdout):
            keys = ("clients", "steps", "kills", "longest_ms", "chain_ms", "chain_kills")
            numbers = (int(number or 0) for number in row)
            rows.append(dict(zip(keys, numbers, strict=True)))
    return codes, rows


def figure_power_cuts(runs):
    """Ten thousand power cuts: what was synced is there, nothing is another file's."""
    reports = [
        runs.lab(fs, "power-cuts", "--fs", fs, "--points", 5000, "--seed", 2026)
        for fs in ("ext4", "xfs")
    ]
    found = sum(report["violation_count"] for report in reports)
    return verdict(found == 0, f"{found} violations in 10,000 power cuts")


def figure_pool_power_cuts(runs):
    """A thousand power cuts of a pool: what was synced is there, nothing is another file's."""
    reports = [
        runs.lab(
            f"{fs}-{server}",
            *("power-cuts", "--layout", "pool", "--fs", fs, "--server", server),
            *("--points", 250, "--seed", 2026),
        )
        for fs in ("ext4", "xfs")
        for server in ("rushes", "none")
    ]
    found = sum(report["violation_count"] for report in reports)
    return verdict(found == 0, f"{found} violations in 1,000 power cuts of a pool")


class Mounts:
    """File systems in memory and what is mounted over them, all gone at the end."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="rushes-figures.", dir="/dev/shm"))
        self.mounted = []
        self.programs = []
        # By the file system that each has open.
        self.daemons = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for path in reversed(self.mounted):
            if path in self.daemons:
                self.daemons[path].terminate()
                self.daemons[path].wait()
            # What was mounted over it ends a moment after its own unmount.
            for _ in range(50):
                if subprocess.run(["umount", path], check=False, stderr=subprocess.DEVNULL).returncode == 0:
                    break
                time.sleep(0.1)
        for program in self.programs:
            program.terminate()
            program.wait()
        if any(path.is_mount() for path in self.mounted):
            sys.exit(f"figures: something below {self.folder} stays mounted; unmount it and remove that folder")
        shutil.rmtree(self.folder)

    def ext4(self, name, gib):
        """A new ext4 of this size, mounted; its folder."""
        image, place = self.folder / f"{name}.img", self.folder / name
        with open(image, "wb") as file:
            file.truncate(gib << 30)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
        place.mkdir()
        subprocess.run(["mount", "-o", "loop", image, place], check=True)
        self.mounted.append(place)
        return place

    def daemon(self, member):
        """A daemon with a share that is this member's folder of a pool; its runtime folder."""
        runtime = self.folder / "daemon"
        config = self.folder / "rushes.toml"
        config.write_text(
            f'[cache]\nbytes = "256MiB"\n[write]\nbuffer_bytes = "512MiB"\n[server]\nruntime_dir = "{runtime}"\n'
            f'state_dir = "{self.folder / "state"}"\nwarm_metadata = false\n[[share]]\nname = "member"\npath = "{member / "pool"}"\n'
        )
        for folder in (runtime, self.folder / "state", member / "pool"):
            folder.mkdir(exist_ok=True)
        self.daemons[member] = subprocess.Popen([RUSHES, "serve", "--config", config], stderr=subprocess.DEVNULL)
        for _ in range(100):
            if (runtime / "control.sock").exists():
                return runtime
            time.sleep(0.1)
        sys.exit("figures: the daemon did not start")

    def pool(self, catalogue, members, name="pool", runtime=None):
        """A pool over these folders, mounted by a process of its own; `runtime`: of the daemon that it goes by."""
        place = self.folder / name
        place.mkdir()
        folders = [folder / "pool" for folder in (catalogue, *members)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        subprocess.run([RUSHES, "pool", "create", *folders], check=True, stdout=subprocess.DEVNULL)
        program = subprocess.Popen(
            [RUSHES, "pool", "mount", folders[0], place, "--runtime-dir", runtime or self.folder / "run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.programs.append(program)
        if " is mounted on " not in program.stdout.readline():
            sys.exit("figures: the pool could not be mounted")
        self.mounted.append(place)
        return place

    def mergerfs(self, members):
        """mergerfs over folders of these, as its manual has it; its folder."""
        place = self.folder / "mergerfs"
        place.mkdir()
        branches = []
        for member in members:
            branch = member / "mergerfs"
            branch.mkdir()
            branches.append(str(branch))
        options = "cache.files=partial,dropcacheonclose=true,category.create=mfs,minfreespace=64M"
        subprocess.run(["mergerfs", "-o", options, ":".join(branches), place], check=True)
        self.mounted.append(place)
        return place


def figure_pool_metadata(runs):
    """Files made, looked at, listed, renamed and removed a second: a pool, mergerfs over the same disks, and one of them bare."""
    with Mounts() as mounts:
        members = [mounts.ext4(f"member{number}", 4) for number in range(2)]
        catalogue = mounts.ext4("catalogue", 4)
        bare = members[0] / "bare"
        bare.mkdir()
        places = {
            "pool": mounts.pool(catalogue, members),
            "mergerfs": mounts.mergerfs(members),
            "ext4": bare,
        }
        words = [f"{label}={place}" for label, place in places.items()]
        report = runs.lab("run", "metadata", *words, "--rounds", 15)
    rates = {
        (row["label"], row["clients"], row["operation"]): row["median_per_s"]
        for row in report["rates"]
    }
    slower = []
    for (label, clients, operation), rate in rates.items():
        if label != "pool":
            continue
        ratio = rate / rates["mergerfs", clients, operation]
        to_bare = rate / rates["ext4", clients, operation]
        print(
            f"   {operation:8} {clients} clients: {rate:9.0f}/s, {ratio:5.2f} × mergerfs,"
            f" {to_bare:5.2f} × the bare disk"
        )
        if ratio < 1:
            slower.append(f"{operation} by {clients} ({ratio:.2f} ×)")
    return verdict(not slower, f"slower than mergerfs: {', '.join(slower) or 'nothing'}")


def figure_microseconds(runs):
    """2K frames and small writes of one program, µs each: ext4 in memory, a pool on the same without a daemon, and with one; reported. docs/decisions/0048 says where they go."""
    with Mounts() as mounts:
        bare = mounts.ext4("bare", 2)
        places = {"ext4": bare}
        for name in ("alone", "served"):
            catalogue, member = mounts.ext4(f"catalogue-{name}", 1), mounts.ext4(f"member-{name}", 2)
            runtime = mounts.daemon(member) if name == "served" else None
            places[name] = mounts.pool(catalogue, [member], name, runtime)
        # The mount looks for its daemon when it begins.
        time.sleep(3)
        touch_memory()
        words = [f"{label}={place}" for label, place in places.items()]
        report = runs.run("run", "strokes", *words, "--rounds", 9)
    took = {(row["way"], row["label"]): row["median_us"] for row in report["rows"]}
    for way in dict.fromkeys(way for way, _ in took):
        bare = took[way, "ext4"]
        print(
            f"   {way:14} "
            + "; ".join(f"{label} {took[way, label]:9.1f} µs, {took[way, label] / bare:6.1f} ×" for label in places)
        )
    return verdict(None, "microseconds of a frame and of a small write, and × plain ext4's")


def figure_pool_million(runs):
    """A million files in one tree, in one folder and in a hundred: listing and stat through a pool's mount as quick as of 10,000 (0.8 ×); mergerfs and ext4 beside."""
    counts = (10_000, 100_000, 1_000_000)
    rates = {}
    with Mounts() as mounts:
        # Inodes are made with the file system: one for each 16 KiB of it.
        members = [mounts.ext4(f"member{number}", 20) for number in range(2)]
        catalogue = mounts.ext4("catalogue", 20)
        bare = members[0] / "bare"
        bare.mkdir()
        places = {"pool": mounts.pool(catalogue, members), "mergerfs": mounts.mergerfs(members), "ext4": bare}
        words = [f"{label}={place}" for label, place in places.items()]
        for folders in (1, 100):
            for count in counts:
                # Each hundredth has bytes: two objects' worth of fsyncs each, which a million of would take an hour.
                load = ["--files", count, "--folders", folders, "--clients", 1, "--bytes-every", 100, "--no-rename"]
                rounds = 5 if count == counts[0] else 1
                report = runs.lab(f"{folders}-{count}", "metadata", *words, *load, "--rounds", rounds)
                for row in report["rates"]:
                    rates[row["label"], folders, count, row["operation"]] = row["median_per_s"]
    slower = []
    for label in places:
        for folders in (1, 100):
            for operation in ("create", "stat", "readdir", "unlink"):
                row = [rates[label, folders, count, operation] for count in counts]
                flat = row[-1] / row[0]
                print(
                    f"   {label:8} {operation:8} in {folders:3} folders:"
                    f" {', '.join(f'{rate:.0f}' for rate in row)}/s, {flat:.2f} × from the first to the last"
                )
                if label == "pool" and operation in ("stat", "readdir") and flat < 0.8:
                    slower.append(f"{operation} in {folders} folders ({flat:.2f} ×)")
    return verdict(not slower, f"of a million slower than of ten thousand: {', '.join(slower) or 'nothing'}")


def figure_pool_fill(runs):
    """Four unequal quarter disks filled to the last hundredth beside streams: every write is taken until all are full, no promised frame late."""
    # Two are the processors here: four streams, and two who fill.
    words = ["fill", "--disk", "table5-quarter", "--layout", "pool", "--sizes", "1GiB,2GiB,3GiB,4GiB"]
    words += ["--streams", 4, "--bitrate", "50M", "--seconds", 150, "--fillers", 2]
    report = runs.lab("run", *words)
    found = report["filling"]
    early = found["bytes_after_refusal"] / found["disk_bytes"]
    is_full = max(found["free_permille"]) <= 10 and early <= 0.01
    print(
        f"   full after {found['full_after_s']:.0f} of {report['seconds']:.0f} s, {found['filled_bytes'] / 2**30:.2f} GiB;"
        f" free of the disks {found['free_permille']} ‰, written after the first refusal {100 * early:.2f} %"
    )
    return verdict(
        is_full and clean(report, 4) and 0 < found["full_after_s"] < report["seconds"],
        f"four unequal disks full: {is_full}; of 4 streams {report['streams_admitted']} under contract,"
        f" {report['late_frames']} frames late",
    )


def kept_streams(runs, label, *words):
    """One `rushes lab most`; the report, after its line."""
    report = runs.lab(label, "most", *words)
    print(
        f"   {report['server']}, {report['layout']} of {report['disks']} × {report['disk']}:"
        f" {report['streams_kept']} streams of {report['bitrate'] / 1e6:.0f} Mb/s kept",
        flush=True,
    )
    return report


def figure_pool_streams(runs):
    """Streams that a pool of 1, 2, 4, 8 disks keeps over SMB: 0.95 N × one disk's; of four half disks 24, btrfs raid0 and mergerfs beside."""
    # Two processors are the limit of eight quicker disks, and of streams of 100 Mb/s a quarter disk has three.
    quarter = ["--disk", "table5-quarter", "--bitrate", "50M", "--seconds", 15, "--cache", "2GiB"]
    kept = {}
    for disks in (1, 2, 4, 8):
        words = ["--disks", disks, "--layout", "pool", "--most", 8 * disks, *quarter]
        kept[disks] = kept_streams(runs, f"pool-{disks}", *words)["streams_kept"]
    half = ["--disk", "table5-half", "--disks", 4, "--seconds", 15, "--cache", "2GiB"]
    pool = kept_streams(runs, "pool-half", *half, "--layout", "pool", "--most", 30)["streams_kept"]
    rivals = {}
    for layout in ("raid0", "mergerfs"):
        for server in ("stock", "stock-tuned"):
            words = [*half, "--layout", layout, "--server", server, "--least", 5, "--most", 22]
            report = kept_streams(runs, f"{layout}-{server}", *words)
            rivals[layout] = max(rivals.get(layout, 0), report["streams_kept"])
    grown = {disks: count / (disks * max(kept[1], 1)) for disks, count in kept.items()}
    for disks, count in kept.items():
        print(f"   {disks} disks: {count} streams, {grown[disks]:.2f} × {disks} × one disk's")
    return verdict(
        kept[1] > 0 and min(grown.values()) >= 0.95 and pool >= 24,
        f"streams of a pool of 1, 2, 4, 8 disks: {list(kept.values())}; of four half disks {pool}, {rivals}",
    )


def figure_pool_nfs(runs):
    """Streams that a pool of four disks keeps over NFS, alone and beside two copies of the same door: at least 0.9 × those over SMB; recorders, too."""
    disks = ["--disk", "table5-quarter", "--disks", 4, "--layout", "pool", "--bitrate", "50M", "--seconds", 15]
    ratios, kept = [], {}
    # Copies are larger than the cache: with a small one, all of it fits a small machine's memory.
    for copies, cache, most in ((0, "2GiB", 32), (2, "512MiB", 24)):
        for door in ("smb", "nfs"):
            words = [*disks, "--most", most, "--cache", cache, "--copies", copies, "--door", door]
            kept[door, copies] = kept_streams(runs, f"{door}-{copies}-copies", *words)["streams_kept"]
        ratios.append(kept["nfs", copies] / max(kept["smb", copies], 1))
        print(f"   beside {copies} copies: {ratios[-1]:.2f} × those over SMB")
    recorders, late = 8, {}
    for door in ("smb", "nfs"):
        report = runs.lab(f"record-{door}", "record", *disks, "--streams", recorders, "--door", door)
        late[door] = report["late_writers"]
        print(
            f"   {door}: of {recorders} recorders {late[door]} late, with {report['late_frames']} frames,"
            f" worst {report['worst_lateness_ms']:.0f} ms; {report['bytes_wrong']} bytes wrong"
        )
        ratios.append((recorders - late[door]) / max(recorders - late["smb"], 1))
    # Where SMB keeps them all NFS must, to the last frame.
    return verdict(
        min(kept.values()) > 0 and min(ratios) >= 0.9 and (late["smb"] > 0 or late["nfs"] == 0),
        f"streams of a pool of four disks: {kept['nfs', 0]} over NFS, {kept['smb', 0]} over SMB;"
        f" beside two copies {kept['nfs', 2]} and {kept['smb', 2]};"
        f" of {recorders} recorders {late['nfs']} and {late['smb']} late",
    )


def figure_pool_tidying(runs):
    """A pool of quarter disks that tidies itself beside players and recorders: spread, defragmented, striped wider; no promised frame late."""
    words = ["mixed", "--disk", "table5-quarter", "--layout", "pool", "--bitrate", "50M", "--seconds", 60]
    words += ["--tidy-bytes", "32MiB"]
    # (Files that are spread leave an empty disk to those who record; else all of them write where others play.)
    ways = {
        "rebalance": ["--disks", 4, "--readers", 12, "--writers", 3, "--tidy-files", 12],
        "defrag": ["--disks", 4, "--readers", 8, "--writers", 2, "--tidy-files", 16],
        "grow": ["--disks", 6, "--readers", 10, "--writers", 3, "--tidy-files", 12],
    }
    broken = []
    for way, more in ways.items():
        reports = {
            when: runs.lab(f"{way}-{when}", *words, *more, "--tidy", way, "--tidy-when", when)
            for when in ("off", "always")
        }
        for when, report in reports.items():
            tidied, recorded = report["tidying"], report["recording"]
            print(
                f"   {way}, {when}: {tidied['moved_bytes'] / 2**20:.0f} MiB of {tidied['moved_count']} files moved,"
                f" {'all' if tidied['is_whole'] else 'not all'} of it; of {report['streams']} streams"
                f" {report['streams_admitted']} under contract, {report['late_frames_admitted']} of their frames late, worst of"
                f" all {report['worst_lateness_ms']:.0f} ms; recorders {recorded['late_frames']} frames late"
            )
        alone, beside = reports["off"], reports["always"]
        tidied = beside["tidying"]
        # What the disks cannot do alone they need not do beside it.
        is_kept = (
            honest(beside)
            and beside["streams_admitted"] >= alone["streams_admitted"]
            and beside["recording"]["late_frames"] <= alone["recording"]["late_frames"]
            and beside["recording"]["bytes_wrong"] == 0
            and tidied["moved_bytes"] > 0
            and tidied["tidied_bytes_wrong"] == 0
            and tidied["failed_count"] == 0
        )
        if not is_kept:
            broken.append(way)
    return verdict(not broken, f"beside a pool that tidies itself somebody fares worse, or nothing is moved: {broken or 'nowhere'}")


def cost(report):
    """A rate and what it costs."""
    return f"{report['mb_per_s_synced']:7.1f} MB/s, {report['cpu_s_per_gib']:.2f} s of CPU a GiB"


def touch_memory():
    """Have the memory that the next run takes from the host first: what a virtual machine gave back comes at a fifth of memory's speed, to whoever is first."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, 8 << 30, flags=anonymous).close()


def figure_pool_sequential(runs):
    """One file read and written through the mount beside a member itself: 0.98 × on table5; striped over 1, 2, 4, 8 disks at least btrfs raid0's."""
    local = ["throughput", "--door", "local", "--bytes", "2GiB", "--cache", "512MiB", "--write-buffer", "512MiB"]
    # ext4, as a pool's members are to be made (docs/guide/recording.md).
    local.append("--media-format")
    ways = {"read": ["--readers", 1], "write": ["--readers", 0, "--writers", 1]}
    servers = {
        "member": ["--server", "stock"],
        "mount": ["--server", "stock", "--layout", "pool"],
        "served": ["--server", "rushes", "--layout", "pool"],
    }
    short = []
    # What the mount is to reach of the member's rate; of what a daemon has to read in memory it is only reported.
    wanted = {("table5", "read"): 0.98, ("table5", "write"): 0.98, ("memory", "read"): 0.95, ("memory", "write"): 0.5}
    for disk, turns in (("table5", 1), ("memory", 5)):
        for way, way_words in ways.items():
            reports = {server: [] for server in servers}
            if turns > 1:
                # Not judged: programs and their libraries are read.
                runs.run(f"{disk}-{way}-first", *local, "--disk", disk, *way_words, *servers["member"])
            for turn in range(1, turns + 1):
                # Another one goes first each time.
                first = turn % len(servers)
                for server, words in [*servers.items()][first:] + [*servers.items()][:first]:
                    label = f"{disk}-{way}-{server}{turn}"
                    if turns > 1:
                        touch_memory()
                    # Of five short runs the middle one counts, whatever the machine's host took of one.
                    once = runs.lab if turns == 1 else runs.run
                    reports[server].append(once(label, *local, "--disk", disk, *way_words, *words))
            middle = {
                server: sorted(of_one, key=lambda report: report["mb_per_s_synced"])[turns // 2]
                for server, of_one in reports.items()
            }
            for server, report in middle.items():
                ratio = report["mb_per_s_synced"] / middle["member"]["mb_per_s_synced"]
                rates = ", ".join(f"{one['mb_per_s_synced']:.0f}" for one in reports[server])
                print(f"   {disk}, {way}, {server}: {cost(report)}, {ratio:.3f} × the member ({rates} MB/s)")
                if ratio < wanted[disk, way] and (disk, server) != ("memory", "served"):
                    short.append(f"{disk} {way} {server} {ratio:.3f} × the member")
    striped = [*local, "--disk", "table5-quarter"]
    for disks in (1, 2, 4, 8):
        for way, way_words in ways.items():
            reports = {
                layout: runs.lab(
                    f"{way}-{layout}-{disks}", *striped, *way_words, "--disks", disks, "--layout", layout,
                    "--server", server,
                )
                for layout, server in (("raid0", "stock"), ("pool-striped", "rushes"))
            }
            for layout, report in reports.items():
                print(f"   {way}, {layout} of {disks}: {cost(report)}")
            ours, theirs = (reports[name]["mb_per_s_synced"] for name in ("pool-striped", "raid0"))
            if ours < theirs:
                short.append(f"{way} over {disks} {ours / theirs:.2f} × raid0")
    return verdict(not short, f"short of what is wanted: {', '.join(short) or 'nothing'}")


def compared_throughput(runs, counts, ways, seconds, door):
    """Clients of a door on four disks, ours beside three rivals; what is short of 1.3 × the best of them from 16 clients up, of 1.0 × below, or uneven.

    RUSHES_BENCH_CLIENTS=64,128 leaves the other counts out."""
    short = []
    some = os.environ.get("RUSHES_BENCH_CLIENTS")
    counts = [count for count in counts if not some or str(count) in some.split(",")]
    for clients in counts:
        for way, (disk, share) in ways.items():
            readers, writers = share(clients)
            # Nobody comes to the end of his file: all together have four disks' worth of it.
            words = ["throughput", "--readers", readers, "--writers", writers, "--seconds", seconds, "--door", door]
            words += ["--bytes", f"{8192 // clients}MiB", "--disks", 4, "--disk", disk]
            # Ours and mergerfs' ext4, as docs/guide/recording.md has it.
            words += ["--media-format"]
            reports = {
                layout: runs.lab(
                    f"{clients}-{way}-{layout}", *words, "--layout", layout, "--server", server
                )
                for layout, server in (("pool", "rushes"), *((rival, "stock") for rival in RIVALS))
            }
            for layout, report in reports.items():
                evenness = report["client_mb_per_s_min"] / report["client_mb_per_s_mean"]
                print(
                    f"   {clients} clients, {way}, {layout}: {cost(report)}, slowest {evenness:.2f} × the mean"
                )
            ours = reports.pop("pool")
            ratio = ours["mb_per_s_synced"] / max(
                one["mb_per_s_synced"] for one in reports.values()
            )
            evenness = ours["client_mb_per_s_min"] / ours["client_mb_per_s_mean"]
            print(f"   {clients} clients, {way}: {ratio:.2f} × the best of them", flush=True)
            # Who reads and who writes have no common mean, and what a write buffer takes at once is much in so short a time.
            if way == "both":
                continue
            if ratio < (1.3 if clients >= 16 else 1.0) or evenness < 0.8:
                short.append(
                    f"{clients} clients {way} {ratio:.2f} × the best, slowest {evenness:.2f} × the mean"
                )
    is_kept = None if ways is BOTH else not short
    return verdict(is_kept, f"short of what is wanted: {', '.join(short) or 'nothing'}")


def figure_pool_light(runs):
    """1, 2, 4 and 8 readers over SMB on four disks, their files on one disk each or striped over all: the better of the two at least the best of btrfs raid0, single and mergerfs."""
    short = []
    for readers in (1, 2, 4, 8):
        words = ["throughput", "--readers", readers, "--writers", 0, "--seconds", 15, "--door", "smb"]
        words += ["--bytes", f"{min(3072, 8192 // readers)}MiB", "--disks", 4, "--disk", "table5-quarter"]
        words += ["--media-format"]
        ways = {"pool": "rushes", "pool-striped": "rushes", **{rival: "stock" for rival in RIVALS}}
        rates = {
            layout: runs.lab(f"{readers}-{layout}", *words, "--layout", layout, "--server", server)["mb_per_s_synced"]
            for layout, server in ways.items()
        }
        ours = max(rates["pool"], rates["pool-striped"])
        theirs = max(rates[rival] for rival in RIVALS)
        shown = ", ".join(f"{layout} {rate:.1f}" for layout, rate in rates.items())
        print(f"   {readers} readers: {shown} MB/s; {ours / theirs:.2f} × the best of the others", flush=True)
        if ours < theirs:
            short.append(f"{readers} readers {ours / theirs:.2f} ×")
    return verdict(not short, f"short of the best of the others: {', '.join(short) or 'nowhere'}")


# What one makes of four disks without Rushes.
RIVALS = ("raid0", "single", "mergerfs")
# The quickest disks of which two processors are not the limit: clients, server and disks take 1.4 to 4 s of them for a GiB that is read, 2.5 to
# 3.5 for one that is written.
READ = {"read": ("table5", lambda count: (count, 0))}
WRITE = {"write": ("table5-half", lambda count: (0, count))}
# Half of them each; only reported.
BOTH = {"both": ("table5-half", lambda count: (count // 2, count // 2))}


def figure_pool_throughput(runs):
    """8, 16, 64 and 128 clients that read, or write, on four disks: 1.3 × the best of btrfs raid0, single and mergerfs from 16 up, 1.0 × below; slowest at least 0.8 × the mean."""
    return compared_throughput(runs, (8, 16, 64, 128), READ | WRITE, 10, "smb")


def figure_pool_throughput_both(runs):
    """The same where half of them read and half write; reported."""
    return compared_throughput(runs, (8, 16, 64, 128), BOTH, 10, "smb")


def figure_pool_nfs_throughput(runs):
    """The same of NFS clients that read, or write, through Ganesha everywhere (the text's Figures 6 and 7)."""
    return compared_throughput(runs, (8, 16, 64, 128), READ | WRITE, 10, "nfs")


def figures():
    """Name → function, in the order of this file."""
    return {
        name.removeprefix("figure_").replace("_", "-"): function
        for name, function in globals().items()
        if name.startswith("figure_")
    }


def main():
    """Run the figures named."""
    known = figures()
    words = sys.argv[1:]
    if words == ["--list"]:
        for name, function in known.items():
            print(f"  make figure-{name:18} {function.__doc__}")
        return 0
    unknown = [word for word in words if word not in known]
    if not words or unknown:
        sys.exit(f"figures: unknown {unknown or 'nothing'}; expected some of: {' '.join(known)}")
    if not RUSHES.exists():
        sys.exit(f"figures: {RUSHES} is missing; run `make build` first")
    if os.geteuid() != 0:
        sys.exit("figures: the lab needs root (disks, smbd, control groups): sudo make figure-…")
    # In memory, as the modelled disk is anyway: a real disk below it would have timing of its own.
    kept_by_user = os.environ.get("RUSHES_LAB_KEEP")
    with tempfile.TemporaryDirectory(prefix="rushes-figures.", dir="/dev/shm") as scratch:
        try:
            codes = [known[word](Runs(word, kept_by_user or scratch)) for word in words]
        finally:
            # Without its folder nobody could take it down.
            if not kept_by_user:
                let_go_of(scratch)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
