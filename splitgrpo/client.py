"""The sampler's end of the transport: says hello, waits for credit, sends groups until they are acknowledged. No torch."""

import collections
import logging
import secrets
import time
from collections.abc import Callable

import zmq

from splitgrpo import SCHEMA_VERSION
from splitgrpo.config import PeerTimeout, SettingsError
from splitgrpo.rollout import Group
from splitgrpo.transport import SocketThread
from splitgrpo.wire import (
    Ack,
    Bye,
    Grant,
    GroupHeader,
    Heartbeat,
    Hello,
    Message,
    MessageError,
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
    ) -> None:
        """Connect (zeromq retries until the learner is there) and say hello every second until welcomed."""
        super().__init__(zmq.DEALER, key, log, "group-client")
        self.hello = hello
        self.next_seq = 0
        self.resent = 0
        self._progress = 0
        self._status = "starting"
        self._unacked: collections.deque[tuple[GroupHeader, bytes]] = collections.deque()
        self._welcomed = False
        self._wanted = 0
        self._grant: Grant | None = None
        self._refusal: Refuse | None = None
        self._refused_since: float | None = None
        self._bye: Bye | None = None
        self._learner_progress = -1
        self._last_heard = time.monotonic()  # when the learner's main thread last moved
        self._settings_hash = settings_hash(hello.settings)
        self._wait_timeout_s = wait_timeout_s
        self._check_stop = check_stop
        self._where = f"{address[0]}:{address[1]}"
        self._socket.connect(f"tcp://{self._where}")
        self.start()

    # -- called by the sampler's main thread ------------------------------------------------------------------------

    def wait_grant(self, num_groups: int) -> tuple[int, int]:
        """Ask for credit for up to `num_groups` groups and wait for it.

        Returns how many may be sampled now (their sequence numbers start at `next_seq`) and the least policy version
        they may be sampled with. Raises Stopped, RunFinished, SettingsError when refused, PeerTimeout.
        """
        with self.lock:
            self._wanted, self._grant = num_groups, None
            if self._welcomed:
                self._request()
        self._wait("credit from the learner", lambda: self._grant is not None)
        with self.lock:
            assert self._grant is not None
            grant, self._grant = self._grant, None
            return grant.num_groups, grant.policy_version

    def send(self, group: Group) -> bool:
        """Queue one group; it is kept until acknowledged. False if a restarted learner wants another one first.

        Raises MessageError for a group above the size cap.
        """
        header, blob = pack_group(group, self.hello.session, self._settings_hash)
        with self.lock:
            self.raise_if_failed()
            if group.seq != self.next_seq:
                return False
            if self._welcomed:
                self.post(b"", header, blob)
            self._unacked.append((header, blob))
            self.next_seq += 1
            return True

    def drain(self) -> None:
        """Wait until every group was acknowledged. Raises as `wait_grant` does."""
        self._wait("acknowledgement of the last groups", lambda: not self._unacked)

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
            with self.lock:
                self._check_stop()
                self._raise_if_over()
                if ready():
                    return
                now = time.monotonic()
                silent_s = now - max(self._last_heard, started)
                if silent_s > self._wait_timeout_s:
                    raise PeerTimeout(
                        f"no sign of life from a learner at {self._where} for {silent_s:.0f} s while waiting for "
                        f"{what}. See learner.log or the learner's terminal; --wait_timeout_s waits longer."
                    )
                if now - said > SAY_EVERY_S:
                    said = now
                    self.log.info(
                        "waiting for %s at %s (%.0f s, learner last heard %.0f s ago)",
                        what, self._where, now - started, now - self._last_heard,
                    )  # fmt: skip
                self.lock.wait(0.2)

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
        if not self._welcomed:
            # Nobody may have read the last one; an unread queue of them would only grow.
            self._outbox.clear()
            self.post(b"", self.hello)
            return
        beat = Heartbeat(sampler_id=self.hello.sampler_id, session=self.hello.session,
                         progress=self._progress, status=self._status)  # fmt: skip
        self.post(b"", beat)

    def on_message(self, identity: bytes, message: Message, blob: bytes, payload: bytes) -> None:
        """Take what the learner says."""
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Refuse):
            self._welcomed = False
            if message.reason.startswith("unknown session"):
                return  # the learner is new: the next tick says hello
            self._refusal = message
            self._refused_since = self._refused_since or time.monotonic()
        elif isinstance(message, Grant):
            self._wanted, self._grant = 0, message
        elif isinstance(message, Heartbeat):
            if message.progress != self._learner_progress:
                self._learner_progress, self._last_heard = (message.progress, time.monotonic())
        elif isinstance(message, Ack):
            while self._unacked and self._unacked[0][0].seq <= message.seq:
                self._unacked.popleft()
        elif isinstance(message, Bye):
            self._bye, self._welcomed = message, False
            self.log.info("the learner left: %s", message.reason)
        else:
            raise MessageError(f"a learner does not send {type(message).__name__}")

    def _on_welcome(self, welcome: Welcome) -> None:
        self._welcomed, self._refusal, self._refused_since, self._bye = (True, None, None, None)
        self._last_heard = time.monotonic()
        while self._unacked and self._unacked[0][0].seq < welcome.next_seq:
            self._unacked.popleft()
        if self._unacked and self._unacked[0][0].seq > welcome.next_seq:
            # A learner that came back from a checkpoint wants groups again that were acknowledged: the prompt is a
            # function of the sequence number, so they are made again.
            self._unacked.clear()
        for header, blob in self._unacked:
            self.post(b"", header, blob)
            self.resent += 1
        self.next_seq = self._unacked[-1][0].seq + 1 if self._unacked else welcome.next_seq
        if self._wanted:
            self._request()

    def _request(self) -> None:
        request = Request(sampler_id=self.hello.sampler_id, session=self.hello.session,
                          num_groups=self._wanted)  # fmt: skip
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
