"""Start a learner and a sampler as two processes, watch both, and end both together.

    python -m splitgrpo.launch --model_path M --data D --save_path runs/mine …      (run.sh train …)

Every flag of either worker is taken and handed to the one it belongs to. Success is done.json in the run folder and exit
code 0 of both.
"""

import argparse
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitgrpo.cli import build_parser
from splitgrpo.config import (
    EXIT_INTERNAL,
    EXIT_OK,
    LearnerSettings,
    SamplerSettings,
    SettingsError,
    SharedSettings,
)
from splitgrpo.monitor import MetricsReader, ProgressBar, plot_curves
from splitgrpo.process import PARENT_ENV, StopFlag, end_process, run_main
from splitgrpo.runfolder import DONE, check_unused

ROOT = Path(__file__).resolve().parent.parent
END_S = 8.0  # between the request to end and the kill; users are promised 10 s in all
AFTERMATH_S = 5.0  # a worker may take so long to notice by itself that the other is gone
POLL_S = 0.2

log = logging.getLogger("launch")


@dataclass
class Worker:
    """One running worker, alone in a process group so that all of it can be ended."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @classmethod
    def start(cls, name: str, command: Sequence[str], log_path: Path) -> "Worker":
        """Start it with its output going to a file."""
        env = os.environ | {PARENT_ENV: str(os.getpid())}
        with log_path.open("ab") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=ROOT, env=env, start_new_session=True
            )
        return cls(name, process, log_path)

    def signal(self, number: int) -> None:
        """Signal the whole group; a group that is gone is no error."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def last_lines(self, count: int = 15) -> str:
        """The end of its log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-count:])


def end_all(workers: Sequence[Worker], wait_s: float) -> None:
    """Ask every worker to end, wait, then kill what is left of its group."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("the %s did not end in %.0f s: killed", worker.name, wait_s)
        worker.signal(signal.SIGKILL)
        worker.process.wait()


def supervise(
    workers: Sequence[Worker], run_dir: Path, max_steps: int, check_stop: Callable[[], None]
) -> int:
    """Show progress until both workers have ended; returns the exit code of the first that failed, or 0."""
    reader = MetricsReader(run_dir / "metrics.jsonl")
    failed_at = 0.0
    first: Worker | None = None
    with ProgressBar(max_steps) as bar:
        try:
            while any(w.process.poll() is None for w in workers):
                check_stop()
                for row in reader.new_rows():
                    bar.update(row)
                bar.tick()
                bad = [w for w in workers if w.process.poll() not in (None, EXIT_OK)]
                if bad and first is None:
                    first, failed_at = bad[0], time.monotonic()
                if first is not None and time.monotonic() - failed_at > AFTERMATH_S:
                    break
                time.sleep(POLL_S)
            for row in reader.new_rows():
                bar.update(row)
        finally:
            end_all(workers, END_S)
    for worker in [first] if first else [w for w in workers if w.process.returncode]:
        code = worker.process.returncode
        log.error("the %s ended with code %d; the end of %s:\n%s", worker.name, code, worker.log_path,
                  worker.last_lines())  # fmt: skip
        return code if code > 0 else 128 - code
    if not (run_dir / DONE).exists():
        log.error("both workers ended without %s: the run did not finish", run_dir / DONE)
        return EXIT_INTERNAL
    return EXIT_OK


def learner_command(ranks: int, flags: Sequence[str]) -> list[str]:
    """One rank needs no launcher; more are started by DeepSpeed's own."""
    script = str(ROOT / "training_worker.py")
    if ranks == 1:
        return [sys.executable, script, *flags]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    return [sys.executable, launcher, f"--num_gpus={ranks}", script, *flags]


def train(
    flags: Sequence[str],
    *,
    run_dir: Path,
    ranks: int = 1,
    check_stop: Callable[[], None] = lambda: None,
    commands: dict[str, Sequence[str]] | None = None,
) -> int:
    """Run both workers with the flags of either until the run is finished; returns an exit code.

    Leaves curves.png and both logs in `run_dir`. `commands` replaces what is started (for tests).
    """
    for_learner = route(flags, LearnerSettings, [f"--save_path={run_dir.absolute()}"])
    for_sampler = route(flags, SamplerSettings, [f"--lora_path={run_dir.absolute()}"])
    given = parse_known(flags, LearnerSettings)[0]
    if given.replay:
        raise SettingsError(
            "--replay needs no sampler: run.sh learner --replay FOLDER --save_path OTHER"
        )
    check_save_path(run_dir)
    sampler = [sys.executable, str(ROOT / "sampling_worker.py"), *for_sampler]
    started = commands or {"learner": learner_command(ranks, for_learner), "sampler": sampler}
    workers: list[Worker] = []
    try:
        for name, command in started.items():
            workers.append(Worker.start(name, command, run_dir / f"{name}.log"))
        log.info("learner and sampler started, logs and results in %s", run_dir)
        return supervise(workers, run_dir, given.max_steps, check_stop)
    finally:
        end_all(workers, END_S)
        plot_curves(run_dir / "metrics.jsonl", run_dir / "curves.png")


def check_save_path(run_dir: Path) -> None:
    """Make the run folder before anything slow starts. Raises SettingsError as a learner would."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--save_path {run_dir} cannot be made ({error.strerror})") from error
    check_unused(run_dir)


def parse_known(
    flags: Sequence[str], cls: type[SharedSettings]
) -> tuple[argparse.Namespace, list[str]]:
    """Flags of one worker's settings, and the others."""
    return build_parser(cls, "launch").parse_known_args(list(flags))


def route(flags: Sequence[str], cls: type[SharedSettings], extra: list[str]) -> list[str]:
    """The flags that a worker knows, spelled out, with `extra` in the end.

    Raises SettingsError for a flag that neither worker knows.
    """
    names = {f.name for c in (LearnerSettings, SamplerSettings) for f in dataclasses.fields(c)}
    given: dict[str, str | None] = {}
    i = 0
    while i < len(flags):
        name, equals, value = flags[i].removeprefix("--").partition("=")
        if not flags[i].startswith("--") or name not in names:
            raise SettingsError(
                f"unknown flag {flags[i]!r}; `run.sh learner --help` and `run.sh sampler --help` list all"
            )
        has_value = bool(equals) or (i + 1 < len(flags) and not flags[i + 1].startswith("--"))
        given[name] = (value if equals else flags[i + 1]) if has_value else None
        i += 1 if equals or not has_value else 2
    own = {f.name for f in dataclasses.fields(cls)}
    spelled = [f"--{n}" if v is None else f"--{n}={v}" for n, v in given.items() if n in own]
    return [*spelled, *extra]


def main() -> int:
    """Parse the flags and run; returns the exit code."""
    from splitgrpo.monitor import setup_logging

    setup_logging("launch", verbose=False)
    parser = argparse.ArgumentParser(prog="run.sh train", allow_abbrev=False, description=__doc__)
    parser.add_argument("--save_path", help="run folder (default: runs/train-DATE-TIME)")
    parser.add_argument("--ranks", type=int, default=1, help="learner ranks")
    args, flags = parser.parse_known_args()
    run_dir = Path(args.save_path or ROOT / "runs" / time.strftime("train-%Y%m%d-%H%M%S"))
    code = EXIT_OK

    def story(stop: StopFlag) -> None:
        nonlocal code
        code = train(flags, run_dir=run_dir, ranks=args.ranks, check_stop=stop.raise_if_set)
        if code == EXIT_OK:
            log.info("finished: %s", run_dir)

    return run_main(story, log) or code


if __name__ == "__main__":
    end_process(main())
