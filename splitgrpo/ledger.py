"""What became of every group, on disk: RUN/ledger.jsonl, and the audit that finds each one exactly once. No torch.

    {"lineage": 1, "step": 8, "trained": ["0:14", "0:15"], "dropped": [[0, 16, 16, "reward"]], "lost": 0}
    {"lineage": 2, "resumed_at": 7, "undone": 2}

A line is on the disk before a checkpoint of its step is. A learner that goes on from the checkpoint of step 7 undoes what
the lines after step 7 say: these groups come again, or are made again. "dropped" holds [sampler, first, last, reason];
"lost" counts, over the run, groups granted to a sampler that died or sampled with weights that were rolled back.

    python -m splitgrpo.ledger RUN
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitgrpo.arrivals import Dropped, Trained
from splitgrpo.config import JOURNAL
from splitgrpo.files import append_line, read_lines, write_lines

LEDGER, METRICS, DONE = "ledger.jsonl", "metrics.jsonl", "done.json"
LOCK = "learner.lock"  # of the learner that a folder belongs to


class AuditError(ValueError):
    """A run whose books do not agree; the text says where."""


class Ledger:
    """Writes the books of one run; only rank 0 has one."""

    def __init__(
        self, run_dir: Path, lineage: int, resumed_at: int | None, replay_of: str | None = None
    ) -> None:
        """Go on with the books of a run, if there are any. Raises OSError, ValueError."""
        self.path, self.lineage = run_dir / LEDGER, lineage
        self.dropped: collections.Counter[str] = collections.Counter()
        self.lost = self._lost = 0  # at this start; as noted last
        self._pending: collections.deque[dict[str, Any]] = collections.deque()
        if resumed_at is None:
            if replay_of:
                append_line(self.path, {"lineage": lineage, "replay_of": replay_of})
            return
        rows = read_lines(self.path)
        before = surviving(rows)
        after = [row for row in before if row["step"] > resumed_at]
        for row in before:
            if row["step"] <= resumed_at:
                for _, first, last, reason in row["dropped"]:
                    self.dropped[reason] += last - first + 1
        self.lost = self._lost = max((row.get("lost", 0) for row in rows), default=0)
        write_lines(self.path, rows)  # less a line that a kill cut short
        self.undone = sum(len(row["trained"]) for row in after)
        append_line(
            self.path, {"lineage": lineage, "resumed_at": resumed_at, "undone": self.undone}
        )

    def note(
        self, step: int, trained: Sequence[Trained], dropped: Sequence[Dropped], lost: int
    ) -> None:
        """Have for the next `write` what was trained for `step`, and what was dropped since the last call."""
        if not trained and not dropped and lost == self._lost:
            return
        self._lost = lost
        row = {
            "lineage": self.lineage,
            "step": step,
            "trained": [t.group.group_id for t in trained],
            "dropped": [[d.sampler_id, d.first, d.last, d.reason] for d in dropped],
            "lost": lost,
        }
        self._pending.append(row)

    def write(self) -> None:
        """Book all that was noted. Raises OSError; the next call then begins with the line that was not written."""
        while self._pending:
            append_line(self.path, self._pending[0])
            self._pending.popleft()


def surviving(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that were not undone by a later restart. Raises AuditError where a restart counted other than they say."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if "resumed_at" not in row:
            if row.keys() >= {"step", "trained", "dropped"}:
                kept.append(row)
            elif "replay_of" not in row:
                raise AuditError(f"a line of {LEDGER} has only {sorted(row)}")
            continue
        undone = sum(len(r["trained"]) for r in kept if r["step"] > row["resumed_at"])
        if undone != row["undone"]:
            raise AuditError(
                f"a restart at step {row['resumed_at']} counts {row['undone']} groups undone, the lines before say {undone}"
            )
        kept = [r for r in kept if r["step"] <= row["resumed_at"]]
    return kept


def lineages(rows: Sequence[dict[str, Any]], version: int) -> list[int]:
    """Lineages that published the weights which this run has at `version`, newest first.

    A learner that went on from an earlier step took back what others had published after it; one that went on from this
    very step has the weights of the one before.
    """
    found = []
    for row in [*reversed(rows), {"lineage": 1, "resumed_at": 0}]:
        if row.get("resumed_at", version + 1) <= version:
            found.append(row["lineage"])
            if row["resumed_at"] < version:
                break
    return found


def audit(run_dir: Path) -> dict[str, int]:
    """Check a run's ledger against itself, its metrics and its journal; returns totals. Raises AuditError.

    Every group of every sampler, from its first to its last with a fate, was trained once or dropped with one reason.
    """
    if not any(
        (run_dir / name).exists() for name in (LEDGER, LOCK)
    ):  # a run without a step has no books yet
        raise AuditError(f"there is neither {LEDGER} nor {LOCK}: is it a run folder?")
    rows = read_lines(run_dir / LEDGER)
    kept = surviving(rows)
    fates: dict[int, dict[int, str]] = {}

    def book(sampler_id: int, seq: int, fate: str) -> None:
        if seq in fates.setdefault(sampler_id, {}):
            raise AuditError(
                f"group {sampler_id}:{seq} is booked twice: {fates[sampler_id][seq]}, then {fate}"
            )
        fates[sampler_id][seq] = fate

    dropped: collections.Counter[str] = collections.Counter()
    totals_at: dict[int, dict[str, int]] = {}
    for row in kept:
        for group_id in row["trained"]:
            sampler_id, seq = map(int, group_id.split(":"))
            book(sampler_id, seq, f"trained in step {row['step']}")
        for sampler_id, first, last, reason in row["dropped"]:
            dropped[reason] += last - first + 1
            for seq in range(first, last + 1):
                book(sampler_id, seq, reason)
        if row["trained"]:
            totals_at[row["step"]] = dict(dropped)
    is_replay = any(
        "replay_of" in row for row in rows
    )  # the journal has no group that was dropped at the door
    for sampler_id, seqs in {}.items() if is_replay else fates.items():
        if missing := set(range(max(seqs) + 1)) - seqs.keys():
            raise AuditError(
                f"{len(missing)} groups of sampler {sampler_id} are in no line, first {min(missing)}"
            )
    steps = [row["step"] for row in kept if row["trained"]]
    if steps != list(range(1, len(steps) + 1)):
        raise AuditError(f"steps are not 1, 2, 3, …: {steps[:20]}")
    check_metrics(run_dir, len(steps), totals_at)
    check_journal(run_dir, kept)
    trained = sum(len(row["trained"]) for row in kept)
    return {
        "steps": len(steps),
        "samplers": len(fates),
        "trained": trained,
        **{f"dropped_{reason}": num for reason, num in sorted(dropped.items())},
        "lost": max((row.get("lost", 0) for row in rows), default=0),
        "restarts": sum("resumed_at" in row for row in rows),
        "undone": sum(row.get("undone", 0) for row in rows),
    }


def check_metrics(run_dir: Path, num_steps: int, totals_at: dict[int, dict[str, int]]) -> None:
    """Compare the ledger with metrics.jsonl: one row a step, the same counts. Raises AuditError."""
    metrics = {row["step"]: row for row in read_lines(run_dir / METRICS)}
    # A kill between ledger and metrics, or in a resume before it has undone both, leaves the last steps without rows.
    whole = len(metrics) == num_steps or not (run_dir / DONE).exists()
    if sorted(metrics) != list(range(1, len(metrics) + 1)) or len(metrics) > num_steps or not whole:
        raise AuditError(
            f"{METRICS} has rows of steps {sorted(metrics)[:20]}…, the ledger {num_steps} steps"
        )
    for step, row in metrics.items():
        said = {
            k.removeprefix("dropped_"): v for k, v in row.items() if k.startswith("dropped_") and v
        }
        if said != totals_at[step]:
            raise AuditError(
                f"step {step}: {METRICS} counts {said} dropped, the ledger {totals_at[step]}"
            )


def check_journal(run_dir: Path, kept: Sequence[dict[str, Any]]) -> None:
    """Find each trained group among those received before its step, as far as the journal tells. Raises AuditError."""
    before: dict[str, int] = {}  # group -> steps taken before it arrived
    recorded = set()
    for line in read_lines(run_dir / JOURNAL / "index.jsonl"):
        step = int("".join(c for c in line["file"] if c.isdigit()))
        recorded.add(step)
        for group_id in line["groups"]:
            before.setdefault(group_id, step)
    for row in kept:
        for group_id in row["trained"] if row["step"] - 1 in recorded else []:
            if before.get(group_id, row["step"]) >= row["step"]:
                raise AuditError(
                    f"group {group_id} was trained in step {row['step']}, the journal has not received it before"
                )


def main() -> int:
    """Audit one run folder and print the totals; 0 when the books agree, 70 when they do not."""
    parser = argparse.ArgumentParser(
        prog="python -m splitgrpo.ledger", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("run_dir", type=Path)
    args = parser.parse_args()
    try:
        totals = audit(args.run_dir)
    except ValueError as error:
        sys.stderr.write(f"{args.run_dir}: {error}\n")
        return 70
    sys.stdout.write(" ".join(f"{k}={v}" for k, v in totals.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
