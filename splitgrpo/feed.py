"""Rank 0 receives groups, every rank gets the same ones; no rank waits for data inside a collective.

Every half second all ranks meet in one tiny reduction that carries what to do next: nothing yet, take a step of n
bytes, or stop. Groups are shared as the wire bytes that came in, so that no pickle is needed among ranks either.
"""

import logging
import struct
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from splitgrpo.arrivals import Trained
from splitgrpo.config import PeerTimeout
from splitgrpo.journal import Replay
from splitgrpo.rollout import Group
from splitgrpo.server import GroupServer
from splitgrpo.wire import GroupHeader, MessageError, unpack_group, unseal
from splitgrpo.zero import Ranks

TICK_S = 0.5
SAY_EVERY_S = 10.0
NOTHING, STEP, GIVE_UP = 0, 1, 2


class Feed:
    """Groups of one optimizer step after the other, the same on every rank."""

    def __init__(
        self,
        ranks: Ranks,
        server: GroupServer | Replay | None,
        key: bytes,
        *,
        wait_timeout_s: float,
        should_stop: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        """`server` is rank 0's; the other ranks pass None."""
        self.ranks, self.server, self.key = ranks, server, key
        self.should_stop, self.log = should_stop, log
        self.wait_timeout_s = wait_timeout_s
        self.taken: list[Trained] = []  # of the step under way, on rank 0

    def next_groups(self, num_groups: int, version: int) -> list[Group] | None:
        """Wait for the groups of one step. Every rank calls this; None means that a signal asked to stop.

        Raises PeerTimeout on every rank when no sampler gave a sign of life for wait_timeout_s.
        """
        started = said = time.monotonic()
        while True:
            op, payload = NOTHING, b""
            if self.server is not None:
                taken = self.server.take(num_groups, version, TICK_S)
                if taken is not None:
                    self.taken = taken
                    op = STEP
                    if self.ranks.num_ranks > 1:
                        payload = join([t.payload for t in taken])
                elif min(self.server.idle_s(), time.monotonic() - started) > self.wait_timeout_s:
                    op = GIVE_UP
                elif time.monotonic() - said > SAY_EVERY_S:
                    said = time.monotonic()
                    waited = said - started
                    self.log.info(
                        "waiting for rollouts (%.0f s): %s", waited, self.server.describe()
                    )
            op, size, stop = self.agree([op, len(payload), int(self.should_stop())])
            if stop:
                return None
            if op == GIVE_UP:
                what = self.server.describe() if self.server else "see rank 0"
                raise PeerTimeout(
                    f"no sampler gave a sign of life for {self.wait_timeout_s:.0f} s ({what}). See sampler.log or the "
                    "sampler's terminal; --wait_timeout_s waits longer."
                )
            if op == STEP:
                return self.share(payload, size)

    def agree(self, values: list[int]) -> list[int]:
        """Elementwise maximum over the ranks."""
        self.ranks.bump()
        tensor = torch.tensor(values, dtype=torch.int64)
        if self.ranks.num_ranks > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.ranks.control)
        return tensor.tolist()

    def share(self, payload: bytes, size: int) -> list[Group]:
        """Broadcast rank 0's bytes, which all other ranks decode; its own groups are views of them, checked as they came."""
        if self.ranks.num_ranks > 1:
            buffer = torch.empty(size, dtype=torch.uint8)
            if payload:
                buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            dist.broadcast(buffer, src=0, group=self.ranks.control)
        if self.server is not None:
            return [t.group for t in self.taken]
        return [decode(self.key, raw) for raw in cut(buffer.numpy().tobytes())]


def join(parts: list[bytes]) -> bytes:
    """Lengths in front, so that `cut` undoes it."""
    return b"".join(struct.pack("<Q", len(p)) + p for p in parts)


def cut(data: bytes) -> list[bytes]:
    """Undo `join`."""
    parts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return parts


def decode(key: bytes, raw: bytes) -> Group:
    """One group from its wire bytes. Raises MessageError."""
    header, blob = unseal(key, raw)
    if not isinstance(header, GroupHeader):
        raise MessageError(f"expected a group, found {type(header).__name__}")
    return unpack_group(header, blob)
