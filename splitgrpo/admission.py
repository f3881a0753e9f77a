"""Which samplers a learner lets in, and what it holds them to. Imports no torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from splitgrpo import SCHEMA_VERSION
from splitgrpo.config import disagreements
from splitgrpo.rollout import Group
from splitgrpo.transport import HEARTBEAT_S
from splitgrpo.wire import Hello, Refuse


@dataclass(frozen=True)
class ServerPlan:
    """What the learner holds its samplers to.

    settings         of config.agreed_settings; a sampler that differs is refused
    groups_per_step  groups of one optimizer step; never more than max_steps of them are wanted
    start_version    policy version (optimizer steps) at this start; groups of another lineage must not be newer
    next_seq         {sampler_id: first sequence number still wanted}
    peer_timeout_s   a sampler that makes no progress for so long gives back its credit
    check_group      raises RolloutError for a group whose values cannot be trained on
    journal          keep what arrives for `GroupServer.take_arrivals`
    """

    run_id: str
    lineage: int
    settings: dict[str, str]
    groups_per_step: int
    max_staleness: int
    max_steps: int
    start_version: int
    next_seq: dict[int, int]
    peer_timeout_s: float
    check_group: Callable[[Group], None]
    journal: bool = False


@dataclass
class Peer:
    """One sampler as the learner sees it."""

    identity: bytes
    session: str
    next_seq: int
    outstanding: int = 0  # groups granted, not yet received
    wanted: int = 0  # groups asked for, not yet granted
    last_seen: float = field(default_factory=time.monotonic)
    last_progress: float = field(default_factory=time.monotonic)
    progress: int = -1
    status: str = ""


def refusal(plan: ServerPlan, hello: Hello, old: Peer | None) -> Refuse | None:
    """Why a sampler is not let in, or None; `old` is the peer that has its sampler_id now."""
    if hello.schema_version != SCHEMA_VERSION:
        text = f"record schema: learner {SCHEMA_VERSION}, sampler {hello.schema_version}"
        return Refuse(reason=text, retry=False)
    if hello.run_id != plan.run_id:
        text = f"run id: learner {plan.run_id}, sampler {hello.run_id}: start it with this run's --lora_path"
        return Refuse(reason=text, retry=False)
    if differing := disagreements(plan.settings, hello.settings):
        text = "settings differ: " + "; ".join(differing) + ". Give both the same value."
        return Refuse(reason=text, retry=False)
    silent_s = time.monotonic() - old.last_seen if old else 0.0
    if old and old.session != hello.session and silent_s < 3 * HEARTBEAT_S:
        text = f"sampler_id {hello.sampler_id} is in use by a sampler that is alive: give this one another --sampler_id"
        return Refuse(reason=text, retry=True)
    return None
