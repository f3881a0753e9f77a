"""All benchmarks in one run on one machine: a table, and benchmarks/results/latest.json.

    bash benchmarks/peers.sh                     once: what ours is compared with
    python benchmarks/run.py [--only sampler,learner] [--runs 3] [--quick]

Quote ratios (ours / peer): the machine is noisy, and ours and peers are measured in turn so that noise hits all. Whatever is
missing becomes a row with a note. A run of some topics, a quick one and one that is interrupted leave latest.json alone:
their rows are in results/part.json. SPLITGRPO_BENCH_PATIENCE_S=120 waits so long before each measurement for quiet cores.
"""

import argparse
import functools
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import common  # noqa: E402

TOPICS = ("ceiling", "sampler", "learner", "memory", "loop", "transport", "startup", "reload")
RESULTS = HERE / "results" / "latest.json"
PART = RESULTS.with_name("part.json")


def build_parser() -> argparse.ArgumentParser:
    """Flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        type=functools.partial(common.names_of, TOPICS),
        default=TOPICS,
        help=f"some of {','.join(TOPICS)}",
    )
    parser.add_argument(
        "--runs", type=common.at_least_one, default=3, help="of each measurement; medians count"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes: shows that all works, no figures to quote",
    )
    parser.add_argument(
        "--model",
        default=str(HERE.parent / "models/smollm2"),
        help="a model folder (default: SmolLM2-135M)",
    )
    parser.add_argument(
        "--data", type=existing, default=os.environ.get("SPLITGRPO_GSM8K"),
        help="GSM8K, a folder or a file (default: SPLITGRPO_GSM8K, else the embedded arithmetic)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="where the rows go as JSON (default: as said above)"
    )
    return parser


def existing(text: str) -> str:
    """A path that is there, as an absolute one. Raises ArgumentTypeError."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return str(Path(text).absolute())


def machine_row(args: argparse.Namespace) -> common.Row:
    """What all other rows were measured on, and when; ours is the number of cores."""
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    git = ["git", "-C", str(HERE.parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(
        git, capture_output=True, text=True, check=False, timeout=30
    ).stdout.strip()
    bf16 = "with" if torch.cpu._is_avx512_bf16_supported() else "without"
    parts = [
        f"{cpu} ({bf16} bfloat16 instructions)", f"{memory:.0f} GiB", f"torch {torch.__version__}",
        f"python {platform.python_version()}", time.strftime("%Y-%m-%d %H:%M"), f"commit {commit or 'unknown'}",
        f"load {os.getloadavg()[0]:.1f} at the start", f"data {Path(args.data).name if args.data else 'arithmetic'}",
        "quick sizes" if args.quick else f"{args.runs} runs",
    ]  # fmt: skip
    parts += [f"OMP_WAIT_POLICY={p}" for p in [os.environ.get("OMP_WAIT_POLICY")] if p]
    return common.row(
        "machine", "cores", {common.OURS: [float(common.all_threads())]}, note=", ".join(parts)
    )


def rows_of(topic: str, args: argparse.Namespace) -> list[common.Row]:
    """A topic's rows, complete; one row with a note where it is not there or fails."""
    if not (HERE / f"{topic}.py").exists():
        return [common.row(topic, "", {}, note=f"benchmarks/{topic}.py is not there")]
    try:
        rows: Any = importlib.import_module(topic).rows
        found = rows(args) if inspect.signature(rows).parameters else rows()
        return [common.complete(r) for r in found]
    except (
        Exception
    ) as error:  # one topic's fault leaves the others their rows; it is said, and in the exit code
        common.say(f"{topic}: {error!r}")
        return [common.row(topic, "", {}, note=f"failed: {type(error).__name__}: {error}"[:300])]


def number(value: float | None) -> str:
    """Four digits or so."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: list[common.Row]) -> str:
    """The rows as a Markdown table; notes below it."""
    lines = ["| what | ours | unit | peers (ours / peer) | of the ceiling | peak RSS MiB |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    notes = []
    for r in rows:
        peers = "; ".join(
            f"{p} {number(v)} ({number(r['ratio'].get(p))})" for p, v in r["peers"].items()
        )
        share = "-" if r["ceiling_share"] is None else f"{r['ceiling_share']:.0%}"
        lines.append(
            f"| {r['name']} | {number(r['ours'])} | {r['unit']} | {peers or '-'} | {share} | {number(r['peak_rss_mib'])} |"
        )
        if r["note"]:
            notes.append(f"- {r['name']}: {r['note']}")
    return "\n".join([*lines, "", *notes])


def write(rows: list[common.Row], path: Path) -> None:
    """Replace the JSON file in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(rows, indent=1) + "\n")
    aside.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Run the topics one after the other; returns 1 where one of them failed (missing parts are no failure)."""
    args = build_parser().parse_args(argv)
    args.model = str(Path(args.model).absolute())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows = [machine_row(args)]
    with tempfile.TemporaryDirectory(prefix="splitgrpo-bench-") as folder:
        args.work = Path(folder)
        for topic in args.only:
            common.say(f"-- {topic}")
            rows += rows_of(topic, args)
            write(rows, args.out or PART)  # it stays when a later topic is interrupted
    if not args.out and not args.quick and set(args.only) == set(TOPICS):
        PART.replace(RESULTS)
    if args.quick:
        sys.stdout.write("Quick sizes: they show that all works, and say nothing of speed.\n\n")
    sys.stdout.write(table(rows) + "\n")
    return int(any(r["note"].startswith("failed: ") for r in rows))


if __name__ == "__main__":
    common.run_main(main)
