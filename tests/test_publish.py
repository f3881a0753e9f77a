"""A publisher that is killed, loses power or finds no room: readers get the version before or the new one, whole."""

import errno
import itertools
import mmap
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from failpoints import can_mount, dies_at, fork, mount_small, remount, wait

from splitgrpo import files, reload
from splitgrpo.adapters import (
    Adapter,
    Publisher,
    adapter_parameters,
    base_digest,
    install_adapter,
    read_adapter,
)
from splitgrpo.files import remove_leftovers, save_tensors, write_folder, write_json
from splitgrpo.models import add_lora, attach_adapter, lora_config
from splitgrpo.pointer import Pointer, read_pointer
from splitgrpo.reload import read_newest
from splitgrpo.runfolder import next_lineage

BASE = tiny_model()
DIGEST = base_digest(BASE)
MODEL = add_lora(BASE, rank=4, alpha=8, seed=0)
SHAPES = {k: p.shape for k, p in adapter_parameters(MODEL).items()}


def weights(lineage: int, version: int) -> dict[str, torch.Tensor]:
    """An adapter whose every number follows from its version."""
    generator = torch.Generator().manual_seed(lineage * 1_000_000 + version)
    return {k: torch.randn(shape, generator=generator) for k, shape in SHAPES.items()}


@dataclass
class Run:
    """A run folder, the publisher of the learner that has it now, and a sampler that follows."""

    folder: Path
    publisher: Publisher = field(init=False)
    model: object = field(init=False)
    held: Adapter = field(init=False)

    def __post_init__(self) -> None:
        (self.folder / "adapters").mkdir()
        self.publisher = Publisher(
            self.folder, "run", 1, "tiny", DIGEST, "float32", lora_config(MODEL), keep=2
        )
        self.publish(0)
        self.held = read_newest(self.folder)
        self.model = attach_adapter(tiny_model(), self.held)

    def publish(self, version: int) -> Pointer:
        return self.publisher.publish(version, weights(self.publisher.lineage, version))

    def follow(self) -> tuple[int, int]:
        """Reload as a sampler does and look at every weight; (lineage, version) held from then on."""
        adapter = read_newest(self.folder, self.held)
        if adapter is not None:
            install_adapter(self.model, adapter)
            self.held = adapter
        pointer = self.held.pointer
        expected = weights(pointer.lineage, pointer.version)
        for key, parameter in adapter_parameters(self.model).items():
            assert torch.equal(parameter, expected[key]), (pointer, key)
        return pointer.lineage, pointer.version

    def restart(self) -> None:
        """What a new learner does with the folder as it finds it."""
        for folder in (self.folder, self.folder / "adapters"):
            remove_leftovers(folder)
            assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
        self.publisher = replace(self.publisher, lineage=next_lineage(self.folder))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_two_hundred_kills_of_a_publisher_never_leave_a_version_that_loads_wrongly(run):
    moments = random.Random(0)
    board = mmap.mmap(-1, 16)  # shared with the children: a version begun, and the last one done
    begun, done = (memoryview(board).cast("q")[i : i + 1] for i in (0, 1))
    outcomes = {"before": 0, "new": 0}
    for _ in range(200):
        run.restart()
        held, first = run.follow(), max(0, run.held.pointer.version - moments.randrange(3))
        begun[0] = done[0] = -1

        def publish_on(first=first):
            for version in itertools.count(first):
                begun[0] = version
                run.publish(version)
                done[0] = version

        pid = fork(publish_on)
        deadline = time.monotonic() + 30
        while begun[0] < 0 and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(moments.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL
        lineage = run.publisher.lineage
        before = (lineage, done[0]) if done[0] >= 0 else held
        found = run.follow()
        assert found in (before, (lineage, begun[0]))
        outcomes["before" if found == before else "new"] += 1
    assert min(outcomes.values()) >= 1, outcomes
    run.restart()
    run.publish(5)
    assert run.follow() == (run.publisher.lineage, 5)
    assert len(list((run.folder / "adapters").iterdir())) == 2


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_publisher_may_die_between_any_two_system_calls(run, power_cut):
    run.publish(1)
    for n in itertools.count(1):
        before = run.follow()
        run.restart()
        new = (run.publisher.lineage, 7)
        whole = dies_at(lambda: run.publish(7), run.folder, n, power_cut=power_cut)
        found = run.follow()
        assert found == new if whole else found in (before, new), n
        if whole:
            break
    assert n > 25  # so many places were tried
    assert len(list((run.folder / "adapters").iterdir())) == 2


def test_a_lineage_is_not_used_twice_where_no_pointer_names_it_yet(run):
    """Else a learner would point at the folder that its dead forerunner left under the same name."""
    run.publisher = replace(run.publisher, lineage=4)
    for n in itertools.count(1):
        if (run.folder / "adapters" / "v000003.L4").exists():
            break
        assert not dies_at(lambda: run.publish(3), run.folder, n)
    assert read_pointer(run.folder).lineage == 1
    assert next_lineage(run.folder) == 5
    run.restart()
    run.publish(3)
    assert run.follow() == (5, 3)


# ---- no room --------------------------------------------------------------------------------------


def fill(folder: Path, leave: int) -> Path:
    """Take all room of a file system but `leave` bytes."""
    ballast = folder / "ballast"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - leave))
    return ballast


