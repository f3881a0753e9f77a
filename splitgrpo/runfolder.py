"""The learner's run folder (--save_path): who owns it, what may be in it, a disk that is full, what a run leaves."""

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from splitgrpo.config import JOURNAL, DiskTrouble, SettingsError
from splitgrpo.files import (
    aside_of,
    read_lines,
    remove_leftovers,
    write_folder,
    write_json,
    write_lines,
)
from splitgrpo.ledger import DONE, LEDGER, LOCK, METRICS
from splitgrpo.pointer import FOLDER, POINTER, last_pointer
from splitgrpo.transport import make_key

AGAIN_S = 5.0  # between two tries to write on a disk that is full
_locks: list[int] = []  # descriptors held open for as long as the process lives

T = TypeVar("T")


def claim_run_folder(
    save_path: str, *, resume: bool = False, overwrite: bool = False
) -> tuple[Path, bytes]:
    """Make the folder, lock it for this process, and return it with the run's key.

    Called before the model is loaded. Raises SettingsError for a folder that cannot be written, that another learner
    uses, or that holds an earlier run which is neither to be gone on with nor to be removed.
    """
    run_dir = Path(save_path)
    try:
        for name in ("adapters", "checkpoints"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        fd = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SettingsError(
            f"--save_path {save_path} cannot be written ({error.strerror}): give a folder on a writable disk"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SettingsError(
            f"--save_path {save_path} is in use by another learner: end it, or give another folder"
        ) from error
    _locks.append(fd)
    if overwrite:
        remove_run(run_dir)
    if not resume:
        check_unused(run_dir)
    for folder in (run_dir, run_dir / "adapters", run_dir / "checkpoints"):
        remove_leftovers(folder)
    return run_dir, make_key(run_dir / "run.key")


def check_unused(run_dir: Path) -> None:
    """Refuse a folder that holds a run. Raises SettingsError."""
    kinds = (POINTER, LEDGER, "checkpoints/step_*", "adapters/v*", f"{JOURNAL}/step_*")
    if any(True for kind in kinds for _ in run_dir.glob(kind)):
        raise SettingsError(
            f"--save_path {run_dir} holds an earlier run: --resume goes on with it, --overwrite removes it, or give another "
            "folder"
        )


def remove_run(run_dir: Path) -> None:
    """Remove what a learner left, first of all what a resume looks for. Raises OSError."""
    for checkpoint in (run_dir / "checkpoints").glob("step_*"):
        checkpoint.rename(aside := aside_of(checkpoint))
        shutil.rmtree(aside)
    for name in (POINTER, DONE, METRICS, LEDGER):
        (run_dir / name).unlink(missing_ok=True)
    for folder in (run_dir / name for name in ("checkpoints", "adapters", "adapter", JOURNAL)):
        for path in folder.iterdir() if folder.is_dir() else []:
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def rewind(run_dir: Path, step: int) -> None:
    """Take back what was reported after `step`, and that the run is done. Raises OSError, ValueError."""
    (run_dir / DONE).unlink(missing_ok=True)
    shutil.rmtree(run_dir / "adapter", ignore_errors=True)
    rows = read_lines(run_dir / METRICS)
    write_lines(run_dir / METRICS, [row for row in rows if row.get("step", step) <= step])
    pointer = last_pointer(run_dir)
    if pointer is not None and pointer.done:  # a sampler that is started now is not to go home
        write_json(
            run_dir / POINTER, msgspec.to_builtins(msgspec.structs.replace(pointer, done=False))
        )


def next_lineage(run_dir: Path, checkpointed: int = 0) -> int:
    """One more than that of any learner which has published or saved here: rolled back weights are never taken for new."""
    found = [int(m[2]) for p in (run_dir / "adapters").iterdir() if (m := FOLDER.fullmatch(p.name))]
    pointer = last_pointer(run_dir)
    return max([checkpointed, pointer.lineage if pointer else 0, *found]) + 1


@dataclass
class PatientWriter:
    """Tries again while the disk refuses: what the learner has in memory is worth more than the wait.

    The writes of a step, between which `spent_s` is not set to 0, share one limit: other ranks wait for all of them.
    """

    save_path: str
    limit_s: float
    should_stop: Callable[[], bool]
    on_wait: Callable[[], None]
    log: logging.Logger
    spent_s: float = 0.0

    def __call__(self, what: str, write: Callable[[], T]) -> T:
        """What `write` returns; `what` it does, in words. Raises DiskTrouble after limit_s, or on a signal."""
        while True:
            try:
                return write()
            except OSError as error:
                text = f"cannot {what} in {self.save_path}: {error}"
                if self.should_stop() or self.spent_s >= self.limit_s:
                    raise DiskTrouble(
                        f"{text}; gave up after {self.spent_s:.0f} s. Mend or free the disk, then start again with --resume."
                    ) from error
                self.log.error("%s; trying again for %.0f s", text, self.limit_s - self.spent_s)
                self.on_wait()
                time.sleep(AGAIN_S)
                self.spent_s += AGAIN_S


def mark_done(run_dir: Path, adapter: str, report: dict[str, Any]) -> None:
    """Leave the final adapter under a fixed name, then done.json: success is this file, never an exit code."""
    final = run_dir / "adapter"
    shutil.rmtree(final, ignore_errors=True)
    source = run_dir / "adapters" / adapter
    write_folder(final, lambda aside: shutil.copytree(source, aside, dirs_exist_ok=True))
    write_json(run_dir / DONE, report)
