"""How a worker process starts and ends: signals, exit codes, and not outliving the launcher that started it."""

import errno
import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

import psutil

from splitgrpo.config import (
    EXIT_DATA,
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_RETRY,
    EXIT_USAGE,
    DataError,
    DiskTrouble,
    PeerTimeout,
    SettingsError,
)

PARENT_ENV = "SPLITGRPO_PARENT_PID"  # set by a launcher that wants its workers to end with it
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 2.0
GRACE_S = 9.0  # from the first signal to a forced end; users are promised 10 s


class Stopped(Exception):
    """A signal asked this process to end, and what had to be saved is saved."""


class Watch(Protocol):
    """What run_main asks of rankwatch.RankWatch."""

    def explain(self, error: Exception) -> int | None:
        """Say which rank an error of the main thread comes from; the exit code, or None if from no other rank."""

    def leave(self, code: int) -> None:
        """Tell the other ranks that this one ends, and how."""


class StopFlag:
    """Set by the first SIGINT, SIGTERM or SIGHUP; GRACE_S later the process is ended, a second Ctrl-C ends it at once.

    Python runs a handler only when the main thread comes back from a collective, so a thread reads the signals as well.
    Repeats within REPEAT_S are the same Ctrl-C: launchers pass on a signal that the whole group has had already.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.watch: Watch | None = None
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=forget_signals)
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)
        threading.Thread(target=self._listen, args=[read_fd], name="signals", daemon=True).start()

    def __call__(self) -> bool:
        """True once a signal came."""
        return self.signum != 0

    def _handle(self, signum: int, frame: object) -> None:
        self.signum = self.signum or signum

    def _listen(self, fd: int) -> None:
        first_s: float | None = None
        while True:
            left_s = None if first_s is None else max(0.0, first_s + GRACE_S - time.monotonic())
            if not select.select([fd], [], [], left_s)[0]:
                os._exit(128 + self.signum)
            for signum in os.read(fd, 64):
                if signum not in ENDING:
                    continue
                self.signum = self.signum or signum
                first_s = time.monotonic() if first_s is None else first_s
                if signum == signal.SIGINT and time.monotonic() - first_s > REPEAT_S:
                    os._exit(128 + self.signum)

    def raise_with_the_others(self) -> NoReturn:
        """Raise Stopped because some rank was signalled, this one or another."""
        self.signum = self.signum or signal.SIGTERM
        raise Stopped(signal.Signals(self.signum).name)

    def raise_if_set(self) -> None:
        """Raise Stopped once a signal came."""
        if self.signum:
            raise Stopped(signal.Signals(self.signum).name)


def forget_signals() -> None:
    """In a forked child: what reaches it is not meant for the worker, whose pipe it shares."""
    signal.set_wakeup_fd(-1)
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def begin_process() -> None:
    """Call before the slow imports: Ctrl-C among them needs no traceback, and a launcher may be killed meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for fd in (0, 1, 2):  # closed, a pipe or a socket would take its place
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    watch_launcher(logging.getLogger("worker"))
    gc.disable()  # until run_main: what imports make stays, and to look through it again and again is a fifth of their time


def run_main(main: Callable[[StopFlag], None], log: logging.Logger) -> int:
    """Run a worker's story and turn what ends it into an exit code (README, "Exit codes")."""
    stop = StopFlag()
    gc.freeze()
    gc.enable()
    code = run_story(main, stop, log)
    if stop.watch is not None:
        stop.watch.leave(code)
    return code


def run_story(main: Callable[[StopFlag], None], stop: StopFlag, log: logging.Logger) -> int:
    """The exit code of a story, with the line that says why it ended."""
    try:
        main(stop)
    except Stopped as error:
        log.info("stopped by %s", error)
        return 128 + stop.signum
    except (SettingsError, DataError, PeerTimeout, DiskTrouble) as error:
        log.error("%s", error)
        codes = {SettingsError: EXIT_USAGE, DataError: EXIT_DATA}
        return next((code for kind, code in codes.items() if isinstance(error, kind)), EXIT_RETRY)
    except Exception as error:
        code = stop.watch.explain(error) if stop.watch is not None else None
        if code is not None:
            return code
        # A signal tears collectives and sockets in other processes too; that is no fault of this one.
        if stop():
            log.warning("ended by a signal while working: %s", str(error).partition("\n")[0])
            return 128 + stop.signum
        log.exception("internal error")
        return EXIT_INTERNAL
    return EXIT_OK


def end_process(code: int) -> None:
    """Leave now: interpreter shutdown with half-closed collectives may hang or turn success into an abort."""
    logging.shutdown()
    os._exit(code)


def watch_launcher(log: logging.Logger) -> None:
    """End this process when a launcher above it is gone; a killed deepspeed launcher would leave its ranks running."""
    watched, gone = [], False
    if pid := os.environ.get(PARENT_ENV):
        try:
            watched.append(psutil.Process(int(pid)))
        except psutil.NoSuchProcess:
            gone = True
    if "LOCAL_RANK" in os.environ:
        watched += [p for p in psutil.Process().parents() if is_deepspeed(p)]

    def watch() -> None:
        while not gone and all(is_alive(p) for p in watched):
            time.sleep(1.0)
        log.error("the launcher is gone: ending")
        os.kill(os.getpid(), signal.SIGTERM)

    if watched or gone:
        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def is_deepspeed(process: psutil.Process) -> bool:
    """True for DeepSpeed's launchers, and for the command that started them."""
    try:
        return any("deepspeed" in arg for arg in process.cmdline())
    except psutil.Error:  # another user's, or gone meanwhile
        return False


def is_alive(process: psutil.Process) -> bool:
    """True unless it has ended; one that has, and that nobody waited for, counts as ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_port(host: str, port: int) -> None:
    """Raises SettingsError where somebody listens there already; all else is left to the program that wants it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise port_trouble(host, port, os.strerror(error.errno)) from error


def port_trouble(host: str, port: int, reason: str) -> SettingsError:
    """What to say of a port that cannot be listened on."""
    return SettingsError(
        f"cannot listen on {host}:{port} ({reason}){port_holder(port)}. End that process, or give another --port "
        "to both workers."
    )


def port_holder(port: int) -> str:
    """Say who listens on a port, or nothing where the system does not tell."""
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid
            ):
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:120]
                return f": it is held by process {connection.pid} ({command})"
    except psutil.Error:
        pass
    return ""
