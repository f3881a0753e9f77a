"""Learner and samplers as processes that keep, or do not keep, each other's pace, on a bad network, killed at random."""

import asyncio
import collections
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from fake_sampler import SETTINGS, VOCAB, digest_of, prompt_of

from splitgrpo.admission import ServerPlan
from splitgrpo.config import EXIT_RETRY, EXIT_USAGE
from splitgrpo.files import read_lines
from splitgrpo.ledger import audit, surviving
from splitgrpo.process import PARENT_ENV
from splitgrpo.rollout import check_group
from splitgrpo.server import GroupServer
from splitgrpo.transport import make_key
from splitgrpo.wire import Bye
from splitgrpo.zero import free_port

HERE = Path(__file__).resolve().parent
LOG = logging.getLogger("test")
MB = 1 << 20


class Run:
    """One GroupServer in this process, what its learner did, and fake samplers that are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.key = make_key(folder / "run.key")
        self.processes: list[subprocess.Popen] = []
        self.proxies: list[Proxy] = []
        self.server: GroupServer | None = None
        self.granted = 0
        self.trained: collections.Counter[tuple[int, int]] = collections.Counter()
        self.fates: collections.Counter[tuple[int, int]] = collections.Counter()
        self.staleness = self.ahead = self.step = 0

    def start(self, max_staleness: int, groups_per_step: int, **fields) -> GroupServer:
        """Let the learner listen."""
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness

        def check(group):
            check_group(group, group_size=4, vocab_size=VOCAB, max_len=1000, want_ref=True)

        plan = {"run_id": "run", "lineage": 1, "settings": SETTINGS, "max_steps": 1 << 30, "start_version": 0,
                "cursor": {}, "peer_timeout_s": 60.0, "check_group": check}  # fmt: skip
        plan |= {"groups_per_step": groups_per_step, "max_staleness": max_staleness} | fields
        self.server = GroupServer("127.0.0.1", self.port, self.key, ServerPlan(**plan), LOG)
        share = self.server.credit.share

        def counted():
            peers = self.server.peers.values()
            before = [max(p.granted_to, p.next_seq) for p in peers]
            served = share()
            self.granted += sum(
                max(p.granted_to, p.next_seq) - b for p, b in zip(peers, before, strict=True)
            )
            return served

        self.server.credit.share = counted
        self.server.set_version(0, digest_of(0))
        return self.server

    def sampler(self, sampler_id=0, *, speed=0.0, batch=4, port=None, **options):
        """Start a fake sampler, or several with num_samplers=."""
        command = [sys.executable, str(HERE / "fake_sampler.py"), port or self.port,
                   self.folder / "run.key", sampler_id, speed, batch, 0]  # fmt: skip
        for name, value in options.items():
            command += [f"--{name}", value]
        return self.spawn(f"sampler{sampler_id}", command)

    def spawn(self, name, command):
        with (self.folder / f"{name}.log").open("ab") as file:
            process = subprocess.Popen(
                list(map(str, command)), stdout=file, stderr=file,
                env=os.environ | {PARENT_ENV: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def take_steps(self, num, pause_s=0.0, commit_every=10, on_step=lambda step: None):
        """`num` steps of the learner, `pause_s` for each."""
        for _ in range(num):
            deadline = time.monotonic() + 20
            while (taken := self.server.take(self.groups_per_step, self.step, 0.5)) is None:
                assert time.monotonic() < deadline, self.server.describe()
            for group in (t.group for t in taken):
                self.trained[group.sampler_id, group.seq] += 1
                self.staleness = max(self.staleness, self.step - group.policy_version)
                assert group.prompt_index == prompt_of(group.sampler_id, group.seq)
            time.sleep(pause_s)  # the samplers may not use it to run ahead
            with self.server.lock:
                received = sum(self.server.next_seq.values()) - sum(self.server.dropped.values())
            self.ahead = max(self.ahead, received - self.step * self.groups_per_step)
            self.step += 1
            self.note_fates()
            self.server.set_version(self.step, digest_of(self.step))
            if self.step % commit_every == 0:
                self.server.commit(self.server.cursor())
            on_step(self.step)

    def note_fates(self):
        for fate in self.server.take_fates():
            for seq in range(fate.first, fate.last + 1):
                self.fates[fate.sampler_id, seq] += 1

    def finish(self):
        """End the run, and check that each group has one fate and each granted one came or is counted as lost."""
        self.server.finish()
        self.note_fates()
        cursor = self.server.cursor()
        self.server.close(finished=True, reason="finished")
        known = self.trained + self.fates
        assert set(known.values()) == {1}
        assert sorted(known) == [
            (i, seq) for i, end in sorted(cursor.items()) for seq in range(end)
        ]
        assert cursor == {i: end for i, end in self.server.next_seq.items() if end}
        assert sum(self.server.dropped.values()) == sum(self.fates.values())
        assert self.staleness <= self.max_staleness

    def close(self):
        for proxy in self.proxies:
            proxy.close()
        if self.server is not None:
            self.server.close(finished=False, reason="test over")
        for process in self.processes:
            for child in children(process):
                child.kill()
            process.kill()
            process.wait()


def children(process):
    try:
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def wait_until(true, what, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


def rss(pid):
    return psutil.Process(pid).memory_info().rss


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.close()


# ---- pace -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_staleness", "num_steps"), [(0, 60), (1, 500), (8, 60)])
def test_a_slow_learner_holds_its_samplers_back_and_nobody_grows(run, max_staleness, num_steps):
    """500 steps are 10,000 groups of 15 kB."""
    run.start(max_staleness, groups_per_step=20, max_steps=num_steps)
    samplers = [run.sampler(i, tokens=256) for i in range(2)]
    watched, first = [os.getpid(), *(s.pid for s in samplers)], {}

    def look(step):
        if step == num_steps // 5:  # buffers have their size
            first.update({pid: rss(pid) for pid in watched})

    run.take_steps(num_steps, pause_s=0.01 if max_staleness == 1 else 0.03, on_step=look)
    growth = [(rss(pid) - first[pid]) / MB for pid in watched]
    LOG.warning(f"grown by {growth} MB; {run.ahead} groups ahead, staleness {run.staleness}")
    run.finish()
    assert [s.wait(5) for s in samplers] == [0, 0]
    assert run.ahead <= (max_staleness + 1) * 20
    assert run.staleness == max_staleness
    # Two that are unequally fast overtake each other on the way, which costs one of them a group now and then.
    stale = run.server.dropped["stale"]
    assert stale <= (0.02 * num_steps * 20 if max_staleness else 0)
    assert run.granted == sum(run.server.next_seq.values()) == num_steps * 20 + stale
    assert run.server.lost == 0
    assert max(growth) < 16  # of 120 that went through


@pytest.mark.parametrize("max_staleness", [0, 1, 8])
def test_a_run_ends_though_all_groups_of_every_second_round_are_filtered_out(run, max_staleness):
    run.start(max_staleness, groups_per_step=6, max_steps=20)
    samplers = [run.sampler(i, batch=3, filter_rounds=2) for i in range(2)]
    wait_until(lambda: len(run.server.peers) == 2, "both are there")
    run.take_steps(20)
    run.finish()
    assert [s.wait(5) for s in samplers] == [0, 0]
    assert run.server.dropped["filtered"] > 40
    assert set(run.server.dropped) <= {"filtered", "stale"}
    assert sum(run.trained.values()) == 120


@pytest.mark.parametrize("max_staleness", [0, 1, 8])
def test_a_sampler_is_sent_home_at_once_by_a_learner_that_ends_before_its_last_step(
    run, max_staleness
):
    run.start(max_staleness, groups_per_step=4)
    sampler = run.sampler(batch=4)
    run.take_steps(5)
    wait_until(lambda: run.server.peers[0].wanted, "all that it may make is made")
    run.finish()
    ended = time.monotonic()
    assert sampler.wait(5) == 0
    assert time.monotonic() - ended < 1.0
    assert run.server.dropped == {"unused": (max_staleness + 1) * 4}


def test_a_goodbye_that_is_lost_on_the_way_is_said_again(run):
    run.start(1, groups_per_step=4)
    sampler = run.sampler(batch=4)
    run.take_steps(5)
    post, lost = run.server.post, []

    def lose_first(identity, header, blob=b""):
        if isinstance(header, Bye) and not lost:
            lost.append(header)
        else:
            post(identity, header, blob)

    run.server.post = lose_first
    run.finish()
    assert lost
    assert sampler.wait(3) == 0


@pytest.mark.parametrize("max_staleness", [0, 1, 8])
def test_a_slow_sampler_sets_the_pace_and_what_it_still_makes_at_the_end_is_lost(
    run, max_staleness
):
    run.start(max_staleness, groups_per_step=4)
    sampler = run.sampler(batch=4, speed=40)
    run.take_steps(10)
    wait_until(lambda: run.server.peers[0].outstanding == 4, "it is at work")
    run.finish()
    received = sum(run.server.next_seq.values())
    assert run.server.lost == 4
    assert run.granted == received + run.server.lost
    assert sampler.wait(5) == 0
    assert run.staleness <= 1  # never waits in line


@pytest.mark.parametrize(
    ("max_staleness", "late"), [(0, "sampler"), (1, "learner"), (8, "learner")]
)
def test_either_may_start_seconds_after_the_other(run, max_staleness, late):
    run.groups_per_step = 4
    if late == "sampler":
        run.start(max_staleness, groups_per_step=4, max_steps=20)
        assert run.server.take(4, 0, 2.5) is None
        sampler = run.sampler()
    else:
        sampler = run.sampler()
        time.sleep(2.5)
        run.start(max_staleness, groups_per_step=4, max_steps=20)
    run.take_steps(20)
    run.finish()
    assert sampler.wait(5) == 0
    assert run.granted == 80
    assert run.server.lost == 0


# ---- many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_samplers", "num_steps"), [(1, 100), (4, 100), (16, 150), (64, 80)])
def test_any_number_of_samplers_get_fair_shares(run, num_samplers, num_steps):
    run.start(1, groups_per_step=32, max_steps=1 << 20)
    samplers = run.sampler(num_samplers=num_samplers, batch=2)
    wait_until(lambda: len(run.server.peers) == num_samplers, "all are there")
    run.take_steps(5)
    before = dict(run.server.next_seq)
    started = time.monotonic()
    run.take_steps(num_steps)
    took_s = time.monotonic() - started
    shares = [run.server.next_seq[i] - before[i] for i in range(num_samplers)]
    mean = num_steps * 32 / num_samplers
    LOG.warning(
        f"{num_steps * 32 / took_s:.0f} groups/s, of {mean:.0f} each {min(shares)} to {max(shares)}"
    )
    run.finish()
    assert samplers.wait(10) == 0
    assert max(abs(share - mean) for share in shares) <= 0.25 * mean + 8
    assert run.granted == sum(run.server.next_seq.values()) + run.server.lost


def test_a_learner_that_has_much_to_say_at_once_does_not_wait_for_itself(run):
    server, over = run.start(1, groups_per_step=4), threading.Event()

    def say():
        with server.lock:  # as commit does: the thread that would make room needs it
            for _ in range(2000):
                server.post(b"nobody", Bye(sampler_id=0, session="", finished=False, reason=""))
        over.set()

    threading.Thread(target=say, daemon=True).start()
    stuck = not over.wait(5)
    while not over.wait(0.01):
        server._wake_out.recv(1 << 16)  # so that the test can end
    assert not stuck


def test_one_of_sixteen_is_killed_one_joins_and_a_twin_is_refused(run):
    run.start(1, groups_per_step=32)
    samplers = run.sampler(num_samplers=16, batch=2)
    wait_until(lambda: len(run.server.peers) == 16, "all are there")
    run.take_steps(10)
    twin = run.sampler(3, quicken=0.1)
    late = run.sampler(100, batch=2)
    victim = children(samplers)[5]
    victim.kill()

    def go_on(true, what):
        deadline = time.monotonic() + 20
        while not true():
            assert time.monotonic() < deadline, what
            run.take_steps(1, pause_s=0.01)

    go_on(lambda: run.server.next_seq.get(100, 0) > 20, "the late one has its share")
    go_on(lambda: twin.poll() is not None, "the twin gave up")
    go_on(lambda: len(run.server.peers) == 16, "the dead one was missed")
    missing = sum(p.missing for p in run.server.credit.gone.values())
    run.take_steps(10)
    run.finish()
    assert twin.wait(5) == EXIT_USAGE
    assert "sampler_id 3 is in use" in (run.folder / "sampler3.log").read_text()
    assert late.wait(5) == 0
    assert samplers.wait(10) == 0
    assert missing <= 2
    assert run.granted == sum(run.server.next_seq.values()) + run.server.lost


# ---- the network ----------------------------------------------------------------------------------------------------


class Proxy:
    """A bad line to a port, on a thread of its own: delays, splits, resets, and a `cut` that holds everything back."""

    def __init__(self, to_port: int, seed: int, *, max_delay_s=0.0, reset=0.0) -> None:
        self.to_port, self.port, self.rng = to_port, free_port(), random.Random(seed)
        self.max_delay_s, self.reset = max_delay_s, reset
        self.cut, self.num_resets, self.num_chunks = False, 0, 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.go, daemon=True)
        self.thread.start()

    def go(self):
        self.loop.create_task(asyncio.start_server(self.meet, "127.0.0.1", self.port))
        self.loop.run_forever()

    async def hold(self):
        while self.cut:
            await asyncio.sleep(0.02)

    async def meet(self, reader, writer):
        await self.hold()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.to_port)
        except OSError:
            writer.transport.abort()
            return
        both = (writer, far_writer)
        ways = [self.carry(reader, far_writer), self.carry(far_reader, writer)]
        _, left = await asyncio.wait(
            [self.loop.create_task(way) for way in ways], return_when=asyncio.FIRST_COMPLETED
        )
        for task in left:
            task.cancel()
        for end in both:
            end.transport.abort()  # a reset: what is under way is gone

    async def carry(self, reader, writer):
        try:
            while chunk := await reader.read(1 << 16):
                await asyncio.sleep(self.rng.uniform(0, self.max_delay_s))
                while chunk:
                    size = self.rng.randint(1, len(chunk))
                    await self.hold()
                    writer.write(chunk[:size])
                    await writer.drain()
                    chunk = chunk[size:]
                    self.num_chunks += 1
                    if self.rng.random() < self.reset:
                        self.num_resets += 1
                        return
        except OSError:
            pass

    def close(self):
        self.loop.call_soon_threadsafe(self.end)
        self.thread.join(5)

    def end(self):
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)


def proxy(run, seed, **faults):
    run.proxies.append(Proxy(run.port, seed, **faults))
    return run.proxies[-1]


def test_resets_splits_and_delays_lose_no_group_and_repeat_none(run):
    run.start(2, groups_per_step=6)
    lines = [proxy(run, i, max_delay_s=0.2, reset=0.02) for i in range(3)]
    samplers = [run.sampler(i, batch=3, port=line.port) for i, line in enumerate(lines)]
    run.take_steps(16)
    resets = sum(line.num_resets for line in lines)
    LOG.warning(
        f"{resets} resets, {sum(line.num_chunks for line in lines)} pieces, {dict(run.server.dropped)}"
    )
    for line in lines:
        line.reset = 0.0
    calm = time.monotonic()
    wait_until(
        lambda: [p.last_seen > calm for p in run.server.peers.values()] == [True] * 3,
        "all are connected again",
    )
    run.finish()
    assert resets > 5
    assert [s.wait(10) for s in samplers] == [0, 0, 0]
    assert set(run.server.dropped) <= {"stale", "unused"}


def test_a_partition_that_heals_costs_nothing_and_one_that_does_not_gives_its_credit_to_others(run):
    run.start(0, groups_per_step=3)
    lines = [proxy(run, i) for i in range(3)]
    waits = [30.0, 30.0, 3.0]
    samplers = [
        run.sampler(i, batch=1, speed=10, port=line.port, wait_timeout_s=wait)
        for i, (line, wait) in enumerate(zip(lines, waits, strict=True))
    ]
    run.take_steps(5)
    wait_until(lambda: all(i in run.server.peers for i in range(3)), "all are there")
    for line in lines[1:]:
        line.cut = True
    cut = time.monotonic()
    threading.Timer(4.0, lambda: setattr(lines[1], "cut", False)).start()
    seen = run.server.next_seq[1]
    run.take_steps(5)
    stood_s = time.monotonic() - cut
    run.take_steps(15)
    LOG.warning(
        f"5 steps in {stood_s:.1f} s, missing {[p.missing for p in run.server.credit.gone.values()]}"
    )
    wait_until(lambda: samplers[2].poll() is not None, "the lonely one gives up")
    assert run.server.credit.gone.keys() == {2}
    run.finish()
    assert samplers[2].poll() == EXIT_RETRY
    assert "no sign of life" in (run.folder / "sampler2.log").read_text()
    assert [s.wait(5) for s in samplers[:2]] == [0, 0]
    assert stood_s < 10
    assert run.server.next_seq[1] > seen + 3  # back at work
    assert set(run.server.dropped) <= {"unused"}


# ---- kill -9 ----------------------------------------------------------------------------------------------------------


def test_a_hundred_kills_of_learner_and_samplers_leave_each_group_with_one_fate(run):
    quick, rng = 0.1, random.Random(1)
    learner = [sys.executable, HERE / "fake_learner.py", run.folder, run.port, 3, 2, 3, 0.02, quick]

    def start(name):
        if name == "learner":
            return run.spawn(name, learner)
        options = {"quicken": quick, "filter_rounds": 4, "speed": 200, "batch": 3}
        return run.sampler(int(name[-1]), **options)

    def log_of(name):
        return (run.folder / f"{name}.log").read_text()[-3000:]

    alive = {name: start(name) for name in ("learner", "sampler0", "sampler1", "sampler2")}
    kills = collections.Counter()
    for _ in range(100):
        time.sleep(rng.choice([0.02, 0.1, 0.2, 0.3, 0.5]))
        victims = [["learner"], ["sampler0"], ["sampler1"], ["sampler2"], ["learner", "sampler1"]]
        for name in rng.choice(victims):
            assert alive[name].poll() is None, log_of(name)
            alive[name].send_signal(signal.SIGKILL)
            alive[name].wait()
            kills[name] += 1
            alive[name] = start(name)
    time.sleep(2.0)
    (run.folder / "enough").touch()
    assert {name: p.wait(15) for name, p in alive.items()} == dict.fromkeys(alive, 0), log_of(
        "learner"
    )
    totals = audit(run.folder)
    LOG.warning("%s %s", dict(kills), totals)
    assert totals["restarts"] >= 20
    assert totals["undone"] > 0
    assert totals["steps"] > 50
    assert totals["dropped_filtered"] > 20
    ids = [
        tuple(map(int, group_id.split(":")))
        for row in surviving(read_lines(run.folder / "ledger.jsonl"))
        for group_id in row["trained"]
    ]
    weights = json.loads((run.folder / "checkpoint.json").read_text())
    assert weights["num"] == len(ids) == 3 * totals["steps"]
    assert weights["sum"] == sum(i * 1_000_003 + seq for i, seq in ids)
