"""How long a run takes from its start to the first trained step, and how long each worker takes alone.

    python benchmarks/startup.py [--runs 3]

The demo's model and settings, as `bash run.sh train` starts them, in a fresh run folder; the model is made before.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import common  # noqa: E402
import reload  # noqa: E402

RUNS, LIMIT_S, LOOK_S = 3, 120.0, 0.01


def wait_for(
    command: list[str], log_path: Path, ready: Callable[[], bool], *, end: bool = False
) -> float:
    """Seconds from the start of a program to `ready`; it is left to finish by itself, or ended. Raises common.Missing."""
    started = time.monotonic()
    with log_path.open("wb") as file:
        process = subprocess.Popen(command, cwd=HERE.parent, stdout=file, stderr=file)
    try:
        while not ready():
            if process.poll() is not None or time.monotonic() - started > LIMIT_S:
                said = log_path.read_text().splitlines()[-1:]
                raise common.Missing(
                    f"no sign of it within {time.monotonic() - started:.0f} s: {said}"
                )
            time.sleep(LOOK_S)
        took_s = time.monotonic() - started
        if not end:
            process.wait(LIMIT_S)
        return took_s
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def flags_of(model: str, run_dir: Path) -> list[str]:
    """The demo's flags, for one step."""
    from splitgrpo import demo
    from splitgrpo.zero import free_port

    config = json.loads((HERE.parent / "ds_config.json").read_text())
    config |= {"bf16": {"enabled": False}, "train_micro_batch_size_per_gpu": demo.COMPLETIONS_PER_STEP,
               "gradient_accumulation_steps": 1}  # fmt: skip
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(config))
    given = demo.RECIPE | {
        "max_steps": 1,
        "model_path": model,
        "ds_config": path,
        "save_path": run_dir,
        "port": free_port(),
    }
    return [f"--{name}={value}" for name, value in given.items()]


def first_step(model: str, run_dir: Path) -> float:
    """Seconds from the start of launcher and workers to the first line of metrics.jsonl."""
    from splitgrpo.demo import COMPLETIONS_PER_STEP
    from splitgrpo.ledger import METRICS

    command = [sys.executable, "-m", "splitgrpo.launch", *flags_of(model, run_dir)]
    command.append(f"--batch_size={COMPLETIONS_PER_STEP}")
    metrics = run_dir / METRICS
    return wait_for(
        command,
        run_dir.with_suffix(".log"),
        lambda: metrics.exists() and metrics.stat().st_size > 0,
    )


def learner_alone(model: str, run_dir: Path) -> float:
    """Seconds from the learner's start to its first published adapter."""
    from splitgrpo.pointer import POINTER

    command = [sys.executable, str(HERE.parent / "training_worker.py"), *flags_of(model, run_dir)]
    return wait_for(command, run_dir.with_suffix(".log"), (run_dir / POINTER).exists, end=True)


def sampler_alone(model: str, run_dir: Path) -> float:
    """Seconds from the sampler's start, an adapter being published already, to its first group."""
    with reload.Rig(run_dir, model, "float32") as rig:
        return rig.start()


def wrong_flag(model: str, run_dir: Path) -> float:
    """Seconds until a worker has refused a value that cannot work."""
    started = time.monotonic()
    command = [sys.executable, str(HERE.parent / "training_worker.py"), "--group_size=1"]
    subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S)
    return time.monotonic() - started


MEASURED = {
    "start: train to first step": first_step,
    "start: learner alone to version 0": learner_alone,
    "start: sampler alone to first group": sampler_alone,
    "start: a wrong flag is refused": wrong_flag,
}


def rows(args: argparse.Namespace | None = None) -> list[common.Row]:
    """One row a program: seconds, demo model, caches warm."""
    runs = 1 if getattr(args, "quick", False) else getattr(args, "runs", RUNS)
    out = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = common.demo_model(work)
        for i, (title, measure) in enumerate(MEASURED.items()):
            found, notes = [], []
            for run in range(runs):
                common.wait_for_quiet()
                watch = common.Others()
                try:
                    found.append(measure(model, work / f"run-{i}-{run}"))
                except common.Missing as error:
                    notes.append(str(error))
                notes.append(f"others took {watch.others_share():.0%} of the cores")
            out.append(common.row(title, "s", {common.OURS: found}, note="; ".join(notes)))
    return out


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--runs", type=common.at_least_one, default=RUNS)
    reload.show(rows(parser.parse_args()))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    common.run_main(main)
