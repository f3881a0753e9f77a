"""Ranks that die, hang, stand still or find a stranger on their port: named by the others, and all end in seconds."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from splitgrpo.rankjoin import Line
from splitgrpo.rankwatch import Peer, RankWatch
from splitgrpo.zero import free_port

SCRIPT = Path(__file__).with_name("rank_script.py")


class Ranks:
    """Several ranks started by hand, so that no launcher ends those that are left."""

    def __init__(
        self, folder: Path, count: int, mode: str = "plain", port: int = 0, stall_s: float = 60
    ) -> None:
        self.folder, self.port = folder, port or free_port()
        self.processes = []
        for rank in range(count):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "OMP_NUM_THREADS": "1",
            }
            with (folder / f"log{rank}").open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), str(folder), mode, str(stall_s)],
                        env=env, stdout=file, stderr=file,
                    )
                )  # fmt: skip

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_turning(self, timeout_s: float = 30) -> "Ranks":
        """Wait until every rank works."""
        deadline = time.monotonic() + timeout_s
        while not all((self.folder / f"turned{r}").exists() for r in range(len(self.processes))):
            assert time.monotonic() < deadline, self.texts()
            time.sleep(0.05)
        time.sleep(1.2)  # so that a line of each has been heard
        return self

    def order(self, rank: int, what: str) -> None:
        (self.folder / f"rank{rank}").write_text(what)

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    def codes(self, *ranks: int, within_s: float) -> list[int]:
        deadline = time.monotonic() + within_s
        return [self.processes[r].wait(max(0.1, deadline - time.monotonic())) for r in ranks]

    def text(self, rank: int) -> str:
        return (self.folder / f"log{rank}").read_text()

    def texts(self) -> str:
        return "\n".join(self.text(r) for r in range(len(self.processes)))

    def check_one_line(self, rank: int, pattern: str) -> None:
        """A rank said this, once, and nothing else."""
        lines = self.text(rank).splitlines()
        assert len(lines) == 1, self.text(rank)
        assert re.search(pattern, lines[0]), lines[0]


MODES = ["plain", "torch"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_the_others_which_end_in_seconds(tmp_path, victim, mode):
    with Ranks(tmp_path, 3, mode) as ranks:
        ranks.wait_turning().signal(victim, signal.SIGKILL)
        others = [r for r in range(3) if r != victim]
        assert ranks.codes(*others, within_s=5) == [75, 75], ranks.texts()
        for rank in others:
            ranks.check_one_line(rank, f"rank {victim} is gone: .*last seen at: step 1.*--resume")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_by_the_others_and_ends_when_it_is_woken(tmp_path, victim, mode):
    with Ranks(tmp_path, 2, mode) as ranks:
        ranks.wait_turning().signal(victim, signal.SIGSTOP)
        assert ranks.codes(1 - victim, within_s=8) == [75], ranks.texts()
        ranks.check_one_line(1 - victim, rf"rank {victim} gave no sign of life for [34] s")
        ranks.signal(victim, signal.SIGCONT)
        assert ranks.codes(victim, within_s=5) == [75], ranks.texts()


@pytest.mark.parametrize(
    ("order", "mode"), [("stick", "plain"), ("stick", "torch"), ("skip", "torch")]
)
def test_a_stuck_rank_or_a_skipped_collective_is_told_with_what_each_did_last(
    tmp_path, order, mode
):
    with Ranks(tmp_path, 2, mode, stall_s=4) as ranks:
        ranks.wait_turning().order(1, order)
        assert ranks.codes(0, 1, within_s=15) == [75, 75], ranks.texts()
        doing = "thinking" if order == "stick" else "turning"
        for rank in (0, 1):
            ranks.check_one_line(
                rank, rf"no progress for 4 s.*rank 0 has been at 'step 1: turning' for \d s; rank 1 has been at "
                f"'step .: {doing}' for",
            )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_an_error_on_one_rank_ends_all_with_its_code_and_one_traceback(tmp_path, mode):
    with Ranks(tmp_path, 2, mode) as ranks:
        ranks.wait_turning().order(1, "raise")
        assert ranks.codes(0, 1, within_s=10) == [70, 70], ranks.texts()
        assert "no such luck" in ranks.text(1)
        ranks.check_one_line(0, "rank 1 ended with code 70, its own lines say why")


def test_ranks_stopped_together_go_on_together(tmp_path):
    with Ranks(tmp_path, 2) as ranks:
        ranks.wait_turning()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            ranks.signal(0, number)
            ranks.signal(1, number)
            time.sleep(5)
        assert [p.poll() for p in ranks.processes] == [None, None], ranks.texts()


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_has_finished_is_not_missed(tmp_path, first):
    with Ranks(tmp_path, 2) as ranks:
        ranks.wait_turning().order(first, "finish")
        assert ranks.codes(first, within_s=5) == [0]
        time.sleep(4)
        ranks.order(1 - first, "finish")
        assert ranks.codes(1 - first, within_s=5) == [0], ranks.texts()
        assert ranks.texts().strip() == ""


def test_a_signal_to_a_rank_in_a_collective_ends_it_in_ten_seconds(tmp_path):
    """Python's own handler would wait for the collective, half an hour."""
    with Ranks(tmp_path, 2, "torch") as ranks:
        ranks.wait_turning().order(1, "skip")
        started = time.monotonic()
        ranks.signal(0, signal.SIGTERM)
        assert ranks.codes(0, within_s=11)[0] in (75, 143)
        assert time.monotonic() - started < 10


def silent(sock: socket.socket) -> None:
    time.sleep(30)


def http(sock: socket.socket) -> None:
    sock.recv(1000)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    sock.close()


@pytest.mark.parametrize("answer", [silent, http])
def test_a_stranger_on_the_port_ends_all_ranks_with_2_and_is_named(
    tmp_path, answer: Callable[[socket.socket], None]
):
    def serve() -> None:
        while True:
            sock, _ = server.accept()
            threading.Thread(target=answer, args=[sock], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        with Ranks(tmp_path, 2, port=port) as ranks:
            assert ranks.codes(0, 1, within_s=10) == [2, 2], ranks.texts()
            for rank in (0, 1):
                ranks.check_one_line(rank, f"127.0.0.1:{port}, .*--master_port")
            assert f"held by process {os.getpid()}" in ranks.text(0)


def test_two_runs_on_one_port_do_not_mix(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Ranks(tmp_path / "a", 2, "torch") as mine:
        mine.wait_turning()
        with Ranks(tmp_path / "b", 2, port=mine.port) as other:
            assert other.codes(0, 1, within_s=12) == [2, 2], other.texts()
        assert [p.poll() for p in mine.processes] == [None, None], mine.texts()


def test_ranks_that_load_longer_than_a_step_may_take_are_not_stuck():
    watch = RankWatch(0, {}, logging.getLogger("test"))
    watch.peers[1] = Peer(moved_s=time.monotonic() - 100)
    watch.stall_s = 4
    assert watch._stuck(time.monotonic())
    watch.expect_progress(4)
    assert not watch._stuck(time.monotonic())


@pytest.mark.parametrize("nonsense", [b"[" * 50_000 + b"\n", b"{\n", b"x" * 100_000])
def test_nonsense_on_a_line_between_ranks_closes_it(nonsense):
    one, other = socket.socketpair()
    with one, other:
        line = Line(other)
        one.sendall(nonsense)
        one.shutdown(socket.SHUT_WR)
        while not (got := line.receive())[1]:
            assert not got[0]
        assert not got[0]
