"""How a worker process starts and ends: signals, exit codes, and not outliving the launcher that started it."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

from splitgrpo.config import (
    EXIT_DATA,
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_RETRY,
    EXIT_USAGE,
    DataError,
    PeerTimeout,
    SettingsError,
)

PARENT_ENV = "SPLITGRPO_PARENT_PID"  # set by a launcher that wants its workers to end with it
REPEAT_S = 2.0
GRACE_S = 9.0  # from the first signal to a forced end; users are promised 10 s


class Stopped(Exception):
    """A signal asked this process to end, and what had to be saved is saved."""


class StopFlag:
    """Set by the first SIGINT or SIGTERM; a later one, or GRACE_S without an end, ends the process at once.

    Launchers pass on a signal that the whole group has had already: repeats within REPEAT_S are that same signal.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        """True once a signal came."""
        return self.signum != 0

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum and time.monotonic() - self._since > REPEAT_S:
            os._exit(128 + self.signum)
        if self.signum:
            return
        self.signum, self._since = signum, time.monotonic()
        threading.Timer(GRACE_S, os._exit, [128 + signum]).start()

    def raise_with_the_others(self) -> NoReturn:
        """Raise Stopped because some rank was signalled, this one or another."""
        self.signum = self.signum or signal.SIGTERM
        raise Stopped(signal.Signals(self.signum).name)

    def raise_if_set(self) -> None:
        """Raise Stopped once a signal came."""
        if self.signum:
            raise Stopped(signal.Signals(self.signum).name)


def run_main(main: Callable[[StopFlag], None], log: logging.Logger) -> int:
    """Run a worker's story and turn what ends it into an exit code (README, "Exit codes")."""
    stop = StopFlag()
    watch_launcher(log)
    try:
        main(stop)
    except Stopped as error:
        log.info("stopped by %s", error)
        return 128 + stop.signum
    except (SettingsError, DataError, PeerTimeout) as error:
        log.error("%s", error)
        codes = {SettingsError: EXIT_USAGE, DataError: EXIT_DATA, PeerTimeout: EXIT_RETRY}
        return next(code for kind, code in codes.items() if isinstance(error, kind))
    except Exception:
        # A signal tears collectives and sockets in other processes too; that is no fault of this one.
        if stop():
            log.warning("ended by a signal while working", exc_info=True)
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
    watched = []
    try:
        if pid := os.environ.get(PARENT_ENV):
            watched.append(psutil.Process(int(pid)))
        if "LOCAL_RANK" in os.environ:
            parents = psutil.Process().parents()
            watched += [p for p in parents if any("deepspeed" in arg for arg in p.cmdline())]
    except psutil.Error as error:
        log.warning("cannot watch the launcher: %s", error)

    def watch() -> None:
        while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in watched):
            time.sleep(1.0)
        log.error("the launcher is gone: ending")
        os.kill(os.getpid(), signal.SIGTERM)

    if watched:
        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


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
