"""The program of the child process in which reward_function runs: a fault of user code ends this process and no other.

    python -P -m splitgrpo.reward_child REQUESTS_FD REPLIES_FD PARENT_PID        (started by reward_process.py)

Both pipes carry frames: 4 bytes of length, big-endian, then msgpack. The first request is a Target, all others are Calls.
"""

import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import math
import os
import reprlib
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgspec

MAX_PARTS, MAX_PART_CHARS = 64, 100  # what the learner takes
MAX_VALUE = 1e30  # far above it a reward is infinite in float32
MAX_TEXT_CHARS = 8000  # of a traceback
END_S = (
    1.0  # for user code to return, and its exit handlers to run, once the sampler closed the pipe
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAIN_MODULE = (
    "__reward_main__"  # name of a script here, so that its `if __name__ == "__main__"` stays shut
)

_show = reprlib.Repr()
_show.maxstring = _show.maxother = 200
_show.maxdict = 8


class Target(msgspec.Struct, frozen=True):
    """Where the function is found: by `module`, or by `file` where the module is the script that was started."""

    sys_path: list[bytes]
    module: str
    file: str
    name: str  # qualified


class Call(msgspec.Struct, frozen=True):
    """One completion to score. Bytes are UTF-8 in which lone surrogates are allowed, as models may write them."""

    response: bytes
    ground_truth: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The function is imported."""


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """What the function returned: finite numbers, `reward` among them."""

    values: dict[str, float]


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """No result; `kind` says how ("raised KeyError"), `text` all that is known."""

    kind: str
    text: str


Reply = Ready | Scored | Fault


class BadResult(ValueError):
    """The function returned something that cannot be a reward."""


def frame(message: msgspec.Struct) -> bytes:
    """One message as it goes through a pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def check_result(result: Any) -> dict[str, float]:
    """The values of a mapping that holds `reward`, each as a float. Raises BadResult, and what user objects raise."""
    if not isinstance(result, Mapping) or "reward" not in result:
        raise BadResult(
            f"{_show.repr(result)}; it must return a dict that holds 'reward', such as {{\"reward\": 1.0}}"
        )
    values = {}
    for name, value in result.items():
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or not 1 <= len(name) <= MAX_PART_CHARS
        ):
            raise BadResult(f"a part named {_show.repr(name)} ({type(name).__name__}): names are printable text of at most "
                            f"{MAX_PART_CHARS} characters")  # fmt: skip
        try:
            values[name] = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            values[name] = math.nan
        if not abs(values[name]) <= MAX_VALUE:
            raise BadResult(
                f"{_show.repr(result)}: every value must be a finite number of size at most {MAX_VALUE:g}"
            )
    check_count(values)
    return values


def check_count(values: Mapping[str, float]) -> None:
    """Raises BadResult for more parts than the learner takes; `reward` is none of them."""
    if (count := len(values.keys() - {"reward"})) > MAX_PARTS:
        raise BadResult(f"{count} parts, allowed are {MAX_PARTS}")


def load(target: Target) -> Callable[[str, str], Any]:
    """Import the function. Raises whatever its module raises."""
    sys.path[:] = [os.fsdecode(entry) for entry in target.sys_path]
    sys.argv[1:] = []
    if target.file:
        spec = importlib.util.spec_from_file_location(MAIN_MODULE, target.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{target.file} is no Python file")
        module = sys.modules[MAIN_MODULE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(target.module)
    return functools.reduce(getattr, target.name.split("."), module)  # type: ignore[return-value]


def score(function: Callable[[str, str], Any], call: Call) -> Scored | Fault:
    """Call the function once. SystemExit and KeyboardInterrupt are faults of it like any other."""
    response, truth = (
        b.decode("utf-8", "surrogatepass") for b in (call.response, call.ground_truth)
    )
    try:
        return Scored(check_result(function(response, truth)))
    except BadResult as error:
        return Fault("returned no reward", clean(f"it returned {error}"))
    except BaseException as error:
        return raised(error)


def raised(error: BaseException) -> Fault:
    """A fault with the traceback below our own frame."""
    below = error.__traceback__ and error.__traceback__.tb_next
    text = "".join(traceback.format_exception(type(error), error, below))
    return Fault(clean(f"raised {type(error).__name__}"[:100]), clean(text.rstrip()))


def clean(text: str) -> str:
    """Cut out the middle of a long text and escape what UTF-8 cannot hold."""
    if len(text) > MAX_TEXT_CHARS:
        half = MAX_TEXT_CHARS // 2
        text = f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body; None once the sampler closed the pipe."""
    head = stream.read(4)
    body = stream.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
    return body if len(head) == 4 and len(body) == int.from_bytes(head, "big") else None


def write_frame(fd: int, message: msgspec.Struct) -> None:
    """Write one whole message."""
    left = memoryview(frame(message))
    try:
        while left:
            left = left[os.write(fd, left) :]
    except BrokenPipeError:
        os._exit(0)  # nobody asks any more


def die_with_sampler(requests_fd: int, parent_pid: int) -> None:
    """End when the sampler ends, however it ends and whatever user code does.

    The kernel's signal also reaches a process that never gives the interpreter lock back (a regular expression without
    end); where there is no such signal, a thread sees the sampler's end of the pipe closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it went before the line above

    def watch() -> None:
        poll = select.poll()
        poll.register(requests_fd, 0)  # no event but the hang-up
        poll.poll()
        time.sleep(END_S)
        os._exit(1)

    threading.Thread(target=watch, name="sampler-watch", daemon=True).start()


def main() -> None:
    """Import the function, then score until the sampler closes the pipe."""
    requests_fd, replies_fd, parent_pid = map(int, sys.argv[1:])
    die_with_sampler(requests_fd, parent_pid)
    # A handler and not SIG_IGN, which programs that user code starts would inherit. Ctrl-C reaches all; the sampler decides.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda signum, where: None)
    os.dup2(2, 1)  # prints of user code
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    # Written without the interpreter lock: where user code crashed, or where it hangs when the sampler asks.
    faulthandler.enable(replies_fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, replies_fd, all_threads=False)
    pid = os.getpid()
    with open(requests_fd, "rb", closefd=False) as requests:
        if (body := read_frame(requests)) is None:
            return  # the sampler was refused, or ended, while this process started
        try:
            gc.disable()  # as in process.begin_process
            function = load(msgspec.msgpack.decode(body, type=Target))
            gc.enable()
        except BaseException as error:
            write_frame(replies_fd, raised(error))
            return
        write_frame(replies_fd, Ready())
        while (body := read_frame(requests)) is not None:
            reply = score(function, msgspec.msgpack.decode(body, type=Call))
            if os.getpid() != pid:
                os._exit(1)  # user code forked and both returned: one process may answer
            write_frame(replies_fd, reply)


if __name__ == "__main__":
    main()
