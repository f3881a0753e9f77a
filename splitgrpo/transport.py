"""One ZeroMQ socket on a thread of its own, with signed messages in and out. Imports no torch.

GroupServer (server.py, learner) and GroupClient (client.py, sampler) build on it. ZeroMQ only carries bytes: credit,
acknowledgement and liveness are ours, because a high-water mark bounds nothing and send() says OK for messages that a
killed receiver never gets.
"""

import collections
import logging
import os
import secrets
import socket
import stat
import threading
import time
from pathlib import Path

import zmq

from splitgrpo.config import SettingsError
from splitgrpo.wire import MAX_MESSAGE_BYTES, Header, Message, MessageError, seal, unseal

HEARTBEAT_S = 1.0
LINGER_MS = 1000  # zeromq's default is to hang for ever at exit


def make_key(path: Path) -> bytes:
    """Read the run's signing key, or make one that only its owner can read. The learner calls this."""
    if not path.exists():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
    return read_key(path)


def read_key(path: Path) -> bytes:
    """Read the run's signing key. Raises SettingsError when it is damaged or others can read it."""
    if not path.exists():
        raise SettingsError(f"{path} is not there: the learner makes it in its --save_path")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise SettingsError(
            f"{path} can be read by other users, who could then send rollouts: chmod 600 it"
        )
    try:
        key = bytes.fromhex(path.read_text().strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise SettingsError(f"{path} is not a key of 64 hex digits: remove it, restart the learner")
    return key


class SocketThread:
    """Owns a socket: receives, checks and hands over messages, sends what others queue.

    Subclasses define `on_message`, `on_tick` (both on the thread, `self.lock` held) and read their state from other
    threads under `self.lock`, a Condition that is notified after every change.
    """

    def __init__(self, socket_type: int, key: bytes, log: logging.Logger, name: str) -> None:
        self.lock = threading.Condition()
        self.log = log
        self.key = key
        self.invalid: collections.Counter[str] = collections.Counter()
        self.error: BaseException | None = None
        self._outbox: collections.deque[tuple[bytes, bytes]] = collections.deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._stop = False
        self._context = zmq.Context()  # made after any fork, ended with this thread
        self._socket = self._context.socket(socket_type)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- for subclasses, on the thread ---------------------------------------------------------------------------

    def on_message(self, identity: bytes, message: Message, blob: bytes, payload: bytes) -> None:
        """Handle one message whose signature was right."""
        raise NotImplementedError

    def on_tick(self) -> None:
        """Called every HEARTBEAT_S."""
        raise NotImplementedError

    # -- for anybody who holds self.lock --------------------------------------------------------------------------

    def post(self, identity: bytes, header: Header, blob: bytes = b"") -> None:
        """Queue one message; `identity` is b"" on a socket with one peer. Raises MessageError when it is too large."""
        self._outbox.append((identity, seal(self.key, header, blob)))
        self.wake()

    def wake(self) -> None:
        """Make the thread look at its outbox now."""
        if threading.current_thread() is not self._thread:
            self._wake_in.send(b"x")

    def start(self) -> None:
        """Hand the socket over to the thread; nobody else touches it from here on."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued, close the socket and free the port; waits at most 5 s."""
        with self.lock:
            self._stop = True
            self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def raise_if_failed(self) -> None:
        """Raise in the caller what ended the thread: a hidden dead thread is a run that waits for ever."""
        if self.error is not None:
            raise RuntimeError(f"the socket thread ended: {self.error!r}") from self.error

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            with self.lock:
                self.error = error
                self.lock.notify_all()
        finally:
            self._socket.close()
            self._context.term()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        next_tick = time.monotonic()
        while True:
            wait_ms = int(max(0.0, next_tick - time.monotonic()) * 1000)
            events = dict(poller.poll(wait_ms))
            if self._wake_out.fileno() in events:
                self._wake_out.recv(4096)
            with self.lock:
                if self._socket in events:
                    self._receive()
                if time.monotonic() >= next_tick:
                    self.on_tick()
                    next_tick = time.monotonic() + HEARTBEAT_S
                self._flush()
                self.lock.notify_all()
                if self._stop:
                    return

    def _receive(self) -> None:
        for _ in range(64):  # a flood of input must not starve the ticks
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            identity = frames[0] if self._socket.type == zmq.ROUTER else b""
            body = frames[1:] if self._socket.type == zmq.ROUTER else frames
            try:
                if len(body) != 1:
                    raise MessageError(f"{len(body)} frames, expected 1")
                message, blob = unseal(self.key, body[0])
                self.on_message(identity, message, blob, body[0])
            except MessageError as error:
                self.count_invalid(str(error))

    def count_invalid(self, reason: str) -> None:
        """Count a message that was thrown away; each kind is said aloud the first time and at powers of ten."""
        kind = reason.split(":")[0][:80]
        if len(self.invalid) >= 100 and kind not in self.invalid:
            kind = "other"
        self.invalid[kind] += 1
        if str(self.invalid[kind]).strip("0") == "1":
            self.log.warning("message dropped (%d so far): %s", self.invalid[kind], reason[:300])

    def _flush(self) -> None:
        while self._outbox:
            identity, payload = self._outbox[0]
            frames = [identity, payload] if self._socket.type == zmq.ROUTER else [payload]
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                return  # not connected yet, or the peer reads slowly: tried again at the next tick
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
            self._outbox.popleft()
