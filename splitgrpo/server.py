"""The learner's end of the transport: admits samplers, tells them their credit, receives groups. Imports no torch."""

import collections
import logging
import secrets
import time

import zmq

from splitgrpo import wire
from splitgrpo.admission import ForeignGroup, Peer, ServerPlan, check_origin, refusal
from splitgrpo.arrivals import Dropped, GroupQueue, Trained
from splitgrpo.credit import Credit
from splitgrpo.keys import Curve
from splitgrpo.process import port_trouble
from splitgrpo.rollout import RolloutError
from splitgrpo.transport import SocketThread
from splitgrpo.wire import Blob

SILENT_S = 5.0  # a sampler beats every HEARTBEAT_S; one that was killed says no goodbye
FAREWELL_S = 2.0  # a sampler that misses it would wait for wait_timeout_s
ASK_AGAIN_S = 0.5  # what is lost on the way is asked for once in so long


class GroupServer(SocketThread):
    """Receives groups on a thread of its own; `take` hands them out in order of arrival."""

    def __init__(
        self, host: str, port: int, key: bytes, plan: ServerPlan, log: logging.Logger, curve: Curve | None = None
    ) -> None:  # fmt: skip
        """Bind the port. Raises SettingsError when it is taken, naming who holds it where that can be seen."""
        super().__init__(zmq.ROUTER, key, log, "group-server", curve)
        self.plan = plan
        self.next_seq = dict(plan.cursor)  # of every sampler that was ever here
        self.committed = dict(plan.cursor)
        self.boot_id = secrets.token_hex(8)
        trained = plan.start_version * plan.groups_per_step
        self.credit = Credit(plan, plan.start_version, accepted=trained, lost=plan.lost)
        self.peers = self.credit.peers
        self._digests = dict(plan.old_digests)
        self.progress = 0
        self.last_progress = time.monotonic()
        self._queue = GroupQueue(plan.cursor)
        self._queue.dropped.update(plan.dropped)
        self._awaited = 0  # groups that `take` waits for
        self._farewell: wire.Bye | None = None
        self._arrivals: list[tuple[wire.GroupHeader, Blob]] = []
        self._settings_hash = wire.settings_hash(plan.settings)
        try:
            self.bind(host, port)
        except zmq.ZMQError as error:
            raise port_trouble(host, port, error.strerror) from error
        self.start()

    # -- called by the learner's main thread ------------------------------------------------------------------------

    def take(self, num_groups: int, version: int, timeout_s: float) -> list[Trained] | None:
        """Return `num_groups` groups, oldest first, or None if they did not come in time.

        A group that is more than max_staleness versions older than `version` is dropped whole and counted.
        """
        deadline = time.monotonic() + timeout_s
        with self.lock:
            self.progress += 1
            while True:
                self.raise_if_failed()
                self._drop_stale(version)
                if (taken := self._queue.take(num_groups)) is not None:
                    return taken
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._awaited = num_groups
                self.lock.wait(remaining)
                self._awaited = 0

    @property
    def version(self) -> int:
        """Policy version that was published last."""
        return self.credit.version

    @property
    def lost(self) -> int:
        """Groups that were granted and will not come, or came from weights that were rolled back; see credit.py."""
        return self.credit.lost

    @property
    def dropped(self) -> collections.Counter[str]:
        """Groups that had a step passed over them, by reason."""
        return self._queue.dropped

    def take_fates(self) -> list[Dropped]:
        """What was dropped since the last call, in the order of arrival."""
        with self.lock:
            return self._queue.take_fates()

    def cursor(self) -> dict[int, int]:
        """{sampler: sequence number of its first group without a fate}; changes in `take` and `finish` only."""
        return dict(self._queue.cursor)

    def commit(self, cursor: dict[int, int]) -> None:
        """A checkpoint holds what became of every group below `cursor`: the samplers may forget them."""
        with self.lock:
            self.committed = cursor
            for sampler_id, peer in self.peers.items():
                self.post(peer.identity, wire.Commit(seq=cursor.get(sampler_id, 0)))

    def finish(self) -> None:
        """No more steps: what still waits is dropped as unused, what was granted and has not come is lost."""
        with self.lock:
            self.credit.settle()
            self._queue.finish()

    def take_arrivals(self) -> list[tuple[wire.GroupHeader, Blob]]:
        """What was accepted since the last call, in order of arrival, as received; empty unless plan.journal."""
        with self.lock:
            arrivals, self._arrivals = self._arrivals, []
            return arrivals

    def expect(self, version: int, adapter_digest: str) -> None:
        """Take groups of adapter `version`, which is about to be published."""
        with self.lock:
            self._digests[version] = adapter_digest

    def set_version(self, version: int, adapter_digest: str) -> None:
        """Tell the samplers that adapter `version` is published; raises the credit."""
        with self.lock:
            self.credit.version, oldest = version, version - self.plan.max_staleness
            self._digests[version] = adapter_digest  # those before `oldest` are dropped as stale
            self._digests = {v: d for v, d in self._digests.items() if v >= oldest}
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
            return self.credit.describe()

    def close(self, *, finished: bool, reason: str) -> None:
        """Say goodbye to every sampler and free the port; the end of a run is said until all have left, or FAREWELL_S."""
        bye = wire.Bye(sampler_id=0, session=self.boot_id, finished=finished, reason=reason)
        with self.lock:
            self._farewell, self._awaited = bye, 0
            for peer in self.peers.values():
                self.post(peer.identity, bye)
            if finished:
                self.lock.wait_for(lambda: self.error or not self.peers, FAREWELL_S)
        self.stop()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """Not while a step's groups are not complete: to wake for each costs as much as to check it."""
        return self._queue.num_groups >= self._awaited

    def on_tick(self) -> None:
        """Heartbeat to every sampler; take back the credit of those that died or hang, which the living wait for."""
        now = time.monotonic()
        for sampler_id, peer in self.credit.silent(SILENT_S):
            self.peer_log.say(
                logging.WARNING,
                "sampler %d is gone (last heard %.0f s ago, last at work %.0f s ago): its %d groups are granted again",
                sampler_id, now - peer.last_seen, now - peer.last_progress, peer.outstanding,
            )  # fmt: skip
            self.credit.leave(sampler_id)
        self._grant()
        beat = wire.Heartbeat(
            sampler_id=0, session=self.boot_id, next_seq=0, discarded=0,
            progress=self.progress, status=f"version {self.version}",
        )  # fmt: skip
        for peer in self.peers.values():
            self.post(peer.identity, beat)

    def on_message(
        self, identity: bytes, message: wire.Message, blob: Blob, payload: bytes
    ) -> None:
        """Route one signed message; all but a hello need a session that was welcomed."""
        if self._farewell is not None and not isinstance(message, wire.Bye):
            self.post(identity, self._farewell)  # the first one may be lost
            return
        if isinstance(message, wire.Hello):
            self._welcome(identity, message)
            return
        if isinstance(message, wire.Welcome | wire.Refuse | wire.Grant | wire.Commit):
            raise wire.MessageError(f"a sampler does not send {type(message).__name__}")
        peer = self.peers.get(message.sampler_id)
        if peer is None or peer.session != message.session:
            self.invalid["unknown session"] += 1
            self.post(identity, wire.Refuse(reason="unknown session: say hello", retry=True))
            return
        peer.identity, peer.last_seen = identity, time.monotonic()
        if isinstance(message, wire.Request):
            peer.wanted, peer.sent = message.num_groups, message.next_seq
            self._post_grant(peer)  # again: the first one may be lost
            self._grant()
        elif isinstance(message, wire.Heartbeat):
            self.credit.hear(peer, message)
            self.last_progress = max(self.last_progress, peer.last_progress)
            if peer.sent > peer.next_seq:
                self._ask_again(peer, message.sampler_id)
        elif isinstance(message, wire.GroupHeader | wire.GroupDropped):
            self._receive_group(peer, message, blob, payload)
        else:
            left = "sampler %d left: %s"
            self.peer_log.say(logging.INFO, left, message.sampler_id, message.reason)
            self.credit.leave(message.sampler_id)
            self._grant()

    def _welcome(self, identity: bytes, hello: wire.Hello) -> None:
        old = self.peers.get(hello.sampler_id)
        refused = refusal(self.plan, hello, old, self.next_seq)
        if refused is not None:
            self.post(identity, refused)
            self.invalid["hello refused"] += 1
            text = "sampler %d refused: %s"
            self.peer_log.say(logging.WARNING, text, hello.sampler_id, refused.reason)
            return
        next_seq = self.next_seq.setdefault(hello.sampler_id, 0)
        peer = Peer(identity, hello.session, next_seq)
        if self.credit.enter(hello.sampler_id, peer):
            joined = "sampler %d joined, goes on from group %d"
            self.peer_log.say(logging.INFO, joined, hello.sampler_id, next_seq)
        self._post_welcome(peer, hello.sampler_id)
        self.last_progress = time.monotonic()

    def _post_welcome(self, peer: Peer, sampler_id: int) -> None:
        peer.asked_at, peer.waiting = time.monotonic(), False
        welcome = wire.Welcome(
            next_seq=peer.next_seq, committed=self.committed.get(sampler_id, 0), boot_id=self.boot_id,
            lineage=self.plan.lineage, start_version=self.plan.start_version,
        )  # fmt: skip
        self.post(peer.identity, welcome)

    def _ask_again(self, peer: Peer, sampler_id: int) -> None:
        if not peer.waiting and time.monotonic() - peer.asked_at > ASK_AGAIN_S:
            self._post_welcome(peer, sampler_id)

    def _receive_group(
        self, peer: Peer, header: wire.GroupHeader | wire.GroupDropped, blob: Blob, payload: bytes
    ) -> None:
        if header.seq > peer.next_seq:  # one before it was lost on the way
            self._ask_again(peer, header.sampler_id)
        if header.seq != peer.next_seq:  # or it is with us already
            return
        if peer.outstanding == 0 and self.credit.room() <= 0:
            # Made before a restart of one of us: asked for again when there is room.
            peer.waiting, peer.sent = True, max(peer.sent, header.seq + 1)
            return
        peer.next_seq += 1
        self.next_seq[header.sampler_id] = peer.next_seq
        self.last_progress = time.monotonic()
        if isinstance(header, wire.GroupDropped):
            reason: str | None = header.reason
        else:
            reason = self._line_up(header, blob, payload)
        if reason is not None:  # else no more room than before
            self._queue.drop(header.sampler_id, header.seq, reason)
            self._grant()

    def _line_up(self, header: wire.GroupHeader, blob: Blob, payload: bytes) -> str | None:
        """Check one group and put it in line; returns why it is dropped instead."""
        try:
            check_origin(self.plan, header, self._settings_hash, self.version, self._digests)
            group = wire.unpack_group(header, blob)
            self.plan.check_group(group)
        except (ForeignGroup, wire.MessageError, RolloutError) as error:
            dropped = "group %d:%d dropped: %s"
            self.peer_log.say(logging.WARNING, dropped, header.sampler_id, header.seq, str(error))
            return "foreign" if isinstance(error, ForeignGroup) else "malformed"
        self.credit.accepted += 1
        self._queue.put(group, payload)
        if group.policy_version < self.version - self.plan.max_staleness:
            self._awaited = 0  # `take` drops it and grants its place again
        if self.plan.journal:
            self._arrivals.append((header, blob))
        return None

    def _grant(self) -> None:
        for sampler_id, peer in self.credit.share():
            if peer.waiting:
                self._post_welcome(peer, sampler_id)
            self._post_grant(peer)

    def _post_grant(self, peer: Peer) -> None:
        if peer.granted_to <= peer.sent:
            return
        peer.wanted = 0
        grant = wire.Grant(
            first=peer.sent, num_groups=peer.granted_to - peer.sent,
            lineage=self.plan.lineage, policy_version=self.version,
        )  # fmt: skip
        self.post(peer.identity, grant)

    def _drop_stale(self, version: int) -> None:
        oldest = version - self.plan.max_staleness
        if num := self._queue.expire(oldest):
            self.credit.accepted -= num
            self.log.warning("%d groups dropped: sampled by a version before %d", num, oldest)
            self._grant()
