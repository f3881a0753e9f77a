"""One rank that joins and watches as the learner's do, with or without torch; tests/test_ranks.py tells it what to do.

python rank_script.py FOLDER MODE STALL_S       MODE "torch" meets in a gloo collective each turn
A file FOLDER/rankN holds the order for rank N: stick, raise, finish, skip.
"""

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import os

from splitgrpo import rankjoin, rankwatch
from splitgrpo.monitor import setup_logging
from splitgrpo.process import StopFlag, begin_process, end_process, run_main

RANK = int(os.environ["RANK"])
folder, mode = Path(sys.argv[1]), sys.argv[2]
log = logging.getLogger("learner")


def story(stop: StopFlag) -> None:
    """Take turns until told otherwise."""
    watch = rankwatch.join_ranks(sys.argv[1], stop, log)
    meet = make_meet(watch) if mode == "torch" else lambda: None
    watch.expect_progress(float(sys.argv[3]))
    watch.bump("step 1: turning")
    started = time.monotonic()
    while True:
        if time.monotonic() > started + 2 * rankwatch.BEAT_S:  # the others have heard of step 1
            (folder / f"turned{RANK}").touch()
        order = (folder / f"rank{RANK}").read_text() if (folder / f"rank{RANK}").exists() else ""
        if order == "stick":
            watch.bump("step 2: thinking")
            time.sleep(100)
        if order == "raise":
            raise ValueError("no such luck")
        if order == "finish":
            return
        if order != "skip":
            meet()
        watch.bump()
        stop.raise_if_set()
        time.sleep(0.05)


def make_meet(watch: rankwatch.RankWatch):
    """A collective among all ranks."""
    import torch

    from splitgrpo.zero import start_ranks

    ranks = start_ranks(watch)
    return lambda: torch.distributed.all_reduce(torch.zeros(1), group=ranks.control)


if __name__ == "__main__":
    begin_process()
    rankwatch.SILENT_S = 3.0
    rankjoin.ANSWER_S = 2.0
    setup_logging(f"learner r{RANK}", verbose=False)
    end_process(run_main(story, log))
