"""Start a learner and a sampler as two processes, watch both, and end both together.

    python -m splitgrpo.launch --model_path M --data D --save_path runs/mine …      (run.sh train …)

Every flag of either worker is taken and handed to the one it belongs to. Success is done.json in the run folder and exit
code 0 of both. With --max_restarts a worker that died or asks for another try is started again, the learner from its newest
checkpoint.
"""

import argparse
import dataclasses
import json
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitgrpo.process import begin_process

if __name__ == "__main__":
    begin_process()

from splitgrpo.cli import build_parser
from splitgrpo.config import (
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_RETRY,
    LearnerSettings,
    SamplerSettings,
    SettingsError,
    SharedSettings,
)
from splitgrpo.ledger import METRICS
from splitgrpo.monitor import MetricsReader, ProgressBar, plot_curves
from splitgrpo.process import StopFlag, end_process, run_main
from splitgrpo.runfolder import check_unused
from splitgrpo.workers import ROOT, Worker, end_all

END_S = 8.0  # between the request to end and the kill; users are promised 10 s in all
AFTERMATH_S = 5.0  # a worker may take so long to notice by itself that the other is gone
POLL_S = 0.2
RESTART_PAUSE_S = 1.0
MASTER_PORT = 29500  # DeepSpeed's own default
ASKED_TO_END = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)

log = logging.getLogger("launch")


@dataclass
class Restarts:
    """Restarts that a run still has; those of both workers count together."""

    left: int
    old_runs: frozenset[str] = (
        frozenset()
    )  # run ids of checkpoints that were there before and are not to be gone on with
    used: int = 0

    def allow(self, code: int) -> bool:
        """True for an end that another try may mend: neither wrong flags or data, nor a signal that asked for it."""
        if self.left <= 0 or not (code in (EXIT_RETRY, EXIT_INTERNAL) or code > 128):
            return False
        if code in ASKED_TO_END:
            return False
        self.left, self.used = self.left - 1, self.used + 1
        return True

    def restart(self, bad: Worker, workers: Sequence[Worker], run_dir: Path, code: int) -> None:
        """Start a worker again after a pause: a learner from its newest checkpoint, or else the whole run anew."""
        log.warning(
            "the %s ended with code %d and is started again (%d of at most %d); its last line:\n%s",
            bad.name, code, self.used, self.used + self.left, bad.last_lines(1),
        )  # fmt: skip
        saved = run_ids(run_dir) - self.old_runs
        anew = bad.name == "learner" and not saved
        chosen = workers if anew else [bad]
        end_all(chosen, END_S)
        time.sleep(RESTART_PAUSE_S)
        for worker in chosen:
            learner_flag = "--overwrite" if anew else "--resume"
            worker.start_again(learner_flag if worker.name == "learner" else "")