def failure_of(work) -> int | None:
    """The number of the OSError that `work` raises, None if it does not."""
    try:
        work()
    except OSError as error:
        return error.errno
    return None


def names(run: Run) -> set[str]:
    return {str(p.relative_to(run.folder)) for p in run.folder.rglob("*")} - {"ballast"}


@pytest.mark.skipif(not can_mount(), reason="no file system of one's own on this machine")
def test_on_a_full_disk_a_publish_fails_whole_and_works_once_there_is_room(tmp_path):
    def in_child():
        mount_small(tmp_path)
        run = Run(tmp_path)
        failed = 0
        for version, leave in enumerate(range(0, 100_000, 4096), start=1):
            kept, held = names(run), run.follow()
            ballast = fill(tmp_path, leave)
            if (code := failure_of(lambda v=version: run.publish(v))) is not None:
                assert code == errno.ENOSPC
                failed += 1
                assert run.follow() in (held, (1, version))
                if run.follow() == held:
                    left = names(run) - kept  # at most the new folder, whole, with no pointer to it
                    assert not left or {p.split("/")[1] for p in left} == {f"v{version:06d}.L1"}
            ballast.unlink()
            run.publish(version)
            assert run.follow() == (1, version)
            assert len(os.listdir(tmp_path / "adapters")) == 2
        assert 5 <= failed < version - 2, (failed, version)

        remount(tmp_path, read_only=True)
        with pytest.raises(OSError, match="Read-only") as caught:
            run.publish(version + 1)
        assert caught.value.errno == errno.EROFS
        assert run.follow() == (1, version)
        remount(tmp_path, read_only=False)
        run.publish(version + 1)
        assert run.follow() == (1, version + 1)

    assert wait(fork(in_child)) == 0


def test_a_file_above_the_allowed_size_is_an_os_error_and_leaves_nothing(run):
    """What a full disk does, where no disk can be filled."""

    def in_child():
        kept, free = names(run), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        for limit in (0, 100, 5000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                with pytest.raises(OSError, match="File too large") as caught:
                    run.publish(1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, free)
            assert caught.value.errno == errno.EFBIG
            assert run.follow() == (1, 0)
            assert names(run) == kept
        run.publish(1)
        assert run.follow() == (1, 1)

    assert wait(fork(in_child)) == 0


def test_an_error_whose_number_is_not_told_is_an_os_error_too(tmp_path):
    with pytest.raises(OSError, match="No such file") as caught:
        save_tensors({"a": torch.ones(2)}, tmp_path / "none" / "a.safetensors")
    assert caught.value.errno == errno.ENOENT
    same = torch.ones(2)
    with pytest.raises(RuntimeError, match="share memory"):  # a bug of the caller's, no disk's
        save_tensors({"a": same, "b": same}, tmp_path / "a.safetensors")


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", object())

    def fails(path):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(files, "fsync", fails)
    with pytest.raises(OSError, match="input/output"):
        write_json(tmp_path / "a.json", 2)
    with pytest.raises(OSError, match="input/output"):
        write_folder(tmp_path / "folder", lambda folder: (folder / "x").write_text("x"))
    assert (tmp_path / "a.json").read_text() == "1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_an_earlier_try_could_not_remove_is_no_obstacle_and_what_is_not_ours_stays(tmp_path):
    aside = files.aside_of(tmp_path / "folder")
    aside.mkdir()
    (aside / "half").write_text("half")
    write_folder(tmp_path / "folder", lambda folder: (folder / "x").write_text("x"))
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["x"]
    (tmp_path / ".gitignore").write_text("*")
    (tmp_path / ".folder.123.aside").mkdir()
    (tmp_path / ".latest.json.123.aside").write_text("{")
    remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"folder", ".gitignore"}


