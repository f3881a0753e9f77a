"""How the ranks of a learner come together, before torch does: on the same port, but with every wait bounded.

torch's own rendezvous (2.13) waits over 40 s, or without end, for a stranger that listens on the port and says nothing.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from splitgrpo.config import PeerTimeout, SettingsError
from splitgrpo.process import port_holder

JOIN_S = 120.0  # from the first rank's start to the last's
ANSWER_S = 5.0  # rank 0 answers a greeting at once
POLL_S = 0.2
MAX_LINE = 1 << 16


class Line:
    """One connection between two ranks; messages are lines of JSON, and what cannot be sent at once is lost."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""
        self._early: list[Any] = []

    def send(self, **message: object) -> None:
        """Send one message; a peer that is gone is found by `receive`."""
        try:
            self.sock.send(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def receive(self) -> tuple[list[Any], bool]:
        """Messages that have come, and whether the other end is closed, or talks nonsense. Call when it is readable."""
        early, self._early = self._early, []
        try:
            data = self.sock.recv(65536)
        except (BlockingIOError, TimeoutError):
            return early, False
        except OSError:
            return early, True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            return early + [json.loads(line) for line in lines], not data or len(
                self._buffer
            ) > MAX_LINE
        except (ValueError, RecursionError):  # a stranger's
            return early, True

    def wait(self, deadline: float, check_stop: Callable[[], None]) -> Any:
        """The next message while the ranks come together; None if none comes, or if it is none of ours."""
        self.sock.settimeout(POLL_S)
        while time.monotonic() < deadline:
            check_stop()
            messages, closed = self.receive()
            if messages:
                self._early = messages[1:]
                return messages[0]
            if closed:
                return None
        return None


def meet(run: str, check_stop: Callable[[], None]) -> dict[int, Line]:
    """Wait at MASTER_ADDR:MASTER_PORT until all ranks have come; `run` is text that they share, and no other run has.

    Returns the lines to all others on rank 0, to rank 0 on the others; the port is free again. Raises SettingsError when a
    stranger has the port, PeerTimeout when a rank does not come, and what check_stop raises.
    """
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    greeting = {"run": run, "ranks": num_ranks}
    if rank == 0:
        return accept_ranks(where, greeting, num_ranks, check_stop)
    return {0: find_rank_0(where, greeting | {"rank": rank}, check_stop)}


def accept_ranks(
    where: tuple[str, int], greeting: dict, num_ranks: int, check_stop: Callable[[], None]
) -> dict[int, Line]:
    """Rank 0's part."""
    lines: dict[int, Line] = {}
    expected = [greeting | {"rank": rank} for rank in range(1, num_ranks)]
    deadline = time.monotonic() + JOIN_S
    try:
        loopback = socket.gethostbyname(where[0]).startswith("127.")
        server = socket.create_server((where[0] if loopback else "", where[1]), backlog=128)
    except OSError as error:
        raise port_trouble(where, f"cannot be listened on ({error.strerror})") from error
    with server:
        server.settimeout(POLL_S)
        while len(lines) < num_ranks - 1:
            check_stop()
            missing = sorted(set(range(1, num_ranks)) - set(lines))
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"rank {missing[0]} did not come within {JOIN_S:.0f} s: see its own lines"
                )
            try:
                line = Line(server.accept()[0])
            except TimeoutError:
                continue
            found = line.wait(time.monotonic() + 1.0, lambda: None)
            if found in expected and found["rank"] in missing:
                lines[found["rank"]] = line
                line.send(welcome=True)
            else:
                line.send(welcome=False)
                line.sock.close()
    for line in lines.values():
        line.send(go=True)
    return lines


def find_rank_0(where: tuple[str, int], greeting: dict, check_stop: Callable[[], None]) -> Line:
    """Another rank's part."""
    deadline = time.monotonic() + JOIN_S
    while True:
        check_stop()
        try:
            line = Line(socket.create_connection(where, timeout=ANSWER_S))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"rank 0 does not listen on {where[0]}:{where[1]} ({error}): see its own lines"
                ) from error
            time.sleep(POLL_S)
    line.send(**greeting)
    answer = line.wait(time.monotonic() + ANSWER_S, check_stop)
    if answer != {"welcome": True}:
        raise port_trouble(where, "is in use by something that is not rank 0 of this run")
    if line.wait(deadline + ANSWER_S, check_stop) != {"go": True}:
        raise PeerTimeout("rank 0 ended while the ranks came together: see its own lines")
    return line


def port_trouble(where: tuple[str, int], what: str) -> SettingsError:
    """An error that names the port, who has it where that is known, and the flag."""
    address, port = where
    other = port + 1 if port < 65535 else 29500
    return SettingsError(
        f"MASTER_PORT: {address}:{port}, where the ranks meet, {what}{port_holder(port)}. Give another: "
        f"deepspeed --master_port {other} ..."
    )
