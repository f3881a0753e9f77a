"""Reward functions with every fault that users write; test_rewards.py has them called in a real child process."""

import atexit
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

FINE = {"reward": 1.0, "format": 0.25}
NAN = float("nan")
RESULTS = {
    "none": None, "number": 1.0, "text": "1", "empty": {}, "no reward": {"score": 1}, "string": {"reward": "1"},
    "null": {"reward": None}, "list": {"reward": [1.0]}, "nan": {"reward": NAN}, "infinite": {"reward": float("inf")},
    "above float32": {"reward": 1e39}, "huge": {"reward": 10**400}, "part nan": {"reward": 1.0, "part": NAN},
    "part string": FINE | {"part": "high"}, "part 1": FINE | {1: 2.0}, "part blank": FINE | {"": 2.0},
    "part newline": FINE | {"a\nb": 2.0}, "part surrogate": FINE | {"\ud800": 2.0}, "part long": FINE | {"x" * 101: 2.0},
    "65 parts": {"reward": 1.0} | {f"part{i}": 1.0 for i in range(65)},
}  # fmt: skip


class Unprintable(Exception):
    """Raises when somebody asks what it says."""

    def __str__(self):
        raise RuntimeError("no")


def hang_in_c():
    """Never gives the interpreter lock back."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def fork_and_return():
    """Leave a copy of the whole process that returns as well."""
    os.fork()
    return FINE


def start_a_sleeper(path):
    """Hang with a program of one's own, whose number is left in `path`."""
    sleeper = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(str(sleeper.pid))
    sleeper.wait()


def deep():
    return deep()


def complain():
    raise ValueError("\ud800" + "x" * 1_000_000)


def unprintable():
    raise Unprintable


def leave_a_copy():
    """End, but leave a copy of the process behind, which holds the pipes open."""
    if os.fork():
        os._exit(3)
    time.sleep(6)
    os._exit(0)


def pour():
    """Write into every pipe there is, without end."""
    fds = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    while True:
        for fd in fds:
            try:
                os.write(fd, b"\xff" * 65536)
            except OSError:
                pass


ACTS = {
    "raise": lambda: 1 / 0, "unprintable": unprintable, "recursion": deep, "surrogate": complain, "input": input,
    "sys.exit": lambda: sys.exit(3), "os._exit": lambda: os._exit(3), "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "close": lambda: os.closerange(3, 65536),
    "hang": lambda: time.sleep(60), "hang in C": hang_in_c, "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leave a copy": leave_a_copy, "pour": pour,
}  # fmt: skip


def faulty(response, answer):
    """Do what the response says; any other text is scored as FINE."""
    if response in RESULTS:
        return RESULTS[response]
    if response in ACTS:
        ACTS[response]()
    if response.startswith("sleeper "):
        start_a_sleeper(response.removeprefix("sleeper "))
    if response == "print":
        print("x" * 1_000_000)  # noqa: T201
        os.write(1, b"y" * 1_000_000)
    if response == "fork":
        return fork_and_return()
    if response == "die later":
        threading.Timer(0.3, os._exit, [4]).start()
    if response.startswith("part "):
        return {"reward": 1.0, response: 2.0}
    if response.startswith("at exit "):
        atexit.register(Path(response.removeprefix("at exit ")).touch)
    return FINE


def told(response, answer):
    """The process that runs this, and checksums of what arrived."""
    texts = [text.encode("utf-8", "surrogatepass") for text in (response, answer)]
    return {"reward": os.getpid(), "response": zlib.crc32(texts[0]), "answer": zlib.crc32(texts[1])}


def nap(response, answer):
    time.sleep(float(response))
    return FINE
