"""The learner's run folder (--save_path): who owns it, what may be in it, what a finished run leaves."""

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from splitgrpo.adapters import POINTER
from splitgrpo.config import SettingsError
from splitgrpo.files import write_json
from splitgrpo.transport import make_key

DONE = "done.json"
_locks: list[int] = []  # descriptors held open for as long as the process lives


def claim_run_folder(save_path: str) -> tuple[Path, bytes, str]:
    """Make the folder, lock it for this process, and return it with the run's key and a new run id.

    Called before the model is loaded. Raises SettingsError for a folder that cannot be written, that another learner
    uses, or that holds an earlier run.
    """
    run_dir = Path(save_path)
    try:
        for name in ("adapters", "checkpoints"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        fd = os.open(run_dir / "learner.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SettingsError(
            f"--save_path {save_path} cannot be written ({error.strerror}): give a folder on a writable disk"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise SettingsError(
            f"--save_path {save_path} is in use by another learner: end it, or give another folder"
        ) from error
    _locks.append(fd)
    check_unused(run_dir)
    for leftover in (*run_dir.glob("adapters/.*"), *run_dir.glob("checkpoints/.*")):
        shutil.rmtree(leftover)
    return run_dir, make_key(run_dir / "run.key"), secrets.token_hex(8)


def check_unused(run_dir: Path) -> None:
    """Refuse a folder that holds a run. Raises SettingsError."""
    if (run_dir / POINTER).exists():
        raise SettingsError(
            f"--save_path {run_dir} holds an earlier run ({POINTER} is there), which a new one would overwrite; going on "
            "with it is not supported yet: give another folder"
        )


def mark_done(run_dir: Path, adapter: Path, report: dict[str, Any]) -> None:
    """Leave the final adapter under a fixed name, then done.json: success is this file, never an exit code."""
    final = run_dir / "adapter"
    aside = run_dir / f".adapter.{os.getpid()}"
    shutil.copytree(adapter, aside)
    aside.rename(final)
    write_json(run_dir / DONE, report)
