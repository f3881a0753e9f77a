"""How many groups a second one learner takes in, without training on them: 8 completions of 512 tokens a group.

    python benchmarks/receive.py [--seconds 4]

The learner's side is this process, its samplers are tests/fake_sampler.py on the same machine: they share its cores, so the
rate is of both together. CPU s and RSS are of this process alone. Every group is checked as in a real run.
"""

import argparse
import functools
import logging
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_sampler import SETTINGS, VOCAB, digest_of  # noqa: E402

from splitgrpo.admission import ServerPlan  # noqa: E402
from splitgrpo.rollout import check_group  # noqa: E402
from splitgrpo.server import GroupServer  # noqa: E402
from splitgrpo.transport import make_key  # noqa: E402

COMPLETIONS, TOKENS, GROUPS_PER_STEP = 8, 512, 64
COUNTS = (1, 2, 4, 8, 16, 32, 64)
START_S = 20.0  # for all samplers to be there
check = functools.partial(
    check_group, group_size=COMPLETIONS, vocab_size=VOCAB, max_len=1024, want_ref=True
)


def measure(num_samplers: int, seconds: float, folder: Path) -> str:
    """One row of the table. Raises SystemExit when samplers do not come."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = make_key(folder / "run.key")
    plan = ServerPlan(
        run_id="run", lineage=1, settings=SETTINGS, groups_per_step=GROUPS_PER_STEP, max_staleness=4, max_steps=1 << 30,
        start_version=0, cursor={}, peer_timeout_s=60.0, check_group=check, old_digests={0: digest_of(0)},
    )  # fmt: skip
    server = GroupServer("127.0.0.1", port, key, plan, logging.getLogger("receive"))
    command = [sys.executable, ROOT / "tests/fake_sampler.py", port, folder / "run.key", 0, 0, 4, 0,
               "--completions", COMPLETIONS, "--tokens", TOKENS, "--num_samplers", num_samplers]  # fmt: skip
    samplers = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    num = num_bytes = step = 0
    try:
        deadline = time.monotonic() + START_S
        while len(server.peers) < num_samplers:
            time.sleep(0.05)
            if time.monotonic() > deadline:
                raise SystemExit(f"only {len(server.peers)} of {num_samplers} samplers came")
        started, cpu = time.monotonic(), time.process_time()
        while (took_s := time.monotonic() - started) < seconds:
            taken = server.take(GROUPS_PER_STEP, step, 1.0)
            if taken is None:
                continue
            step += 1
            server.set_version(step, digest_of(step))
            server.commit(server.cursor())
            num += len(taken)
            num_bytes += sum(len(t.payload) for t in taken)
        cpu = time.process_time() - cpu
        rss = psutil.Process().memory_info().rss
        server.finish()
    finally:
        server.close(finished=True, reason="measured")
        samplers.wait(START_S)
    return (
        f"{num_samplers:8} {num / took_s:9.0f} {num_bytes / took_s / 1e6:7.1f} {cpu / took_s:11.2f} "
        f"{1e3 * cpu / max(1, num):14.2f} {rss / 2**20:7.0f} {server.dropped['stale']:7}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    args = parser.parse_args()
    sys.stdout.write("samplers  groups/s    MB/s  CPU s per s  CPU ms a group  RSS MB   stale\n")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        for count in COUNTS:
            sys.stdout.write(measure(count, args.seconds, Path(folder)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
