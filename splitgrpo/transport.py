"""One ZeroMQ socket on a thread of its own, with signed messages in and out. Imports no torch.

GroupServer (server.py, learner) and GroupClient (client.py, sampler) build on it. ZeroMQ only carries bytes: credit,
acknowledgement and liveness are ours, because a high-water mark bounds nothing and send() says OK for messages that a
killed receiver never gets.
"""

import collections
import logging
import secrets
import socket
import stat
import threading
import time
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from splitgrpo.config import SettingsError
from splitgrpo.files import write_text
from splitgrpo.keys import Curve, Doorkeeper, secure
from splitgrpo.wire import (
    MAX_MESSAGE_BYTES,
    Blob,
    Header,
    Message,
    MessageError,
    printable,
    seal,
    unseal,
)

HEARTBEAT_S = 1.0
LINGER_MS = 1000  # zeromq's default is to hang for ever at exit
HANDSHAKE_MS = 15_000  # a connection that has not said who it is by then is closed
# Messages of one peer held in memory unread; the rest waits in its TCP buffers. zeromq's default of 1000 would let a
# stranger fill 64 GB before the first of them is looked at.
UNREAD_MESSAGES = 16
MAX_KINDS = 60  # of refusals that are counted apart
HANDSHAKE_ADVICE = "it refuses the handshake: give both workers the --curve_key files that were made together, or neither"
KEY_NOT_LET_IN = "key not let in: a CURVE client with another key than the sampler's"
LINES_AT_ONCE, SECONDS_A_LINE = 40, 2.0  # of the log, about what peers sent
HANDSHAKES = (zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
              | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED)  # fmt: skip


def make_key(path: Path) -> bytes:
    """Read the run's signing key, or make one that only its owner can read. The learner calls this."""
    if not path.exists():
        write_text(path, secrets.token_hex(32), mode=0o600)
    return read_key(path)


