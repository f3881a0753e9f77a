"""What the topics share: one row of the table, measurements in processes of their own, peers' environments, prompts.

Imports nothing but the standard library at module level: the peers' Pythons load it as well.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import machine

Others, wait_for_quiet, all_threads = machine.Others, machine.wait_for_quiet, machine.all_threads
peak_rss_mib, reset_peak, status_mib = machine.peak_rss_mib, machine.reset_peak, machine.status_mib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = HERE / ".peers"
FIELDS = ("name", "ours", "unit", "peers", "ratio", "ceiling_share", "peak_rss_mib", "runs", "note")
SIDE_LIMIT_S = 600.0  # of one measurement, start and warm-up included
OURS = "ours"
TUNED = ", our allocator"  # ends the name of a side that is a peer with ALLOCATOR, where the other is as it is installed
# What models.use_threads and run.sh set for our own processes.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

Row = dict[str, Any]


class Missing(RuntimeError):
    """Something that a measurement needs is not there, or the measurement failed; the text becomes a row's note."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """End the process as `main` says. SIGTERM is taken as Ctrl-C: children and temporary folders go with us, in one line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
    except Missing as error:
        say(str(error))
        sys.exit(2)


def at_least_one(text: str) -> int:
    """A whole number from 1 up. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def names_of(known: Sequence[str], text: str, what: str = "topic") -> tuple[str, ...]:
    """Some of the `known`, with commas between. Raises ArgumentTypeError naming the unknown one."""
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"unknown {what} {name!r}; known are {', '.join(known)}"
            )
    if not names:
        raise argparse.ArgumentTypeError(f"names no {what}; known are {', '.join(known)}")
    return names


# ---- rows ---------------------------------------------------------------------------------------


def row(
    name: str,
    unit: str,
    runs: Mapping[str, Sequence[float]],
    *,
    ceiling: float | None = None,
    peak_rss_mib: float | None = None,
    note: str = "",
) -> Row:
    """One row of the table: medians of `runs` (by side, "ours" among them), all in `unit`.

    ratio is ours / peer, whatever the unit; `ceiling`, in `unit`, is what this machine could reach at best.
    """
    medians = {side: statistics.median(values) for side, values in runs.items() if values}
    ours = medians.pop(OURS, None)
    return {
        "name": name,
        "ours": ours,
        "unit": unit,
        "peers": medians,
        "ratio": {p: ours / v for p, v in medians.items() if ours is not None and v},
        "ceiling_share": None if ours is None or not ceiling else ours / ceiling,
        "peak_rss_mib": peak_rss_mib,
        "runs": {side: list(values) for side, values in runs.items()},
        "note": note,
    }


def complete(found: Row) -> Row:
    """A topic's row with every field of FIELDS, those it left out None or empty. Raises Missing without a name."""
    if "name" not in found:
        raise Missing(f"a row without a name: {sorted(found)}")
    empty: Row = {"unit": "", "peers": {}, "ratio": {}, "runs": {}, "note": ""}
    return {field: found.get(field, empty.get(field)) for field in FIELDS}


