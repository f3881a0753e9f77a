"""What has arrived and waits for its step, in order of arrival, and what became of each. Imports no torch.

A group that is not trained stays in line as a marker with its reason, so that fates fall in the order of arrival: below a
sampler's cursor every group has its fate, from it on none has. A checkpoint that holds the cursor can therefore be gone on
from without training a group twice or forgetting one.
"""

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from splitgrpo.rollout import Group

REASONS = ("stale", "foreign", "malformed", "filtered", "reward", "unused")


@dataclass(frozen=True)
class Trained:
    """One group that a step is taken on, with its wire bytes."""

    group: Group
    payload: bytes


@dataclass(frozen=True)
class Dropped:
    """Groups first to last of one sampler that no step is taken on."""

    sampler_id: int
    first: int
    last: int
    reason: str

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.last - self.first + 1


class GroupQueue:
    """First in, first out; `num_groups` are in line. `cursor` is {sampler: number of its first group without a fate}."""

    def __init__(self, cursor: dict[int, int]) -> None:
        self.cursor = dict(cursor)
        self.dropped: collections.Counter[str] = collections.Counter()  # by reason, fates only
        self._items: collections.deque[Trained | Dropped] = collections.deque()
        self._fates: list[Dropped] = []
        self.num_groups = 0  # in line, markers not counted
        self._oldest: float = math.inf  # no group in line is of a version before this one

    def put(self, group: Group, payload: bytes) -> None:
        """Line up one group."""
        self._items.append(Trained(group, payload))
        self.num_groups += 1
        self._oldest = min(self._oldest, group.policy_version)

    def drop(self, sampler_id: int, seq: int, reason: str) -> None:
        """Line up a marker for a group that will not be trained."""
        append(self._items, Dropped(sampler_id, seq, seq, reason))

    def expire(self, oldest_version: int) -> int:
        """Turn the groups sampled by a version before `oldest_version` into markers; returns how many."""
        if self._oldest >= oldest_version:
            return 0  # asked for every time that somebody waits for groups
        self._oldest = oldest_version
        return self._mark(lambda group: group.policy_version < oldest_version, "stale")

    def _mark(self, unwanted: Callable[[Group], bool], reason: str) -> int:
        num, items = 0, list(self._items)
        for i, item in enumerate(items):
            if isinstance(item, Trained) and unwanted(item.group):
                group = item.group
                items[i] = Dropped(group.sampler_id, group.seq, group.seq, reason)
                num += 1
        self._items = collections.deque(items)
        self.num_groups -= num
        return num

    def take(self, num_groups: int) -> list[Trained] | None:
        """Take so many groups off the line, oldest first, or none if there are not as many."""
        if self.num_groups < num_groups:
            self._settle(0)
            return None
        return self._settle(num_groups)

    def take_fates(self) -> list[Dropped]:
        """What was dropped since the last call, up to the cursor."""
        fates, self._fates = self._fates, []
        return fates

    def finish(self) -> None:
        """The run is over: what is left in line is dropped as unused."""
        self._mark(lambda group: True, "unused")
        self._settle(0)

    def _settle(self, num_groups: int) -> list[Trained]:
        """Move the cursor over the next `num_groups` groups and every marker up to the one after them."""
        taken: list[Trained] = []
        while self._items:
            item = self._items[0]
            if isinstance(item, Trained):
                if len(taken) == num_groups:
                    break
                taken.append(item)
                self.cursor[item.group.sampler_id] = item.group.seq + 1
            else:
                append(self._fates, item)
                self.dropped[item.reason] += item.count
                self.cursor[item.sampler_id] = item.last + 1
            self._items.popleft()
        self.num_groups -= len(taken)
        return taken


def append(line: Any, marker: Dropped) -> None:
    """Append a marker, or join it with its sampler's last one where it goes on from that.

    Only markers are passed over, so that no fate moves past a group; endless filtering by any number of samplers must not
    grow the line.
    """
    for i in range(len(line) - 1, -1, -1):
        last = line[i]
        if not isinstance(last, Dropped):
            break
        if last.sampler_id == marker.sampler_id:
            if (last.last + 1, last.reason) != (marker.first, marker.reason):
                break
            line[i] = Dropped(marker.sampler_id, last.first, marker.last, marker.reason)
            return
    line.append(marker)
