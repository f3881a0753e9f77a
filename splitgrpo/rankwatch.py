"""Ranks that watch each other: one that died, hangs or stands still is named by the others, which then end too.

A thread of each rank sends a line a second over the connections that rankjoin.py made, so that a death is seen at once, by
its closed connection, and a stopped process by its silence. Rank 0 judges all ranks, the others judge rank 0. torch's own
store would not do: its client (2.13) waits without end for a store whose process is stopped.
"""

import logging
import os
import select
import socket
import threading
import time
from dataclasses import dataclass

from splitgrpo.config import EXIT_DATA, EXIT_INTERNAL, EXIT_RETRY, EXIT_USAGE
from splitgrpo.process import StopFlag
from splitgrpo.rankjoin import Line, meet

BEAT_S = 1.0
SILENT_S = 10.0  # without a line for so long, a rank counts as hung
LOAD_S = 1800.0  # a step of loading, until `expect_progress`
LEAVE_S = 3.0  # a rank that another's failure reaches by itself may take so long to end
GRACE_S = 1.0  # for the main thread, before the process is ended
FAILED = (EXIT_USAGE, EXIT_DATA, EXIT_INTERNAL)
TRY_AGAIN = "Start again with --resume."


@dataclass
class Peer:
    """What is known of a rank: how often its main thread has moved on, what it does, how it left."""

    moves: int = 0
    doing: str = "starting"
    moved_s: float = 0.0  # clock of this process
    heard_s: float = 0.0
    code: int | None = None  # it said that it ends, with this exit code
    left_s: float = 0.0
    closed: bool = False

    def note(self, moves: int, doing: str, now: float) -> None:
        """Take in one line of the rank."""
        if moves != self.moves or doing != self.doing:
            self.moves, self.doing, self.moved_s = moves, doing, now
        self.heard_s = now


