"""The sampler's end of the child process in which reward_function runs: starts it, asks it, kills it when it hangs."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

from splitgrpo.config import SettingsError
from splitgrpo.reward_child import Call, Fault, Reply, Scored, Target, clean, frame

START_S = 120.0  # for the imports of the user's module
WAIT_S = 0.1  # between two calls of on_wait
DUMP_S = 0.5  # for a hung process to say where it hangs
END_S = 1.0  # for the child to end by itself
MAX_REPLY_BYTES = 1 << 20
CHILD = "splitgrpo.reward_child"

_decoder = msgspec.msgpack.Decoder(Reply)


class RewardFault(Exception):
    """One call gave no reward: `kind` in a few words, and all that is known."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


def locate(function: Callable[..., Any]) -> Target:
    """Say how another process finds a function. Raises SettingsError where its module holds it under no name."""
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", None) or ""
    home = sys.modules.get(module)
    try:
        found = reduce(getattr, name.split("."), home)
    except AttributeError:
        found = None
    if found != function:  # a lambda, or a function made by another, may still have a name there
        name = next((n for n, value in vars(home).items() if value is function), "") if home else ""
    if not name:
        raise SettingsError(
            f"reward_function {function!r} has no name in module `{module}`: it runs in a process of its own, which imports "
            "it by name. Make it a function at the top level of a file, such as utils.py."
        )
    file = ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module, file = (spec.name, "") if spec else (module, getattr(main, "__file__", None) or "")
        if not spec and not file:
            raise SettingsError(f"reward_function {name} was typed in: put it into a file")
    path = [os.fsencode(entry) for entry in sys.path]
    return Target(path, module, file and os.path.abspath(file), name)