def run_ids(run_dir: Path) -> frozenset[str]:
    """Of the checkpoints in a folder, as far as they can be read."""
    found = set()
    for path in (run_dir / "checkpoints").glob("step_*/state.json"):
        try:
            found.add(str(json.loads(path.read_bytes())["run_id"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return frozenset(found)


def supervise(
    workers: Sequence[Worker],
    run_dir: Path,
    max_steps: int,
    check_stop: Callable[[], None],
    restarts: Restarts | None = None,
) -> int:
    """Show progress until both workers have ended; returns the exit code of the first that failed for good, or 0."""
    reader, restarts = MetricsReader(run_dir / METRICS), restarts or Restarts(0)
    first: Worker | None = None
    code, failed_at = EXIT_OK, 0.0
    with ProgressBar(max_steps) as bar:
        try:
            while True:
                check_stop()
                for row in reader.new_rows():
                    bar.update(row)
                bar.tick()
                bad = next((w for w in workers if w.failure(run_dir) is not None), None)
                if bad is not None and first is None:
                    code = bad.failure(run_dir) or EXIT_INTERNAL
                    if restarts.allow(code):
                        restarts.restart(bad, workers, run_dir, code)
                        continue
                    first, failed_at = bad, time.monotonic()
                ended = all(w.process.poll() is not None for w in workers)
                if ended or (first is not None and time.monotonic() - failed_at > AFTERMATH_S):
                    break
                time.sleep(POLL_S)
            for row in reader.new_rows():
                bar.update(row)
        finally:
            end_all(workers, END_S)
    if first is None:
        return EXIT_OK
    again = f" after {restarts.used} restarts (--max_restarts)" if restarts.used else ""
    what = "without done.json" if first.process.returncode == EXIT_OK else f"with code {code}"
    log.error("the %s ended %s%s; the end of %s:\n%s", first.name, what, again, first.log_path,
              first.last_lines())  # fmt: skip
    return code


def learner_command(ranks: int, flags: Sequence[str]) -> list[str]:
    """One rank needs no launcher; more are started by DeepSpeed's own, on a port that no other run of this machine has."""
    script = str(ROOT / "training_worker.py")
    if ranks == 1:
        return [sys.executable, script, *flags]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    deepspeed = [launcher, f"--num_gpus={ranks}", f"--master_port={meeting_port()}"]
    return [sys.executable, *deepspeed, script, *flags]


def meeting_port() -> int:
    """A free port for the ranks to meet at, from where the system takes none by itself, as they listen seconds later."""
    for port in random.Random().sample(range(20000, 30000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return MASTER_PORT


def train(
    flags: Sequence[str],
    *,
    run_dir: Path,
    ranks: int = 1,
    check_stop: Callable[[], None] = lambda: None,
    commands: dict[str, Sequence[str]] | None = None,
    max_restarts: int = 0,
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
    check_save_path(run_dir, used=given.resume or given.overwrite)
    sampler = [sys.executable, str(ROOT / "sampling_worker.py"), *for_sampler]
    started = commands or {"learner": learner_command(ranks, for_learner), "sampler": sampler}
    if given.overwrite:  # or its last steps would be shown until the learner has removed them
        (run_dir / METRICS).unlink(missing_ok=True)
    restarts = Restarts(max_restarts, run_ids(run_dir) if given.overwrite else frozenset())
    workers: list[Worker] = []
    try:
        for name, command in started.items():
            workers.append(Worker.start(name, command, run_dir / f"{name}.log"))
        log.info("learner and sampler started, logs and results in %s", run_dir)
        return supervise(workers, run_dir, given.max_steps, check_stop, restarts)
    finally:
        end_all(workers, END_S)
        try:
            plot_curves(run_dir / METRICS, run_dir / "curves.png")
        except OSError as error:
            log.warning("no curves: %s", error)


def check_save_path(run_dir: Path, *, used: bool) -> None:
    """Make the run folder, which may hold a run if `used`, before anything slow starts. Raises SettingsError."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--save_path {run_dir} cannot be made ({error.strerror})") from error
    if not used:
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
                f"unknown flag {flags[i]!r}; `run.sh learner --help`, `… sampler --help` and `… train --help` list all"
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
    parser.add_argument(
        "--max_restarts", type=int, default=0,
        help="times that a worker which died or asks for another try (code 75 or 70) is started again",
    )  # fmt: skip
    args, flags = parser.parse_known_args()
    run_dir = Path(args.save_path or ROOT / "runs" / time.strftime("train-%Y%m%d-%H%M%S"))
    code = EXIT_OK

    def story(stop: StopFlag) -> None:
        nonlocal code
        code = train(
            flags, run_dir=run_dir, ranks=args.ranks, check_stop=stop.raise_if_set,
            max_restarts=args.max_restarts,
        )  # fmt: skip
        if code == EXIT_OK:
            log.info("finished: %s", run_dir)

    return run_main(story, log) or code


if __name__ == "__main__":
    end_process(main())
