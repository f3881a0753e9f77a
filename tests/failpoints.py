"""Break a writer on purpose: kill it between any two of its system calls, cut its power, or fill its disk. Linux alone.

for n in itertools.count(1):
    done = dies_at(lambda: publish(...), run_dir, n)  # in a forked child, gone before its n-th call below run_dir
    ...                                               # what readers must find, whatever n was
    if done:
        break
"""

import ctypes
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIED, PR_SET_PDEATHSIG = 99, 1
# Events of Python's own audit (sys.addaudithook) that name a path: the number of the argument, and of a folder it is
# relative to. Each comes before its system call. os.fsync has none, and is wrapped.
EVENTS = {"open": (0, None), "os.mkdir": (0, 2), "os.rename": (0, 2), "os.remove": (0, 1), "os.rmdir": (0, 1),
          "os.link": (0, 2), "os.symlink": (0, 2), "os.truncate": (0, None), "os.chmod": (0, 2)}  # fmt: skip
CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE, MS_RDONLY, MS_REMOUNT = (
    0x20000, 0x10000000, 0x4000, 0x40000, 1, 32)  # fmt: skip


def fork(work: Callable[[], None]) -> int:
    """Start `work` in a forked child, which ends with 0, or with 1 and a traceback on stderr. Returns its pid.

    It never outlives this process.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:  # even if stderr cannot be written
        os._exit(code)


def wait(pid: int, timeout_s: float = 60.0) -> int:
    """The exit code of a child, negative for a signal. One that takes longer is killed: -9."""
    deadline = time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.001)


def dies_at(work: Callable[[], None], under: Path, n: int, *, power_cut: bool = False) -> bool:
    """Run `work` in a child that is gone before its n-th system call on a path below `under`.

    With `power_cut` the files below `under` that the child wrote and did not fsync lose their second half, and folders that
    it renamed have their old name unless the folder around them was fsynced since. Returns True when `work` was done
    before; raises AssertionError when it failed.
    """

    def trapped() -> None:
        trap = Trap(under, n, power_cut=power_cut)
        os.fsync, trap.real_fsync = trap.fsync, os.fsync
        sys.addaudithook(trap.hook)
        try:
            work()
        finally:
            trap.off = True

    code = wait(fork(trapped))
    assert code in (0, DIED), f"the child ended with {code}"
    return code == 0


class Trap:
    """Counts the system calls of this process below a folder, and ends it at the n-th."""

    def __init__(self, under: Path, n: int, *, power_cut: bool) -> None:
        self.under, self.n, self.power_cut = str(under), n, power_cut
        self.off, self.count = False, 0
        self.real_fsync = os.fsync
        self.durable = {p.stat().st_ino for p in under.rglob("*")}  # inodes that lose nothing
        self.renamed: list[tuple[Path, Path]] = []  # folders, old and new name, not durable yet

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Called by Python before each audited call."""
        if self.off or event not in EVENTS:
            return
        where, folder = EVENTS[event]
        path = args[where]
        if not isinstance(path, str | os.PathLike):
            return
        path = os.fspath(path)
        if folder is not None and len(args) > folder and args[folder] >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{args[folder]}"), path)
        if str(path).startswith(self.under):
            self.step()
            self.note(event, path, args)

    def note(self, event: str, path: str, args: tuple[Any, ...]) -> None:
        """Keep count of what a power cut would take away."""
        if event == "os.rename" and os.path.isdir(path):
            self.renamed.append((Path(path), Path(args[1])))
        written = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        lost = path if written or event == "os.remove" else args[1] if event == "os.rename" else ""
        if lost and os.path.exists(lost):  # an inode's number is used again
            self.durable.discard(os.stat(lost).st_ino)

    def fsync(self, fd: int) -> None:
        """Takes the place of os.fsync."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.startswith(self.under):
            self.real_fsync(fd)
            return
        self.step()
        self.real_fsync(fd)
        self.durable.add(os.fstat(fd).st_ino)
        self.renamed = [(old, new) for old, new in self.renamed if str(new.parent) != path]

    def step(self) -> None:
        """One more call is about to be made."""
        self.count += 1
        if self.count < self.n:
            return
        self.off = True
        if self.power_cut:
            for old, new in reversed(self.renamed):
                if new.exists():
                    new.rename(old)
            for path in Path(self.under).rglob("*"):
                if path.is_file() and path.stat().st_ino not in self.durable:
                    os.truncate(path, path.stat().st_size // 2)
        os._exit(DIED)


def mount_small(folder: Path, size: str = "1m") -> None:
    """Give the calling process (a forked child of one thread) a file system of its own on `folder`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS):  # root needs no more
        call(libc.unshare(CLONE_NEWNS | CLONE_NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    call(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    call(libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()))


def remount(folder: Path, *, read_only: bool) -> None:
    """Make what `mount_small` mounted read-only, or writable again. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = MS_REMOUNT | (MS_RDONLY if read_only else 0)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def can_mount() -> bool:
    """Whether this machine lets a child have a file system of its own."""

    def attempt() -> None:
        try:
            mount_small(Path("/tmp"))
        except OSError:
            os._exit(DIED)

    return wait(fork(attempt)) == 0
