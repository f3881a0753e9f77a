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
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "tests")]

import common  # noqa: E402
from fake_sampler import PROMPT_TOKENS, SETTINGS, VOCAB, digest_of  # noqa: E402

from splitgrpo.admission import ServerPlan  # noqa: E402
from splitgrpo.rollout import check_group  # noqa: E402
from splitgrpo.server import GroupServer  # noqa: E402
from splitgrpo.transport import make_key  # noqa: E402

GROUPS_PER_STEP = 64
COUNTS = (1, 2, 4, 8, 16, 32, 64)
START_S = 20.0  # for all samplers to be there


@dataclass(frozen=True)
class Load:
    """What each sampler sends: groups of `completions`, `batch` of them a round, `distinct` different ones in turn."""

    completions: int = 8
    tokens: int = 512  # of a completion
    prompt_tokens: int = PROMPT_TOKENS
    batch: int = 4
    distinct: int = 1


@dataclass(frozen=True)
class Found:
    """What came in: per second of wall time, and CPU time of the learner's process and of a single sampler's."""

    groups_s: float
    bytes_s: float
    learner_cpu_s: float  # per second
    learner_us: float  # a group
    sampler_us: float  # a group; of a sampler that is alone
    rss_bytes: int
    num_stale: int


def check_of(load: Load) -> functools.partial:
    """The checks of a real learner for such groups."""
    longest = load.prompt_tokens + load.tokens
    return functools.partial(
        check_group, group_size=load.completions, vocab_size=VOCAB, max_len=longest, want_ref=True
    )


def measure(load: Load, num_samplers: int, seconds: float, folder: Path) -> Found:
    """Let so many samplers send for so long. Raises SystemExit when they do not come."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = make_key(folder / "run.key")
    plan = ServerPlan(
        run_id="run", lineage=1, settings=SETTINGS, groups_per_step=GROUPS_PER_STEP, max_staleness=4, max_steps=1 << 30,
        start_version=0, cursor={}, peer_timeout_s=60.0, check_group=check_of(load), old_digests={0: digest_of(0)},
    )  # fmt: skip
    server = GroupServer("127.0.0.1", port, key, plan, logging.getLogger("receive"))
    command = [sys.executable, ROOT / "tests/fake_sampler.py", port, folder / "run.key", 0, 0, load.batch, 0,
               "--completions", load.completions, "--tokens", load.tokens, "--prompt_tokens", load.prompt_tokens,
               "--distinct", load.distinct, "--num_samplers", num_samplers]  # fmt: skip
    samplers = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    num = num_bytes = step = 0
    try:
        deadline = time.monotonic() + START_S
        while len(server.peers) < num_samplers:
            time.sleep(0.05)
            if time.monotonic() > deadline:
                raise SystemExit(f"only {len(server.peers)} of {num_samplers} samplers came")
        theirs = psutil.Process(samplers.pid)
        started, cpu, their_cpu = time.monotonic(), time.process_time(), sum(theirs.cpu_times()[:2])
        while (took_s := time.monotonic() - started) < seconds:
            taken = server.take(GROUPS_PER_STEP, step, 1.0)
            if taken is None:
                continue
            step += 1
            server.take_fates()
            server.set_version(step, digest_of(step))
            server.commit(server.cursor())
            num += len(taken)
            num_bytes += sum(len(t.payload) for t in taken)
        cpu, their_cpu = time.process_time() - cpu, sum(theirs.cpu_times()[:2]) - their_cpu
        rss = psutil.Process().memory_info().rss
        server.finish()
    finally:
        server.close(finished=True, reason="measured")
        samplers.wait(START_S)
    return Found(
        groups_s=num / took_s, bytes_s=num_bytes / took_s, learner_cpu_s=cpu / took_s,
        learner_us=1e6 * cpu / max(1, num), sampler_us=1e6 * their_cpu / max(1, num), rss_bytes=rss,
        num_stale=server.dropped["stale"],
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    args = parser.parse_args()
    sys.stdout.write("samplers  groups/s    MB/s  CPU s per s  CPU ms a group  RSS MB   stale\n")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        for count in COUNTS:
            found = measure(Load(), count, args.seconds, Path(folder))
            sys.stdout.write(
                f"{count:8} {found.groups_s:9.0f} {found.bytes_s / 1e6:7.1f} {found.learner_cpu_s:11.2f} "
                f"{found.learner_us / 1e3:14.2f} {found.rss_bytes / 2**20:7.0f} {found.num_stale:7}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    common.run_main(main)