# ---- readers beside a publisher -------------------------------------------------------------------


def test_files_removed_under_a_reader_are_no_failure_when_the_pointer_has_moved(run, monkeypatch):
    """Retention removes a version between the reading of the pointer and of its files."""
    run.publish(1)
    versions = iter([2, 3, 4, 5])
    moves = []

    def late(run_dir, pointer):
        if len(moves) < 2:  # two versions come, and with keep=2 the one that was named is gone
            moves.append([run.publish(next(versions)) for _ in range(2)])
            assert not (run_dir / "adapters" / pointer.folder).exists()
        return read_adapter(run_dir, pointer)

    monkeypatch.setattr(reload, "read_adapter", late)
    assert run.follow() == (1, 5)
    assert len(moves) == 2


def test_a_reader_beside_a_fast_publisher_always_gets_a_whole_version(run):
    def publish_on():
        for version in itertools.count(1):
            run.publish(version)

    pid = fork(publish_on)
    try:
        deadline, seen = time.monotonic() + 3, set()
        while time.monotonic() < deadline:
            seen.add(run.follow())
    finally:
        os.kill(pid, signal.SIGKILL)
        wait(pid)
    assert len(seen) > 20


def test_clocks_and_file_times_decide_nothing(run):
    for version, when in ((1, 4_070_908_800), (2, 1_000_000_000), (3, 0)):  # 2099, 2001, 1970
        run.publish(version)
        for path in run.folder.rglob("*"):
            os.utime(path, (when, when))
        assert run.follow() == (1, version)
    old, new = run.folder / "adapters" / "v000002.L1", run.folder / "adapters" / "v000003.L1"
    os.utime(old, (4_070_908_800, 4_070_908_800))
    os.utime(new, (0, 0))
    os.utime(run.folder / "latest.json", (0, 0))
    run.publish(4)
    assert run.follow() == (1, 4)
    assert {p.name for p in (run.folder / "adapters").iterdir()} == {"v000003.L1", "v000004.L1"}


def test_a_restarted_learners_lower_version_is_newer_and_outlives_the_higher_one(run):
    for version in (9, 10):
        run.publish(version)
    assert run.follow() == (1, 10)
    run.restart()
    run.publish(7)
    assert run.follow() == (2, 7)
    run.publish(8)
    assert {p.name for p in (run.folder / "adapters").iterdir()} == {"v000007.L2", "v000008.L2"}
    shutil.rmtree(run.folder / "adapters" / "v000007.L2")
    assert run.follow() == (2, 8)


def test_ten_thousand_reloads_take_no_memory_no_descriptor_and_no_parameter(run):
    both = [run.publish(version) for version in (1, 2)]
    page = os.sysconf("SC_PAGE_SIZE")

    def measure():
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * page
        return rss, len(os.listdir("/proc/self/fd")), sum(1 for _ in run.model.parameters())

    for i in range(10_000):
        adapter = read_adapter(run.folder, both[i % 2])
        install_adapter(run.model, adapter)
        if i == 499:
            first = measure()
    last = measure()
    assert last[0] - first[0] < 8e6, (first, last)
    assert last[1:] == first[1:]
    assert not run.model.training
    expected = weights(1, 2)
    for key, parameter in adapter_parameters(run.model).items():
        assert torch.equal(parameter, expected[key])
