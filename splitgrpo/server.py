"""The learner's end of the transport: admits samplers, grants credit, receives groups. Imports no torch.

Credit keeps staleness bounded at its source: at policy version v at most (max_staleness + 1 + v) * groups_per_step groups
are ever accepted or under way, counted over the run.
"""

import collections
import logging
import secrets
import time

import zmq

from splitgrpo.admission import Peer, ServerPlan, refusal
from splitgrpo.config import SettingsError
from splitgrpo.process import port_holder
from splitgrpo.rollout import Group, RolloutError
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
    settings_hash,
    unpack_group,
)

SILENT_S = 15.0  # a sampler beats every HEARTBEAT_S; one that was killed says no goodbye


class GroupServer(SocketThread):
    """Receives groups on a thread of its own; `take` hands them out in order of arrival."""

    def __init__(
        self, host: str, port: int, key: bytes, plan: ServerPlan, log: logging.Logger
    ) -> None:
        """Bind the port. Raises SettingsError when it is taken, naming who holds it where that can be seen."""
        super().__init__(zmq.ROUTER, key, log, "group-server")
        self.plan = plan
        self.next_seq = dict(plan.next_seq)
        self.boot_id = secrets.token_hex(8)
        self.version = plan.start_version
        self.accepted = plan.start_version * plan.groups_per_step
        self.dropped: collections.Counter[str] = collections.Counter()
        self.peers: dict[int, Peer] = {}
        self._digests: dict[int, str] = {}  # of what this learner published
        self.progress = 0
        self.last_progress = time.monotonic()
        self._queue: collections.deque[tuple[Group, bytes]] = collections.deque()
        self._arrivals: list[tuple[GroupHeader, bytes]] = []
        self._settings_hash = settings_hash(plan.settings)
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise SettingsError(
                f"cannot listen on {host}:{port} ({error.strerror}){port_holder(port)}. End that process, or give "
                "another --port to both workers."
            ) from error
        self.start()

    # -- called by the learner's main thread ------------------------------------------------------------------------

    def take(
        self, num_groups: int, version: int, timeout_s: float
    ) -> list[tuple[Group, bytes]] | None:
        """Return `num_groups` groups with their wire bytes, oldest first, or None if they did not come in time.

        A group that is more than max_staleness versions older than `version` is dropped whole and counted.
        """
        deadline = time.monotonic() + timeout_s
        with self.lock:
            self.progress += 1
            while True:
                self.raise_if_failed()
                self._drop_stale(version)
                if len(self._queue) >= num_groups:
                    return [self._queue.popleft() for _ in range(num_groups)]
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self.lock.wait(remaining)

    def take_arrivals(self) -> list[tuple[GroupHeader, bytes]]:
        """What was accepted since the last call, in order of arrival, as received; empty unless plan.journal."""
        with self.lock:
            arrivals, self._arrivals = self._arrivals, []
            return arrivals

    def set_version(self, version: int, adapter_digest: str) -> None:
        """Tell the samplers that adapter `version` is published; raises the credit."""
        with self.lock:
            self.version = version
            self._digests[version] = adapter_digest
            self._grant()

    def bump(self) -> None:
        """Say that the main thread is alive (samplers watch it)."""
        with self.lock:
            self.progress += 1
            self.last_progress = time.monotonic()  # waiting for data starts only after work ends

    def idle_s(self) -> float:
        """Seconds since any sampler last did something."""
        with self.lock:
            return time.monotonic() - self.last_progress

    def describe(self) -> str:
        """One phrase on what the samplers do, for a log line while waiting."""
        with self.lock:
            if not self.peers:
                return "no sampler has connected yet"
            now = time.monotonic()
            return "; ".join(
                f"sampler {i}: {p.status or 'connected'}, last heard {now - p.last_seen:.0f} s ago"
                for i, p in sorted(self.peers.items())
            )

    def close(self, *, finished: bool, reason: str) -> None:
        """Say goodbye to every sampler and free the port."""
        with self.lock:
            for peer in self.peers.values():
                bye = Bye(sampler_id=0, session=self.boot_id, finished=finished, reason=reason)
                self.post(peer.identity, bye)
        self.stop()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        """Heartbeat to every sampler; those that are gone are let go."""
        self._forget_the_gone()
        beat = Heartbeat(
            sampler_id=0,
            session=self.boot_id,
            progress=self.progress,
            status=f"version {self.version}",
        )
        for peer in self.peers.values():
            self.post(peer.identity, beat)

    def on_message(self, identity: bytes, message: Message, blob: bytes, payload: bytes) -> None:
        """Route one signed message; all but a hello need a session that was welcomed."""
        if isinstance(message, Hello):
            self._welcome(identity, message)
            return
        if not isinstance(message, Request | Heartbeat | GroupHeader | Bye):
            raise MessageError(f"a sampler does not send {type(message).__name__}")
        peer = self.peers.get(message.sampler_id)
        if peer is None or peer.session != message.session:
            self.post(identity, Refuse(reason="unknown session: say hello", retry=True))
            return
        peer.identity, peer.last_seen = identity, time.monotonic()
        if isinstance(message, Request):
            peer.wanted = message.num_groups
            self._grant()
        elif isinstance(message, Heartbeat):
            if message.progress > peer.progress:
                peer.progress, peer.last_progress = message.progress, time.monotonic()
                self.last_progress = peer.last_progress
            peer.status = message.status
        elif isinstance(message, GroupHeader):
            self._receive_group(peer, message, blob, payload)
        else:
            self.log.info("sampler %d left: %s", message.sampler_id, message.reason)
            del self.peers[message.sampler_id]
            self._grant()

    def _forget_the_gone(self) -> None:
        """Take back the credit of samplers that died or hang, or the living would wait for it for ever."""
        now = time.monotonic()
        for sampler_id, peer in list(self.peers.items()):
            idle_s = max(
                now - peer.last_progress - self.plan.peer_timeout_s, now - peer.last_seen - SILENT_S
            )
            if idle_s > 0:
                self.log.warning(
                    "sampler %d is gone (last heard %.0f s ago, last at work %.0f s ago): its %d groups are granted again",
                    sampler_id, now - peer.last_seen, now - peer.last_progress, peer.outstanding,
                )  # fmt: skip
                del self.peers[sampler_id]
        self._grant()

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        old = self.peers.get(hello.sampler_id)
        refused = refusal(self.plan, hello, old)
        if refused is not None:
            self.post(identity, refused)
            self.log.warning("sampler %d refused: %s", hello.sampler_id, refused.reason)
            return
        next_seq = old.next_seq if old else self.next_seq.get(hello.sampler_id, 0)
        self.next_seq[hello.sampler_id] = next_seq
        self.peers[hello.sampler_id] = Peer(identity, hello.session, next_seq)
        if old is None:
            self.log.info("sampler %d joined, goes on from group %d", hello.sampler_id, next_seq)
        welcome = Welcome(next_seq=next_seq, policy_version=self.version, boot_id=self.boot_id)
        self.post(identity, welcome)
        self.last_progress = time.monotonic()

    def _receive_group(self, peer: Peer, header: GroupHeader, blob: bytes, payload: bytes) -> None:
        if header.seq < peer.next_seq:  # a repeat after a reconnect: it is with us already
            self.post(peer.identity, Ack(seq=peer.next_seq - 1))
            return
        if header.seq > peer.next_seq:  # a gap: ask for what is missing
            welcome = Welcome(
                next_seq=peer.next_seq, policy_version=self.version, boot_id=self.boot_id
            )
            self.post(peer.identity, welcome)
            return
        peer.outstanding = max(0, peer.outstanding - 1)
        peer.next_seq += 1
        self.next_seq[header.sampler_id] = peer.next_seq
        self.last_progress = time.monotonic()
        self.post(peer.identity, Ack(seq=header.seq))
        try:
            group = unpack_group(header, blob)
            self._admit(group, header)
        except (MessageError, RolloutError) as error:
            self.dropped["invalid"] += 1
            self.log.warning("group %d:%d dropped: %s", header.sampler_id, header.seq, error)
        else:
            self.accepted += 1
            self._queue.append((group, payload))
            if self.plan.journal:
                self._arrivals.append((header, blob))
        self._grant()

    def _admit(self, group: Group, header: GroupHeader) -> None:
        plan = self.plan
        if header.run_id != plan.run_id or header.settings_hash != self._settings_hash:
            raise MessageError("of another run or made under other settings")
        if group.lineage != plan.lineage and group.policy_version > plan.start_version:
            raise MessageError(
                f"sampled by version {group.policy_version} of lineage {group.lineage}, whose weights were "
                f"rolled back to version {plan.start_version}"
            )
        if group.policy_version > self.version:
            raise MessageError(
                f"version {group.policy_version} is not published yet (at {self.version})"
            )
        if self._digests.get(group.policy_version, group.adapter_digest) != group.adapter_digest:
            raise MessageError(
                f"sampled with adapter {group.adapter_digest[:12]}…, which is not version {group.policy_version}"
            )
        if self._capacity() <= 0:
            raise MessageError("sent without credit")
        plan.check_group(group)

    def _capacity(self) -> int:
        plan = self.plan
        steps = min(self.version + plan.max_staleness + 1, plan.max_steps)
        limit = steps * plan.groups_per_step
        return limit - self.accepted - sum(p.outstanding for p in self.peers.values())

    def _grant(self) -> None:
        for peer in self.peers.values():
            num = min(peer.wanted, self._capacity())
            if num > 0:
                peer.wanted = 0
                peer.outstanding += num
                self.post(peer.identity, Grant(num_groups=num, policy_version=self.version))

    def _drop_stale(self, version: int) -> None:
        oldest = version - self.plan.max_staleness
        kept = [item for item in self._queue if item[0].policy_version >= oldest]
        if num := len(self._queue) - len(kept):
            self._queue = collections.deque(kept)
            self.dropped["stale"] += num
            self.accepted -= num
            self.log.warning("%d groups dropped: sampled by a version before %d", num, oldest)
            self._grant()
