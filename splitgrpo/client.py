"""The sampler's end of the transport: says hello, waits for credit, sends groups until they are acknowledged. No torch."""

import collections
import itertools
import logging
import secrets
import time
from collections.abc import Callable

import zmq

from splitgrpo import SCHEMA_VERSION
from splitgrpo.config import PeerTimeout, SettingsError
from splitgrpo.keys import Curve
from splitgrpo.rollout import Group
from splitgrpo.transport import SocketThread
from splitgrpo.wire import (
    Blob,
    Bye,
    Commit,
    Grant,
    GroupDropped,
    GroupHeader,
    Heartbeat,
    Hello,
    Message,
    MessageError,
    Reason,
    Refuse,
    Request,
    Welcome,
    pack_group,
    settings_hash,
)

SAY_EVERY_S = 10.0
REFUSED_FOR_S = 15.0  # a restarted sampler is refused until its dead twin's last heartbeat is old


class RunFinished(Exception):
    """The learner said that the run is complete."""


class GroupClient(SocketThread):
    """Sends groups on a thread of its own; everything public is for the sampler's main thread."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        hello: Hello,
        *,
        wait_timeout_s: float,
        check_stop: Callable[[], None],
        log: logging.Logger,
        curve: Curve | None = None,
    ) -> None:
        """Connect (zeromq retries until the learner is there) and say hello every second until welcomed."""
        super().__init__(zmq.DEALER, key, log, "group-client", curve)
        self.hello = hello
        self.next_seq = 0
        self.resent = 0
        self.discarded = 0  # since this learner started: their weights were rolled back
        self._progress = 0
        self._status = "starting"
        # All whose fate is in no checkpoint yet: a learner that comes back from one asks for them again.
        self._kept: collections.deque[tuple[GroupHeader | GroupDropped, bytes]] = (
            collections.deque()
        )
        self._welcome: Welcome | None = None  # of the learner that is there now
        self._wanted = 0
        self._grant: Grant | None = None
        self._refusal: Refuse | None = None
        self._refused_since: float | None = None
        self._bye: Bye | None = None
        self._boot_id = ""
        self._learner_progress = -1
        self._last_heard = time.monotonic()  # when the learner's main thread last moved
        self._settings_hash = settings_hash(hello.settings)
        self._wait_timeout_s = wait_timeout_s
        self._check_stop = check_stop
        self._where = f"{address[0]}:{address[1]}"
        self.connect(*address)
        self.start()

    # -- called by the sampler's main thread ------------------------------------------------------------------------

    def wait_grant(self, num_groups: int) -> tuple[int, tuple[int, int]]:
        """Ask for credit for up to `num_groups` groups and wait for it.

        Returns how many may be sampled now (their sequence numbers start at `next_seq`) and the least (lineage, version)
        of the adapter that samples them. Raises Stopped, RunFinished, SettingsError when refused, PeerTimeout.
        """
        with self.lock:
            self._wanted, self._grant = num_groups, None
            self._request()
        got: list[Grant] = []

        def take() -> bool:  # at once: a learner that comes anew would withdraw it
            if self._grant is not None:
                got.append(self._grant)
                self._grant, self._wanted = None, 0
            return bool(got)

        self._wait("credit from the learner", take)
        return got[0].num_groups, (got[0].lineage, got[0].policy_version)

    def send(self, group: Group) -> bool:
        """Send one group; it is kept until a checkpoint holds its fate. False if another one is wanted first.

        Raises MessageError for a group above the size cap.
        """
        return self._send(*pack_group(group, self.hello.session, self._settings_hash))

    def drop(self, seq: int, version: tuple[int, int], reason: Reason) -> bool:
        """Say that group `seq`, sampled by (lineage, version), is not sent, and why. Returns as `send` does."""
        header = GroupDropped(
            session=self.hello.session, sampler_id=self.hello.sampler_id, seq=seq,
            lineage=version[0], policy_version=version[1], reason=reason,
        )  # fmt: skip
        return self._send(header, b"")

    def _send(self, header: GroupHeader | GroupDropped, blob: bytes) -> bool:
        with self.lock:
            self.raise_if_failed()
            if header.seq != self.next_seq or not self._usable(header):
                self.discarded += 1
                return False
            if self._welcome:
                self.post(b"", header, blob)
            self._kept.append((header, blob))
            self.next_seq += 1
            return True

    def discard(self, num_groups: int) -> None:
        """Count groups that were sampled but are not sent, because one before them was not wanted."""
        with self.lock:
            self.discarded += num_groups

    def bump(self, status: str) -> None:
        """Say that the main thread is alive and what it does (the learner watches it)."""
        with self.lock:
            self._progress += 1
            self._status = status

    def close(self, reason: str) -> None:
        """Say goodbye and end the thread."""
        with self.lock:
            bye = Bye(sampler_id=self.hello.sampler_id, session=self.hello.session,
                      finished=False, reason=reason)  # fmt: skip
            self.post(b"", bye)
        self.stop()

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        started = said = time.monotonic()
        while True:
            self.bump(f"waiting for {what}")
            self._check_stop()
            with self.lock:
                self._raise_if_over()
                if ready():
                    return
                now = time.monotonic()
                silent_s = now - max(self._last_heard, started)
                if silent_s > self._wait_timeout_s:
                    raise PeerTimeout(
                        f"no sign of life from a learner at {self._where} for {silent_s:.0f} s while waiting for "
                        f"{what}{self._refused()}. See learner.log or the learner's terminal; --wait_timeout_s waits longer."
                    )
                if now - said > SAY_EVERY_S:
                    said = now
                    self.log.info(
                        "waiting for %s at %s (%.0f s, learner last heard %.0f s ago%s)",
                        what, self._where, now - started, now - self._last_heard, self._refused(),
                    )  # fmt: skip
                self.lock.wait(0.2)

    def _refused(self) -> str:
        reason = self._refusal.reason if self._refusal else self.handshake_error
        return f"; {reason}" if reason else ""

    def _raise_if_over(self) -> None:
        self.raise_if_failed()
        if self._bye is not None and self._bye.finished:
            raise RunFinished
        refusal = self._refusal
        if refusal is None:
            return
        since = self._refused_since or time.monotonic()
        if not refusal.retry or time.monotonic() - since > REFUSED_FOR_S:
            raise SettingsError(
                f"the learner at {self._where} refuses this sampler: {refusal.reason}"
            )

    # -- on the thread, lock held -----------------------------------------------------------------------------------

    def on_tick(self) -> None:
        """Hello until welcomed, a heartbeat from then on."""
        if not self._welcome:
            # Nobody may have read the last one; an unread queue of them would only grow.
            self._outbox.clear()
            self.post(b"", self.hello)
            return
        beat = Heartbeat(
            sampler_id=self.hello.sampler_id, session=self.hello.session, next_seq=self.next_seq,
            discarded=self.discarded, progress=self._progress, status=self._status,
        )  # fmt: skip
        self.post(b"", beat)
        self._request()  # again: the first one, or the grant, may be lost

    def on_message(self, identity: bytes, message: Message, blob: Blob, payload: bytes) -> None:
        """Take what the learner says."""
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Refuse):
            self._welcome = None
            if message.reason.startswith("unknown session"):
                return  # the learner is new: the next tick says hello
            self._refusal = message
            self._refused_since = self._refused_since or time.monotonic()
        elif isinstance(message, Grant):
            if self._wanted and message.first == self.next_seq:
                self._grant = message  # no late answer to an earlier request
        elif isinstance(message, Heartbeat):
            if message.progress != self._learner_progress:
                self._learner_progress, self._last_heard = (message.progress, time.monotonic())
        elif isinstance(message, Commit):
            self._forget(message.seq)
        elif isinstance(message, Bye):
            if message.session != self._boot_id:
                return  # of a learner before this one: kept by somebody and said again
            self._bye, self._welcome = message, None
            self.log.info("the learner left: %s", message.reason)
        else:
            raise MessageError(f"a learner does not send {type(message).__name__}")

    def _on_welcome(self, welcome: Welcome) -> None:
        """Go on from where the learner is: resend what it has not, make again what was made with weights it has not."""
        if welcome.boot_id != self._boot_id:
            self._boot_id, self.discarded = welcome.boot_id, 0
            self._grant = None  # of a learner that is gone
        self._welcome, self._refusal, self._refused_since, self._bye = (welcome, None, None, None)
        self._last_heard = time.monotonic()
        self._forget(welcome.committed)
        kept = list(itertools.takewhile(lambda pair: self._usable(pair[0]), self._kept))
        if kept and kept[0][0].seq > welcome.next_seq:
            kept = []  # what comes before them is gone; the order of prompts makes all of them again
        if lost := len(self._kept) - len(kept):
            self.discarded += lost
            self._kept = collections.deque(kept)
            self.log.info(
                "%d groups are made again: the learner went back to version %d",
                lost, welcome.start_version,
            )  # fmt: skip
        for header, blob in self._kept:
            if header.seq >= welcome.next_seq:
                self.post(b"", header, blob)
                self.resent += 1
        self.next_seq = self._kept[-1][0].seq + 1 if self._kept else welcome.next_seq
        self._request()

    def _usable(self, header: GroupHeader | GroupDropped) -> bool:
        """False for what was sampled with weights that the learner has not any more."""
        now = self._welcome
        return (
            now is None
            or header.lineage == now.lineage
            or header.policy_version <= now.start_version
        )

    def _forget(self, committed: int) -> None:
        while self._kept and self._kept[0][0].seq < committed:
            self._kept.popleft()

    def _request(self) -> None:
        if not self._wanted or self._grant is not None or self._welcome is None:
            return
        request = Request(sampler_id=self.hello.sampler_id, session=self.hello.session,
                          next_seq=self.next_seq, num_groups=self._wanted)  # fmt: skip
        self.post(b"", request)


def make_hello(sampler_id: int, run_id: str, settings: dict[str, str]) -> Hello:
    """A hello with a session name of its own."""
    return Hello(
        sampler_id=sampler_id,
        session=secrets.token_hex(8),
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        settings=settings,
    )