def read_key(path: Path) -> bytes:
    """Read the run's signing key. Raises SettingsError when it is damaged or others can read it."""
    if not path.exists():
        raise SettingsError(f"{path} is not there: the learner makes it in its --save_path")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise SettingsError(f"{path} can be read by other users, who could then send rollouts: chmod 600 it")  # fmt: skip
    try:
        key = bytes.fromhex(path.read_text().strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise SettingsError(f"{path} is not a key of 64 hex digits: remove it, restart the learner")
    return key


class LogBudget:
    """Lines about what peers do: LINES_AT_ONCE of them, then one in SECONDS_A_LINE; no peer can fill the disk."""

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self.left_out = 0
        self._next = time.monotonic() - LINES_AT_ONCE * SECONDS_A_LINE

    def say(self, level: int, text: str, *args: object) -> None:
        """Log a line, or count it as left out. Text from peers among `args` is escaped and cut."""
        now = time.monotonic()
        self._next = max(self._next, now - LINES_AT_ONCE * SECONDS_A_LINE)
        if self._next > now:
            self.left_out += 1
            return
        self._next += SECONDS_A_LINE
        if self.left_out:
            text, args = text + " (%d other lines left out)", (*args, self.left_out)
            self.left_out = 0
        self.log.log(level, text, *(printable(a) if isinstance(a, str) else a for a in args))


class SocketThread:
    """Owns a socket: receives, checks and hands over messages, sends what others queue.

    Subclasses define `on_message`, `on_tick` (both on the thread, `self.lock` held) and read their state from other
    threads under `self.lock`, a Condition that is notified after every change for which `has_news`.
    """

    def __init__(
        self, socket_type: int, key: bytes, log: logging.Logger, name: str, curve: Curve | None = None
    ) -> None:  # fmt: skip
        """Make a socket that is not bound or connected yet; with `curve` it is encrypted."""
        self.lock = threading.Condition()
        self.key, self.log, self.peer_log = key, log, LogBudget(log)
        self.handshake_error = ""  # of a sampler's last try to connect
        self._peer, self._given_up, self._shaken = "", False, False
        self.invalid: collections.Counter[str] = collections.Counter()
        self.error: BaseException | None = None
        self._outbox: collections.deque[tuple[bytes, bytes]] = collections.deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._woken = False  # and has not looked yet
        self._stop = False
        self._context = zmq.Context()  # made after any fork, ended with this thread
        self._socket = self._context.socket(socket_type)
        self._routed = socket_type == zmq.ROUTER  # the peer's identity stands before each message
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.RCVHWM, UNREAD_MESSAGES)
        self._doorkeeper: Doorkeeper | None = secure(self._socket, curve) if curve else None
        self._handshakes: zmq.Socket | None = None
        if socket_type == zmq.DEALER:
            self._handshakes = self._socket.get_monitor_socket(HANDSHAKES)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- for subclasses, on the thread ---------------------------------------------------------------------------

    def on_message(self, identity: bytes, message: Message, blob: Blob, payload: bytes) -> None:
        """Handle one message whose signature was right."""
        raise NotImplementedError

    def on_tick(self) -> None:
        """Called every HEARTBEAT_S."""
        raise NotImplementedError

    def has_news(self) -> bool:
        """Whether to wake who waits for the lock; asked after every round of messages."""
        return True

    def bind(self, host: str, port: int) -> None:
        """Listen there. Raises zmq.ZMQError, with everything closed."""
        try:
            self._socket.bind(self._endpoint(host, port))
        except zmq.ZMQError:
            self.close_sockets()
            raise

    def connect(self, host: str, port: int) -> None:
        """Connect there; zeromq tries again until somebody listens."""
        self._peer = self._endpoint(host, port)
        self._socket.connect(self._peer)

    def _endpoint(self, host: str, port: int) -> str:
        if ":" not in host:
            return f"tcp://{host}:{port}"
        self._socket.setsockopt(zmq.IPV6, 1)
        return f"tcp://[{host}]:{port}"

    # -- for anybody who holds self.lock --------------------------------------------------------------------------

    def post(self, identity: bytes, header: Header, blob: bytes = b"") -> None:
        """Queue one message; `identity` is b"" on a socket with one peer. Raises MessageError when it is too large."""
        self._outbox.append((identity, seal(self.key, header, blob)))
        self.wake()

    def wake(self) -> None:
        """Make the thread look at its outbox now."""
        if self._woken or threading.current_thread() is self._thread:
            return
        self._woken = True
        try:
            self._wake_in.send(b"x")
        except BlockingIOError:
            pass  # it has hundreds to read; to wait for that with the lock held would be for ever

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

    def close_sockets(self) -> None:
        """Free the port; for the thread, and for a constructor that fails before it is started."""
        if self._handshakes is not None:
            self._socket.disable_monitor()
            self._handshakes.close()  # else the context would wait for it
        self._socket.close()
        if self._doorkeeper is not None:
            self._doorkeeper.socket.close()
        self._context.term()

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
            self.close_sockets()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        if self._doorkeeper is not None:
            poller.register(self._doorkeeper.socket, zmq.POLLIN)
        if self._handshakes is not None:
            poller.register(self._handshakes, zmq.POLLIN)
        next_tick = time.monotonic()
        while True:
            # What would not go out goes out as soon as the peer has read: at the next tick is up to a second late.
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            wait_ms = int(max(0.0, next_tick - time.monotonic()) * 1000)
            events = dict(poller.poll(wait_ms))
            if self._wake_out.fileno() in events:
                self._wake_out.recv(4096)
            with self.lock:
                self._woken = False  # what is queued from here on wakes it again
                door = self._doorkeeper
                if door is not None and door.socket in events and not door.answer():
                    self.count_invalid(KEY_NOT_LET_IN)
                if self._handshakes is not None and self._handshakes in events:
                    self._note_handshake(self._handshakes)
                if events.get(self._socket, 0) & zmq.POLLIN:
                    self._receive()
                if time.monotonic() >= next_tick:
                    if self._given_up:
                        self._connect_again()
                    self.on_tick()
                    next_tick = time.monotonic() + HEARTBEAT_S
                self._flush()
                if self._stop or self.has_news():
                    self.lock.notify_all()
                if self._stop:
                    return

    def _note_handshake(self, monitor: zmq.Socket) -> None:
        event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        if event == zmq.EVENT_DISCONNECTED and self._shaken:
            self._shaken = False  # zeromq connects again by itself
            return
        # Without a handshake before it, it is the only sign of a service that speaks something else.
        ok = self._shaken = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self.handshake_error, self._given_up = "" if ok else HANDSHAKE_ADVICE, not ok

    def _connect_again(self) -> None:
        """libzmq 4.3.5 gives a connection up for good after one failed handshake; the next learner may be the right one."""
        try:
            self._socket.disconnect(self._peer)
        except zmq.ZMQError:
            pass  # it has forgotten the address already
        self._socket.connect(self._peer)
        self._given_up = False

    def _receive(self) -> None:
        for _ in range(64):  # a flood of input must not starve the ticks
            try:
                identity = self._socket.recv(zmq.NOBLOCK) if self._routed else b""
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if self._socket.getsockopt(zmq.RCVMORE):
                    num = 1 + len(self._socket.recv_multipart(zmq.NOBLOCK))
                    raise MessageError(f"wrong number of frames: {num}, expected 1")
                message, blob = unseal(self.key, payload)
                self.on_message(identity, message, blob, payload)
            except MessageError as error:
                self.count_invalid(str(error))

    def count_invalid(self, reason: str) -> None:
        """Count a message that was thrown away; each kind is said aloud the first time and at powers of ten.

        The kind is what stands before the first colon; what follows may come from the peer.
        """
        kind = printable(reason.split(":")[0], 60)
        if len(self.invalid) >= MAX_KINDS and kind not in self.invalid:
            kind = "other"
        self.invalid[kind] += 1
        if str(self.invalid[kind]).strip("0") == "1":
            text = "message dropped (%d so far): %s"
            self.peer_log.say(logging.WARNING, text, self.invalid[kind], reason)

    def _flush(self) -> None:
        while self._outbox:
            identity, payload = self._outbox[0]
            frames = [identity, payload] if self._routed else [payload]
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                return  # not connected yet, or the peer reads slowly
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
            self._outbox.popleft()
