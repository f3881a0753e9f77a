"""A learner without a model: a real GroupServer, ledger and cursor that survive its death. Imports no torch.

python fake_learner.py RUN PORT GROUPS_PER_STEP MAX_STALENESS SAVE_STEPS PAUSE_S QUICKEN

Its weights are two sums over the groups that it was trained on, in RUN/checkpoint.json with step and cursor. It goes on
until there is a file RUN/enough, then finishes as the real one does. A group that breaks a promise ends it with 70.
"""

import functools
import json
import logging
import sys
import time
from pathlib import Path

from fake_sampler import SETTINGS, VOCAB, digest_of, prompt_of, quicken

from splitgrpo.admission import ServerPlan
from splitgrpo.arrivals import REASONS, Trained
from splitgrpo.files import append_line, read_lines, write_json, write_lines
from splitgrpo.ledger import Ledger
from splitgrpo.monitor import setup_logging
from splitgrpo.process import StopFlag, begin_process, end_process, run_main
from splitgrpo.rollout import check_group
from splitgrpo.server import GroupServer
from splitgrpo.transport import make_key

log = logging.getLogger("learner")
check = functools.partial(check_group, group_size=4, vocab_size=VOCAB, max_len=1000, want_ref=True)


def begin(run_dir: Path) -> dict:
    """The last checkpoint, the first one made at once; a lineage of its own, and metrics of no later step."""
    path = run_dir / "checkpoint.json"
    if not path.exists():
        write_json(path, {"step": 0, "cursor": {}, "num": 0, "sum": 0, "lineage": 0})
    state = json.loads(path.read_text())
    state["cursor"] = {int(i): seq for i, seq in state["cursor"].items()}
    lineages = run_dir / "lineage.json"
    state["lineage"] = 1 + (json.loads(lineages.read_text()) if lineages.exists() else 0)
    write_json(lineages, state["lineage"])
    rows = read_lines(run_dir / "metrics.jsonl")
    write_lines(run_dir / "metrics.jsonl", [r for r in rows if r["step"] <= state["step"]])
    return state


def train(state: dict, taken: list[Trained], max_staleness: int) -> None:
    """One step. Raises AssertionError for a group that should not have come."""
    for group in (t.group for t in taken):
        staleness = state["step"] - group.policy_version
        assert 0 <= staleness <= max_staleness, (group.group_id, staleness)
        assert group.prompt_index == prompt_of(group.sampler_id, group.seq), group.group_id
        state["num"] += 1
        state["sum"] += group.sampler_id * 1_000_003 + group.seq
    state["step"] += 1


def learn(stop: StopFlag) -> None:
    """The learner's story."""
    run_dir, port = Path(sys.argv[1]), int(sys.argv[2])
    groups_per_step, max_staleness, save_steps = map(int, sys.argv[3:6])
    pause_s = float(sys.argv[6])
    key = make_key(run_dir / "run.key")
    state = begin(run_dir)
    ledger = Ledger(run_dir, state["lineage"], state["step"])
    old = range(max(0, state["step"] - max_staleness), state["step"] + 1)
    plan = ServerPlan(
        run_id="run", lineage=state["lineage"], settings=SETTINGS, groups_per_step=groups_per_step,
        max_staleness=max_staleness, max_steps=1 << 30, start_version=state["step"],
        old_digests={v: digest_of(v) for v in old}, cursor=state["cursor"], dropped=ledger.dropped, lost=ledger.lost,
        peer_timeout_s=30.0, check_group=check,
    )  # fmt: skip
    server = GroupServer("127.0.0.1", port, key, plan, log)

    def book(taken: list[Trained]) -> None:
        ledger.note(state["step"], taken, server.take_fates(), server.lost)
        ledger.write()

    def save() -> None:
        state["cursor"] = server.cursor()
        write_json(run_dir / "checkpoint.json", state)

    server.set_version(state["step"], digest_of(state["step"]))
    while not (run_dir / "enough").exists():
        stop.raise_if_set()
        taken = server.take(groups_per_step, state["step"], 0.2)
        if taken is None:
            continue
        train(state, taken, max_staleness)
        book(taken)
        row = {f"dropped_{reason}": server.dropped[reason] for reason in REASONS}
        append_line(run_dir / "metrics.jsonl", {"step": state["step"], **row})
        server.set_version(state["step"], digest_of(state["step"]))
        if state["step"] % save_steps == 0:
            save()
            server.commit(state["cursor"])
        time.sleep(pause_s)
    server.finish()
    book([])
    save()
    server.close(finished=True, reason="finished")


if __name__ == "__main__":
    begin_process()
    setup_logging("learner", verbose=False)
    quicken(float(sys.argv[7]))
    end_process(run_main(learn, log))
