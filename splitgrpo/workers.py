"""A worker as a process: started with its output in a file, signalled with all its children, started again."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from splitgrpo.config import EXIT_INTERNAL, EXIT_OK
from splitgrpo.process import PARENT_ENV
from splitgrpo.runfolder import DONE

ROOT = Path(__file__).resolve().parent.parent

log = logging.getLogger("launch")


@dataclass
class Worker:
    """One running worker, alone in a session so that all of it can be ended.

    Its reward process has a group of its own in there; DeepSpeed's launcher ends at once and leaves its ranks saving.
    """

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    log_path: Path
    log_at: int = 0  # where its own lines begin

    @classmethod
    def start(cls, name: str, command: Sequence[str], log_path: Path) -> "Worker":
        """Start it with its output going to a file."""
        env = os.environ | {PARENT_ENV: str(os.getpid())}
        with log_path.open("ab") as file:
            log_at = file.tell()
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=ROOT, env=env, start_new_session=True
            )
        return cls(name, list(command), process, log_path, log_at)

    def start_again(self, how: str) -> None:
        """Start it once more; `how` is --resume, --overwrite, or nothing, in place of what it was started with."""
        self.command = [a for a in self.command if a not in ("--resume", "--overwrite")]
        self.command += [how] if how else []
        again = Worker.start(self.name, self.command, self.log_path)
        self.process, self.log_at = again.process, again.log_at

    def signal(self, number: int) -> None:
        """Signal its process group; a group that is gone is no error."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        """Kill what is left, its group first: user code that a sampler started would outlive it."""
        left = self.members()
        self.signal(signal.SIGKILL)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def members(self) -> list[int]:
        """Processes of its session that have not ended."""
        self.process.poll()
        return [pid for pid in psutil.pids() if is_member(pid, self.process.pid)]

    def failure(self, run_dir: Path) -> int | None:
        """The exit code of a worker that failed, as a shell would say it; None while it runs or if it ended well."""
        code = self.process.poll()
        if code is None:
            return None
        if code == EXIT_OK:  # DeepSpeed's launcher ends so when its own launcher was killed
            unfinished = self.name == "learner" and not (run_dir / DONE).exists()
            return EXIT_INTERNAL if unfinished else None
        if (
            code > 256 - signal.NSIG
        ):  # DeepSpeed's launcher ends with minus the signal that killed a rank
            code -= 256
        return code if code > 0 else 128 - code

    def last_lines(self, count: int = 15) -> str:
        """The end of its log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(self.log_at)
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:  # somebody has moved it away
            lines = []
        return "\n".join(f"    {line}" for line in lines[-count:])


def is_member(pid: int, session: int) -> bool:
    """True for a process of the session that has not ended."""
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def end_all(workers: Sequence[Worker], wait_s: float) -> None:
    """Ask every worker to end, wait, then kill what is left of it."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    for worker in workers:
        while worker.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        if worker.members():
            log.warning("the %s did not end in %.0f s: killed", worker.name, wait_s)
        worker.kill()
