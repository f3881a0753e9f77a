"""How many groups each sampler may make, and what is owed by those that went. Imports no torch.

Credit keeps staleness bounded at its source: at policy version v at most (max_staleness + 1 + v) * groups_per_step groups
are ever accepted or under way, counted over the run. Every group that was granted is received, or counted in `lost`: at
once when its sampler starts anew, at the end of the run when its sampler left, died or hangs and never came back.
"""

import time
from dataclasses import dataclass, field

from splitgrpo.admission import Peer, ServerPlan
from splitgrpo.wire import Heartbeat, printable


@dataclass
class Credit:
    """The books of one learner; whoever calls holds its lock.

    accepted  groups received that a step was or can be taken on
    lost      granted to a sampler that died, or sampled with weights that were rolled back
    peers     samplers that are there, `gone` those whose credit was granted to others
    """

    plan: ServerPlan
    version: int
    accepted: int
    lost: int
    peers: dict[int, Peer] = field(default_factory=dict)
    gone: dict[int, Peer] = field(default_factory=dict)
    over: bool = False  # the run is complete

    def room(self) -> int:
        """Groups that may still be granted; below 0 while some that came again are received beside granted ones."""
        if self.over:
            return 0
        steps = min(self.version + self.plan.max_staleness + 1, self.plan.max_steps)
        under_way = sum(p.outstanding for p in self.peers.values())
        return steps * self.plan.groups_per_step - self.accepted - under_way

    def share(self) -> list[tuple[int, Peer]]:
        """Hand out what room there is to samplers that have asked; returns those that got some, and their ids."""
        room, served = self.room(), []
        # Whoever was served longest ago comes first, or scarce credit would go to the same few for ever.
        for sampler_id, peer in sorted(self.peers.items(), key=lambda pair: pair[1].granted_at):
            # What it has made without credit needs credit first.
            have = max(peer.granted_to, peer.next_seq)
            num = min(peer.sent + peer.wanted - have, room)
            if num > 0:
                room -= num
                peer.granted_at, peer.granted_to = time.monotonic(), have + num
                peer.told_to = max(peer.told_to, peer.granted_to)
                served.append((sampler_id, peer))
        return served

    def enter(self, sampler_id: int, peer: Peer) -> bool:
        """A sampler says hello, for the first time or again; returns whether it was away."""
        away = sampler_id not in self.peers
        before = self.peers.get(sampler_id) or self.gone.pop(sampler_id, None)
        if before is not None and before.session == peer.session:
            # Its main thread may be at work on what it was granted before.
            peer.discarded, peer.told_to = before.discarded, before.told_to
        elif before is not None:
            self.lost += before.missing
        self.peers[sampler_id] = peer
        return away

    def hear(self, peer: Peer, beat: Heartbeat) -> None:
        """Note what a sampler says of itself."""
        if beat.progress > peer.progress:
            peer.progress, peer.last_progress = beat.progress, time.monotonic()
        self.lost += max(0, beat.discarded - peer.discarded)
        peer.discarded, peer.sent, peer.status = beat.discarded, beat.next_seq, beat.status

    def describe(self) -> str:
        """One phrase on what the samplers do."""
        if not self.peers:
            return "no sampler has connected yet" if not self.gone else "all samplers are gone"
        now = time.monotonic()
        return "; ".join(
            f"sampler {i}: {printable(p.status) or 'connected'}, last heard {now - p.last_seen:.0f} s ago"
            for i, p in sorted(self.peers.items())
        )

    def leave(self, sampler_id: int) -> None:
        """Take back the credit of a sampler; what it was granted can still come, should it be back."""
        self.gone[sampler_id] = self.peers.pop(sampler_id)

    def silent(self, silent_s: float) -> list[tuple[int, Peer]]:
        """Samplers not heard for `silent_s` or without progress for plan.peer_timeout_s: the others would wait for them."""
        now = time.monotonic()
        return [
            (sampler_id, peer)
            for sampler_id, peer in self.peers.items()
            if now - peer.last_seen > silent_s
            or now - peer.last_progress > self.plan.peer_timeout_s
        ]

    def settle(self) -> None:
        """The run is over: what was granted and has not come is lost. Nothing more is granted or received."""
        self.over = True
        for peer in (*self.peers.values(), *self.gone.values()):
            self.lost += peer.missing
            peer.granted_to = peer.told_to = peer.next_seq