class RewardProcess:
    """One child process. For one thread, which must live as long: on Linux the child is killed when that thread ends."""

    def __init__(self, target: Target, on_wait: Callable[[], None]) -> None:
        """Start it and do not wait; `on_wait` is called at least every 0.2 s in any wait and may raise."""
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name == CHILD:
            raise SettingsError(
                f"{target.file or target.module} starts its work when it is imported: put it under "
                '`if __name__ == "__main__":`'
            )
        self.target, self._on_wait = target, on_wait
        self._ready, self._buffer, self._deadline = False, b"", 0.0
        self.killed = False
        self._group_ended = False
        requests_fd, self._write_fd = os.pipe()
        self._read_fd, replies_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        arguments = [str(n) for n in (requests_fd, replies_fd, os.getpid())]
        try:
            # -P: the working directory may hold a module that is called as one of the standard library.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(requests_fd, replies_fd),
                process_group=0,  # so that what user code starts can be ended after its parent is gone
                env=os.environ | {"PYTHONPATH": path},
            )
        finally:
            os.close(requests_fd)
            os.close(replies_fd)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._read_fd, select.POLLIN)
        self._writable.register(self._write_fd, select.POLLOUT)
        self._unsent = frame(target)
        try:  # what to import, now: it takes a second, in which the sampler has other work
            self._unsent = self._unsent[os.write(self._write_fd, self._unsent) :]
        except OSError:
            pass  # full, or closed already: the first call says so

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended(self) -> bool:
        """True once it is gone, and then what user code left in its group is ended too."""
        if self._process.poll() is None:
            return False
        if not self._group_ended:  # once, and at once: later the number may be a stranger's
            self._group_ended = True
            self._end_group()
        return True

    def _end_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except OSError:
            pass  # nobody is left, or another user's

    def _wait(self) -> None:
        deadline = time.monotonic() + END_S
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.005)

    def call(self, response: str, ground_truth: str, timeout_s: float) -> dict[str, float]:
        """Score one completion: finite numbers, `reward` among them.

        The first call waits for the start, which does not count in `timeout_s`. Raises RewardFault when the function raises,
        takes longer, ends its process or returns something else; SettingsError when it cannot be imported; what on_wait
        raises. Unless the function itself raised or returned, the process is gone after that.
        """
        try:
            if not self._ready:
                self._start()
            self._deadline = time.monotonic() + timeout_s
            texts = (text.encode("utf-8", "surrogatepass") for text in (response, ground_truth))
            self._send(frame(Call(*texts)))
            reply = self._receive(f"took longer than {timeout_s:g} s")
        except BaseException:
            self.kill()
            raise
        if isinstance(reply, Fault):
            raise RewardFault(reply.kind, reply.text)
        assert isinstance(reply, Scored)
        return reply.values

    def kill(self) -> None:
        """End it now, and what user code started in it."""
        self.killed = True
        family = []
        if not self.ended():  # or the number may be a stranger's by now
            try:
                family = psutil.Process(self.pid).children(recursive=True)
            except psutil.Error:
                pass
            self._end_group()
            self._process.kill()  # user code may have left the group
        for process in family:
            try:
                process.kill()
            except psutil.Error:
                pass  # gone already
        self._wait()  # it cannot be killed before the kernel is done with what it waits for
        self._close_pipes()

    def close(self) -> None:
        """Let it end by itself, exit handlers of user code included, or kill it."""
        self._close_pipes()
        self._wait()
        self.kill()

    def _close_pipes(self) -> None:
        for fd in (self._write_fd, self._read_fd):
            if fd >= 0:
                os.close(fd)
        self._write_fd = self._read_fd = -1

    def _start(self) -> None:
        self._deadline = time.monotonic() + START_S
        where = self.target.file or self.target.module
        try:
            self._send(self._unsent)
            reply = self._receive(f"took longer than {START_S:g} s")
        except RewardFault as fault:
            reply = Fault(f"its process {fault.kind}", fault.text)
        if isinstance(reply, Fault):
            raise SettingsError(
                f"{self.target.name} cannot be imported from {where} in its process ({reply.kind}):\n{reply.text}"
            )
        self._ready = True

    def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._write_fd, left) :]
            except BlockingIOError:
                self._pause(self._writable)
            except BrokenPipeError:
                self._died()

    def _receive(self, too_late: str) -> Reply:
        """The next reply. Raises RewardFault, of the kind `too_late` after the deadline."""
        while (reply := self._take()) is None:
            if time.monotonic() > self._deadline:
                stack = self._ask_stack()
                raise RewardFault(
                    too_late, f"it was at\n{stack}" if stack else "it did not say where it was"
                )
            if self._pause(self._readable):
                chunk = os.read(self._read_fd, 1 << 16)
                if not chunk:
                    self._died()
                self._buffer += chunk
                if len(self._buffer) > 2 * MAX_REPLY_BYTES:
                    raise RewardFault("wrote into the pipe of its results", "more than it can hold")
        return reply

    def _take(self) -> Reply | None:
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if size > MAX_REPLY_BYTES:
            return None  # no frame: the crash report of a process that is about to end
        if len(self._buffer) < 4 + size:
            return None
        body, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RewardFault("wrote into the pipe of its results", repr(body[:200])) from None

    def _pause(self, poll: select.poll) -> bool:
        """Wait a moment; True once a pipe can be used. Raises RewardFault when the child is gone."""
        left = self._deadline - time.monotonic()
        if poll.poll(1000 * max(0.0, min(WAIT_S, left))):
            return True
        self._on_wait()
        if self.ended() and not poll.poll(0):
            self._died()  # a process that user code forked may hold the pipe open
        return False

    def _ask_stack(self) -> str:
        self._process.send_signal(signal.SIGUSR1)
        if self._readable.poll(1000 * DUMP_S):
            time.sleep(0.05)  # it comes in many small writes
            self._buffer += os.read(self._read_fd, 1 << 16)
        return stack_of(self._buffer)

    def _died(self) -> NoReturn:
        self._wait()
        self._on_wait()  # a signal to the whole group is no fault of user code
        while self._readable.poll(0) and (chunk := os.read(self._read_fd, 1 << 16)):
            self._buffer += chunk
        raise RewardFault(self.how_it_ended(), stack_of(self._buffer) or "nothing more is known")

    def how_it_ended(self) -> str:
        """In words, once it did."""
        if not self.ended():
            return "closed the pipe of its results"
        code = self._process.returncode
        if code >= 0:
            return f"ended its process with exit code {code}"
        return f"ended its process by signal {-code} ({signal.strsignal(-code)})"


def stack_of(raw: bytes) -> str:
    """The frames of user code, innermost first, out of what faulthandler wrote."""
    lines = raw.decode("utf-8", "replace").splitlines()
    frames = [line for line in lines if line.startswith("  File ")]
    ours = next((i for i, line in enumerate(frames) if "reward_child.py" in line), len(frames))
    return clean("\n".join(frames[:ours]))