def noise(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Words on what other processes took while these were measured; it makes the slowest thread of a product wait."""
    share = max(
        (r.get("others_share", 0.0) for found in results.values() for r in found), default=0.0
    )
    return f"other processes took up to {share:.0%} of the cores meanwhile" if share > 0.05 else ""


def rss_of(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> float | None:
    """Largest peak RSS (MiB) of our own side's measurements."""
    return max((r["peak_rss_mib"] for r in results.get(OURS, [])), default=None)


# ---- measurements, each in a process of its own -----------------------------------------------------


def measure(
    python: str,
    script: str,
    job: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    tuned: bool = True,
    limit_s: float = SIDE_LIMIT_S,
) -> dict[str, Any]:
    """Run benchmarks/`script` on a job; returns the JSON object on its last line. Raises Missing with its last words.

    `tuned`: with ALLOCATOR.
    """
    threads = str(job["threads"])
    own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1",
           "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore",
           **(ALLOCATOR if tuned else {})}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        wait_for_quiet()
        watch = Others()
        try:
            done = subprocess.run(
                [python, str(HERE / script), str(path)],
                capture_output=True, text=True, timeout=limit_s, check=False, cwd=ROOT,
                env={**os.environ, **own, **(env or {})},
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Missing(f"took longer than {limit_s:.0f} s") from error
        except OSError as error:
            raise Missing(f"{python} cannot be started: {error.strerror}") from error
    others = watch.others_share()
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        said = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no reason"]
        raise Missing(f"ended with code {done.returncode}: {said[-1][:200]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found | {"others_share": others}


def interleave(
    sides: Mapping[str, Callable[[], dict[str, Any]]], runs: int
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Measure ours, peer, ours, peer …, `runs` times each, so that noise hits all; results by side, and notes.

    A side that is missing or fails is noted once and left out from then on.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    notes: list[str] = []
    left = dict(sides)
    for number in range(runs):
        for side in list(left):
            say(f"  {side}, run {number + 1} of {runs}")
            try:
                results.setdefault(side, []).append(left[side]())
            except Missing as error:
                notes.append(f"{side}: {error}")
                del left[side]
    return {side: found for side, found in results.items() if found}, notes


def values_of(
    results: Mapping[str, Sequence[Mapping[str, Any]]], key: str
) -> dict[str, list[float]]:
    """One number of each measurement, by side."""
    return {side: [float(r[key]) for r in found] for side, found in results.items()}


def read_job() -> dict[str, Any]:
    """In a measuring process: the job that `measure` wrote."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return job


def give(result: Mapping[str, Any]) -> None:
    """In a measuring process: the result, as the last line, and the end, without waiting for a library's threads."""
    text = json.dumps({"peak_rss_mib": round(peak_rss_mib(), 1), **result})
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()
    os._exit(0)


def timed(work: Callable[[], Any], repeat: int) -> list[float]:
    """Seconds of each of `repeat` calls."""
    took = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return took


# ---- this process ----------------------------------------------------------------------------------


def say(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# ---- peers, model, prompts --------------------------------------------------------------------------


def python_of(peer: str) -> str:
    """The Python that a peer is installed in. Raises Missing that says how to install it."""
    if peer == "vllm":
        given = os.environ.get("SPLITGRPO_VLLM_PYTHON")
        ours = ROOT / ".venv-vllm"
        if given or list(ours.glob("lib/*/site-packages/vllm/__init__.py")):
            return given or str(ours / "bin/python")
    folder = PEERS / peer
    if not (folder / "installed").exists():
        raise Missing(f"not installed: bash benchmarks/peers.sh {peer}")
    return str(folder / "bin/python")


def model_of(args: argparse.Namespace) -> str:
    """The model folder of --model; the default one is made if it is not there. Raises Missing."""
    if (Path(args.model) / "config.json").exists():
        return str(args.model)
    if Path(args.model).absolute() != ROOT / "models/smollm2" or args.quick:
        raise Missing(f"--model {args.model}: no model there")
    from splitgrpo.config import SettingsError
    from splitgrpo.smollm2 import bring_smollm2

    try:
        return str(bring_smollm2(ROOT / "models/smollm2"))
    except SettingsError as error:
        raise Missing(str(error)) from error


def demo_model(folder: Path) -> str:
    """A demo model (splitgrpo/demo.py) with fresh weights: speed does not depend on them."""
    from splitgrpo.demo import build_model, build_tokenizer
    from splitgrpo.warmstart import save_model

    out = folder / "demo"
    if not out.exists():
        tokenizer = build_tokenizer()
        save_model(build_model(tokenizer, 0), tokenizer, out)
    return str(out)


def data_of(args: argparse.Namespace) -> str:
    """What the workers' --data takes: --data, or the embedded arithmetic."""
    return args.data or "arithmetic"


def prompt_ids(model: str, data: str, num: int, *, length: int | None = None) -> list[list[int]]:
    """The first `num` training prompts as token ids, the chat template applied.

    `length`: each cut to exactly so many tokens, shorter ones passed over, or joined where too few are long enough.
    """
    from data import build_prompts, load_problems
    from splitgrpo.models import load_tokenizer

    problems = load_problems(data, "train")
    prompts, _ = build_prompts(problems[: 20 * num + 20], load_tokenizer(model), 1 << 20)
    ids = [p.token_ids.tolist() for p in prompts]
    if length is None:
        return ids[:num]
    long_enough = [p[:length] for p in ids if len(p) >= length]
    joined = [
        (ids[i % len(ids)] * (1 + length // max(1, len(ids[0]))))[:length] for i in range(num)
    ]
    return (long_enough + joined)[:num]