class RankWatch:
    """The watch of one rank. Does nothing in a run of one."""

    def __init__(self, rank: int, lines: dict[int, Line], log: logging.Logger) -> None:
        """`lines` holds every other rank on rank 0, and rank 0 on the others."""
        self.rank, self.lines, self.log = rank, lines, log
        now = time.monotonic()
        self.peers = {r: Peer(moved_s=now, heard_s=now) for r in sorted({rank, *lines})}
        self.stall_s = LOAD_S
        self._leaving: int | None = None
        self._verdict: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        if lines:
            for line in lines.values():
                line.sock.setblocking(False)
            self._thread.start()

    # -- for the main thread ------------------------------------------------------------------------------------------

    def bump(self, doing: str = "") -> None:
        """The main thread has moved on; `doing` is what it does now (empty: the same)."""
        own = self.peers[self.rank]
        own.note(own.moves + 1, doing or own.doing, time.monotonic())

    def expect_progress(self, stall_s: float) -> None:
        """From now on a rank that does not `bump` for stall_s counts as stuck."""
        now = time.monotonic()
        for peer in self.peers.values():
            peer.moved_s = (
                now  # they have all come as far as this one, though their lines may still say less
            )
        self.bump()
        self.stall_s = stall_s

    def explain(self, error: Exception) -> int | None:
        """Say which rank an error of the main thread comes from; the exit code, or None if from no other rank."""
        if not self.lines or not is_torn(error):
            return None
        deadline = time.monotonic() + SILENT_S + 2 * BEAT_S
        while time.monotonic() < deadline and not self._decided.wait(0.1):
            for rank, peer in self.peers.items():
                if rank == self.rank or peer.code is None:
                    continue
                if peer.code not in (*FAILED, EXIT_RETRY):
                    return None
                self._decide(ended(rank, peer.code), peer.code)
        return self._verdict[1] if self._verdict else None

    def leave(self, code: int) -> None:
        """Tell the others that this rank ends, and how; waits at most a second for them to have read it."""
        if self._thread.is_alive():
            self._leaving = code
            self._wake.send(b"x")
            self._thread.join(BEAT_S)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        beat_s = 0.0
        # One that has failed is waited for after its line is closed: see LEAVE_S.
        while any(not self.peers[r].closed or self._failed(r) for r in self.lines):
            before = time.monotonic()
            open_lines = {
                line.sock: r for r, line in self.lines.items() if not self.peers[r].closed
            }
            ready = select.select([*open_lines, self._woken], [], [], BEAT_S / 2)[0]
            now = time.monotonic()
            if now - before > 3 * BEAT_S:  # this process was stopped: it has no right to judge
                for peer in self.peers.values():
                    peer.heard_s = peer.moved_s = now
            for sock in ready:
                if sock in open_lines:
                    self._hear(open_lines[sock], now)
            if self._leaving is not None:
                self._say_goodbye()
                return
            if now - beat_s >= BEAT_S:
                beat_s = now
                own = self.peers[self.rank]
                for line in self.lines.values():
                    line.send(moves=own.moves, doing=own.doing)
            if self._verdict is None and (found := self._judge(now)):
                self._decide(*found)
            if self._verdict is not None:
                self._end()
                return

    def _hear(self, rank: int, now: float) -> None:
        messages, closed = self.lines[rank].receive()
        peer = self.peers[rank]
        for message in messages:
            if "verdict" in message:
                self._decide(*message["verdict"])
            elif "code" in message:
                peer.code, peer.left_s = message["code"], now
            else:
                peer.note(message["moves"], message["doing"], now)
        if closed:
            peer.closed = True
            self.lines[rank].sock.close()

    def _judge(self, now: float) -> tuple[str, int] | None:
        for rank in self.lines:
            peer = self.peers[rank]
            if peer.code is not None:
                if self._failed(rank) and now - peer.left_s > LEAVE_S:
                    return ended(rank, peer.code), peer.code
                continue
            last = f"last seen at: {peer.doing}"
            if peer.closed:
                return (
                    f"rank {rank} is gone: its process was killed or crashed; {last}. {TRY_AGAIN}",
                    EXIT_RETRY,
                )
            if now - peer.heard_s > SILENT_S:
                silent = now - peer.heard_s
                return (f"rank {rank} gave no sign of life for {silent:.0f} s: its process or machine is stopped; {last}. "
                        f"{TRY_AGAIN}"), EXIT_RETRY  # fmt: skip
        if self.rank == 0 and (stuck := self._stuck(now)):
            return (
                f"no progress for {self.stall_s:.0f} s (--wait_timeout_s): {stuck}. {TRY_AGAIN}",
                EXIT_RETRY,
            )
        return None

    def _failed(self, rank: int) -> bool:
        """True for a rank that ended without the others. Rank 0 alone waits for a disk, and gives up on it; others end first
        where all end with 75, while rank 0 saves."""
        code = self.peers[rank].code
        return code in FAILED or (rank == 0 and code == EXIT_RETRY)

    def _stuck(self, now: float) -> str:
        """What each rank did last, if one of them stands still."""
        staying = {r: p for r, p in self.peers.items() if p.code is None}
        if not any(now - p.moved_s > self.stall_s for p in staying.values()):
            return ""
        return "; ".join(
            f"rank {r} has been at {p.doing!r} for {now - p.moved_s:.0f} s"
            for r, p in staying.items()
        )

    def _decide(self, text: str, code: int) -> None:
        with self._lock:
            if self._verdict is None:
                self._verdict = text, code
                self.log.error("%s", text)
                self._decided.set()

    def _end(self) -> None:
        """Pass the verdict on, leave the main thread a moment, then end: it may sit in a collective for ever."""
        assert self._verdict is not None
        for line in self.lines.values():
            line.send(verdict=self._verdict)
        time.sleep(GRACE_S)
        logging.shutdown()
        os._exit(self._verdict[1])

    def _say_goodbye(self) -> None:
        """The others close their end when they have read it; closing first could lose it."""
        for line in self.lines.values():
            line.send(code=self._leaving)
            try:
                line.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        for rank, line in self.lines.items():
            while not self.peers[rank].closed and select.select([line.sock], [], [], BEAT_S)[0]:
                self._hear(rank, time.monotonic())


def ended(rank: int, code: int) -> str:
    """What to say of a rank that ended by itself."""
    return f"rank {rank} ended with code {code}, its own lines say why" + (
        f". {TRY_AGAIN}" if code == EXIT_RETRY else ""
    )


def is_torn(error: Exception) -> bool:
    """True for what torch raises when another rank leaves a collective."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "socket", "store", "process group", "timed out")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def join_ranks(run: str, stop: StopFlag, log: logging.Logger) -> RankWatch:
    """Wait for all ranks and begin to watch them, before torch takes the port; `run` as in `rankjoin.meet`.

    Raises what `rankjoin.meet` raises, and Stopped.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    lines = meet(run, stop.raise_if_set) if num_ranks > 1 else {}
    stop.watch = watch = RankWatch(rank, lines, log)
    return watch
