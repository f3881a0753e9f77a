"""Which samplers a learner lets in, and what it holds them to. Imports no torch."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from splitgrpo import SCHEMA_VERSION
from splitgrpo.config import disagreements
from splitgrpo.rollout import Group
from splitgrpo.transport import HEARTBEAT_S
from splitgrpo.wire import GroupHeader, Hello, Refuse, printable

MAX_SAMPLERS = 256  # ids in one run; each is remembered, so that no group is trained twice


class ForeignGroup(ValueError):
    """A group of another run, other settings or weights that this learner did not publish."""


@dataclass(frozen=True)
class ServerPlan:
    """What the learner holds its samplers to.

    settings         of config.agreed_settings; a sampler that differs is refused
    groups_per_step  groups of one optimizer step; never more than max_steps of them are wanted
    start_version    policy version (optimizer steps) at this start; groups of another lineage must not be newer
    old_digests      {version: sha256} of the adapters, up to that, which groups made before this start may be of
    cursor           {sampler_id: sequence number of its first group that has no fate yet}
    peer_timeout_s   a sampler that makes no progress for so long gives back its credit
    check_group      raises RolloutError for a group whose values cannot be trained on
    dropped, lost    groups counted before this start
    journal          keep what arrives for `GroupServer.take_arrivals`
    """

    run_id: str
    lineage: int
    settings: dict[str, str]
    groups_per_step: int
    max_staleness: int
    max_steps: int
    start_version: int
    cursor: dict[int, int]
    peer_timeout_s: float
    check_group: Callable[[Group], None]
    dropped: Mapping[str, int] = field(default_factory=dict)
    lost: int = 0
    old_digests: Mapping[int, str] = field(default_factory=dict)
    journal: bool = False


@dataclass
class Peer:
    """One sampler as the learner sees it."""

    identity: bytes
    session: str
    next_seq: int
    granted_to: int = 0  # it has credit for the groups before this one
    told_to: int = (
        0  # it was told to make those before this one, though the credit may be others' by now
    )
    sent: int = 0  # groups it has made, as it said itself
    wanted: int = 0  # groups asked for beyond these, not yet granted
    waiting: bool = False  # some of them had no room yet
    discarded: int = 0  # as it said itself
    granted_at: float = 0.0
    asked_at: float = 0.0
    last_seen: float = field(default_factory=time.monotonic)
    last_progress: float = field(default_factory=time.monotonic)
    progress: int = -1
    status: str = ""

    @property
    def outstanding(self) -> int:
        """Groups that it has credit for, not yet received."""
        return max(0, self.granted_to - self.next_seq)

    @property
    def missing(self) -> int:
        """Groups that it was told to make, not yet received."""
        return max(0, self.told_to - self.next_seq)


def refusal(
    plan: ServerPlan, hello: Hello, old: Peer | None, known: Collection[int]
) -> Refuse | None:
    """Why a sampler is not let in, or None; `old` has its sampler_id now, `known` are the ids of all that ever joined."""
    if hello.schema_version != SCHEMA_VERSION:
        text = f"record schema: learner {SCHEMA_VERSION}, sampler {hello.schema_version}"
        return Refuse(reason=text, retry=False)
    if hello.run_id != plan.run_id:
        text = f"run id: learner {plan.run_id}, sampler {printable(hello.run_id, 64)}: start it with this run's --lora_path"
        return Refuse(reason=text, retry=False)
    if differing := disagreements(plan.settings, hello.settings):
        # Cut: a reason above the cap of a Text would not be read.
        text = "settings differ: " + printable("; ".join(differing), 2000)
        return Refuse(reason=text + ". Give both the same value.", retry=False)
    if hello.sampler_id not in known and len(known) >= MAX_SAMPLERS:
        text = f"{MAX_SAMPLERS} samplers took part already: use the --sampler_id of one that ended"
        return Refuse(reason=text, retry=False)
    silent_s = time.monotonic() - old.last_seen if old else 0.0
    if old and old.session != hello.session and silent_s < 3 * HEARTBEAT_S:
        text = f"sampler_id {hello.sampler_id} is in use by a sampler that is alive: give this one another --sampler_id"
        return Refuse(reason=text, retry=True)
    return None


def check_origin(
    plan: ServerPlan, header: GroupHeader, settings_hash: str, version: int, digests: dict[int, str]
) -> None:
    """Refuse a group that this run, now at `version`, did not ask for. `digests` {version: sha256} of all its adapters.

    Raises ForeignGroup.
    """
    if header.schema_version != SCHEMA_VERSION:
        raise ForeignGroup(f"record schema {header.schema_version}, expected {SCHEMA_VERSION}")
    if header.run_id != plan.run_id or header.settings_hash != settings_hash:
        raise ForeignGroup("of another run or made under other settings")
    if header.lineage != plan.lineage and header.policy_version > plan.start_version:
        raise ForeignGroup(
            f"sampled by version {header.policy_version} of lineage {header.lineage}, whose weights were rolled back to "
            f"version {plan.start_version}"
        )
    if header.policy_version < version - plan.max_staleness:
        return  # stale, whatever it is
    expected = digests.get(header.policy_version)
    if expected is None:
        raise ForeignGroup(
            f"version {header.policy_version} is none that this learner published (at {version}), or its adapter is gone"
        )
    if expected != header.adapter_digest:
        raise ForeignGroup(
            f"sampled with adapter {header.adapter_digest[:12]!r}…, which is not version {header.policy_version}"
        )
