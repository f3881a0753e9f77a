"""A sampler whose published adapter is damaged, foreign or older keeps the last good one, says so, and gives up with 2."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file, save_file

from splitgrpo import demo, reload, sampler
from splitgrpo.adapters import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    Publisher,
    adapter_parameters,
    base_digest,
    install_adapter,
)
from splitgrpo.admission import ServerPlan
from splitgrpo.client import RunFinished
from splitgrpo.config import PeerTimeout, SamplerSettings, SettingsError, agreed_settings
from splitgrpo.files import sha256_file, write_json
from splitgrpo.models import add_lora, attach_adapter, load_base, lora_config
from splitgrpo.pointer import POINTER, AdapterError, read_pointer
from splitgrpo.process import Stopped
from splitgrpo.reload import Failures, read_newest
from splitgrpo.sampler import Sampler
from splitgrpo.server import GroupServer
from splitgrpo.transport import make_key
from splitgrpo.warmstart import save_model
from splitgrpo.zero import free_port

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("test.reload")


def values(lineage: int, version: int, model) -> dict[str, torch.Tensor]:
    """An adapter that follows from its version."""
    generator = torch.Generator().manual_seed(lineage * 1000 + version)
    return {
        k: torch.randn(p.shape, generator=generator) for k, p in adapter_parameters(model).items()
    }


class Run:
    """A run folder with its publisher, and a sampler's adapter part with an engine that only installs."""

    def __init__(self, folder: Path, model, digest: str, run_id: str = "run") -> None:
        self.folder, self.model = folder, model
        (folder / "adapters").mkdir(parents=True)
        self.publisher = Publisher(
            folder, run_id, 1, "tiny", digest, "float32", lora_config(model), keep=4
        )
        self.publish(0)

    def publish(self, version: int, lineage: int = 1, **fields) -> Path:
        publisher = replace(self.publisher, lineage=lineage, **fields)
        pointer = publisher.publish(version, values(lineage, version, self.model))
        return self.folder / "adapters" / pointer.folder

    def point(self, **fields) -> None:
        """Change what latest.json says."""
        pointer = msgspec.structs.replace(read_pointer(self.folder), **fields)
        write_json(self.folder / POINTER, msgspec.to_builtins(pointer))

    def sampler(self, reload_failures: int = 3) -> Sampler:
        made = Sampler.__new__(Sampler)
        made.settings = SamplerSettings(reload_failures=reload_failures, wait_timeout_s=5.0)
        made.stop, made.log, made.run_dir = (
            SimpleNamespace(raise_if_set=lambda: None),
            LOG,
            self.folder,
        )
        made.failures, made._looked = Failures(reload_failures, LOG), 0.0
        made.client = SimpleNamespace(bump=lambda status: None)
        made.adapter = read_newest(self.folder)
        model = attach_adapter(tiny_model(), made.adapter)
        made.engine = SimpleNamespace(install=lambda a: install_adapter(model, a), model=model)
        return made


def holds(made: Sampler, lineage: int, version: int) -> None:
    """Compare every weight in use, bit for bit."""
    pointer = made.adapter.pointer
    assert (pointer.lineage, pointer.version) == (lineage, version)
    expected = values(lineage, version, made.engine.model)
    for key, parameter in adapter_parameters(made.engine.model).items():
        assert torch.equal(parameter, expected[key])
    assert not made.engine.model.training


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "RETRY_S", 0.002)
    base = tiny_model()
    digest = base_digest(base)
    return Run(tmp_path / "run", add_lora(base, rank=4, alpha=8, seed=0), digest)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def reseal(run: Run, folder: Path, change) -> None:
    """Change the tensors and make all digests right again: only the content is wrong."""
    path = folder / WEIGHTS
    save_file(change(load_file(path)), path)
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())
    manifest["files"][WEIGHTS] = [path.stat().st_size, sha256_file(path)]
    write_json(folder / MANIFEST, manifest)
    run.point(sha256=sha256_file(path))


def foreign(path: Path) -> None:
    save_file({"transformer.h.0.weight": torch.ones(3, 3)}, path)


def other_rank(run: Run, folder: Path) -> None:
    shutil.rmtree(folder)
    model = add_lora(tiny_model(), rank=8, alpha=8, seed=0)
    publisher = replace(run.publisher, config=lora_config(model))
    publisher.publish(1, values(1, 1, model))


def again(run: Run, folder: Path, **fields) -> None:
    shutil.rmtree(folder)
    run.publish(1, **fields)


def other_alpha(run: Run, folder: Path) -> None:
    again(run, folder, config=replace(run.publisher.config, lora_alpha=99))


# What happened to version 1 while version 0 is in use; and what is said of it.
DAMAGE = {
    "weights removed": (lambda r, f: (f / WEIGHTS).unlink(), "cannot read .*No such file"),
    "weights truncated": (lambda r, f: os.truncate(f / WEIGHTS, 1000), "1000 bytes with sha256"),
    "weights empty": (lambda r, f: os.truncate(f / WEIGHTS, 0), "0 bytes with sha256"),
    "weights flipped": (lambda r, f: flip(f / WEIGHTS), "the manifest says"),
    "configuration flipped": (lambda r, f: flip(f / CONFIG), "the manifest says"),
    "manifest empty": (lambda r, f: os.truncate(f / MANIFEST, 0), "cannot read .*manifest"),
    "a foreign file": (lambda r, f: foreign(f / WEIGHTS), "the manifest says"),
    "foreign keys": (lambda r, f: reseal(r, f, lambda t: {"h.0.weight": torch.ones(3)}), "28 LoRA keys missing"),
    "a NaN": (lambda r, f: reseal(r, f, lambda t: t | {min(t): t[min(t)] * float("nan")}), "is not finite"),
    "whole numbers": (lambda r, f: reseal(r, f, lambda t: {k: v.int() for k, v in t.items()}), "torch.int32"),
    "a missing version": (lambda r, f: r.point(version=9, folder="v000009.L1"), r"v000009\.L1.*No such file"),
    "the folder removed": (lambda r, f: shutil.rmtree(f), "cannot read"),
    "another version's folder": (lambda r, f: r.point(folder="v000000.L1"), "is of another version or run"),
    "another run": (lambda r, f: r.point(run_id="other"), "is of run other, this sampler works for run run"),
    "a damaged pointer": (lambda r, f: (r.folder / POINTER).write_text("{"), "cannot read .*latest"),
    "no pointer": (lambda r, f: (r.folder / POINTER).unlink(), "is gone: was the run folder removed"),
    "another rank": (other_rank, r"expected \(4, 32\)"),
    "another alpha": (other_alpha, "lora_alpha is 99, this model has 8"),
    "another base": (lambda r, f: again(r, f, base_digest="0" * 64), "base_digest is 000000000000.*another base"),
    "another dtype": (lambda r, f: again(r, f, base_dtype="bfloat16"), "base_dtype is bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_the_last_good_version_stays_in_use_and_the_sampler_gives_up(run, what, caplog):
    made = run.sampler()
    break_it, reason = DAMAGE[what]
    break_it(run, run.publish(1))
    with pytest.raises(SettingsError, match=rf"(?s)3 reloads .*--reload_failures.*{reason}"):
        made.reload_adapter((1, 1))
    holds(made, 1, 0)
    said = [r.getMessage() for r in caplog.records if "not loaded" in r.getMessage()]
    assert len(said) == 1  # of three failures for one reason
    assert said[0].startswith("adapter not loaded (1 of at most 3): ")


@pytest.mark.parametrize("what", DAMAGE)
def test_a_repaired_pointer_or_a_later_version_is_taken_and_the_count_begins_anew(
    run, what, caplog
):
    caplog.set_level(logging.INFO)
    made = run.sampler()
    break_it, _ = DAMAGE[what]
    for version in (1, 11):  # twice two failures are not four in a row
        folder = run.publish(version)
        if version == 1:
            break_it(run, folder)
        else:
            (folder / WEIGHTS).unlink()
        assert made._reload((1, version)) is None
        assert made._reload((1, 0)) is True  # what it holds is enough: it goes on
        assert made.failures.num == 2
        run.publish(version + 1)
        assert made._reload((1, version + 1)) is True
        holds(made, 1, version + 1)
        assert made.failures.num == 0
    assert f"adapter v{12:06d}.L1 is in use after 2 failed reloads" in caplog.text


def test_an_older_version_of_the_same_lineage_is_not_taken(run):
    for version in (1, 2, 3):
        run.publish(version)
    made = run.sampler()
    run.publish(2)
    with pytest.raises(SettingsError, match=r"went back from v000003\.L1 to v000002\.L1, which is"):
        made.reload_adapter((1, 4))
    holds(made, 1, 3)


def test_a_new_lineage_is_waited_for_although_its_version_is_lower(run):
    for version in range(11):
        run.publish(version)
    made = run.sampler()
    assert made._reload((1, 10)) is True
    assert made._reload((2, 7)) is None  # granted by a learner that is back at version 7
    holds(made, 1, 10)
    waited = threading.Timer(0.2, run.publish, [7], {"lineage": 2})
    waited.start()
    made.reload_adapter((2, 7))
    waited.join()
    holds(made, 2, 7)
    assert made.failures.num == 0
    run.publish(10, lineage=1)  # the learner that died is not dead
    assert made._reload((2, 8)) is None
    holds(made, 2, 7)


def test_waiting_ends_by_a_signal_and_by_the_time_out_which_say_what_was_looked_for(run):
    made = run.sampler()
    made.settings = replace(made.settings, wait_timeout_s=0.05)
    with pytest.raises(PeerTimeout, match=r"for adapter version 5: .*names no such version"):
        made.reload_adapter((1, 5))

    def stopped():
        raise Stopped("SIGTERM")

    made.stop = SimpleNamespace(raise_if_set=stopped)
    with pytest.raises(Stopped):
        made.reload_adapter((1, 5))


def test_the_first_adapter_is_retried_as_well(run, caplog):
    made = run.sampler()
    del made.adapter
    flip(run.publish(1) / WEIGHTS)
    assert made._first_adapter() is None
    assert made._first_adapter() is None
    with pytest.raises(SettingsError, match="3 reloads"):
        made._first_adapter()
    assert caplog.text.count("not loaded") == 1
    run.publish(2)
    assert made._first_adapter().pointer.version == 2


def test_a_run_that_is_finished_is_waited_for_since_a_learner_may_go_on_with_it(run):
    made = run.sampler()
    run.publish(2)
    run.point(done=True)
    assert made._first_adapter() is None
    assert "is finished; the learner goes on with it by --resume" in made._looked_for()
    run.point(done=False)
    assert made._first_adapter().pointer.version == 2


def test_a_sampler_that_waits_reads_in_the_folder_that_the_run_is_finished(run):
    made = run.sampler()
    made._raise_if_over()
    run.point(done=True)
    made._raise_if_over()  # it has just looked
    made._looked = 0.0
    with pytest.raises(RunFinished):
        made._raise_if_over()
    (run.folder / "latest.json").write_text("{")
    made._looked = 0.0
    made._raise_if_over()


def test_a_failure_is_said_at_once_when_its_reason_changes_and_then_every_ten_seconds(
    monkeypatch, caplog
):
    now = [1000.0]
    monkeypatch.setattr(reload, "time", SimpleNamespace(monotonic=lambda: now[0]))
    failures = Failures(1000, LOG)

    def fail(reason: str, times: int) -> None:
        for _ in range(times):
            failures.count(AdapterError(reason))
            now[0] += 0.5

    fail("a", 60)  # 30 s
    fail("b", 10)
    fail("a", 1)
    failures.clear("v")
    fail("a", 1)
    said = Counter(r.getMessage()[-1] for r in caplog.records if "not loaded" in r.getMessage())
    assert said == {"a": 3 + 1 + 1, "b": 1}


# ---- the real program -----------------------------------------------------------------------------


def test_a_real_sampler_waits_for_a_repair_and_ends_with_2_without_one(tmp_path):
    tokenizer = demo.build_tokenizer()
    path = tmp_path / "model"
    save_model(demo.build_model(tokenizer, seed=0), tokenizer, path)
    base = load_base(str(path), torch.float32)
    digest = base_digest(base)
    run = Run(tmp_path / "run", add_lora(base, rank=4, alpha=8, seed=0), digest, "live")
    given = {"model_path": str(path), "data": "arithmetic", "port": free_port(), "group_size": 4, "batch_size": 4,
             "max_new_tokens": 4, "max_prompt_tokens": 48, "max_steps": 100, "reload_failures": 10, "num_threads": 1,
             "lora_path": str(run.folder), "wait_timeout_s": 30.0}  # fmt: skip
    digest = sha256_file(run.folder / "adapters" / "v000000.L1" / WEIGHTS)
    plan = ServerPlan(run_id="live", lineage=1, settings=agreed_settings(SamplerSettings(**given)), groups_per_step=1,
                      max_staleness=1, max_steps=100, start_version=0, cursor={}, peer_timeout_s=30.0,
                      check_group=lambda group: None, old_digests={0: digest})  # fmt: skip
    server = GroupServer("127.0.0.1", given["port"], make_key(run.folder / "run.key"), plan, LOG)
    command = [sys.executable, "sampling_worker.py"]
    command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
    flip(run.folder / "adapters" / "v000000.L1" / WEIGHTS)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
    said = lambda: (tmp_path / "log").read_text()  # noqa: E731

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in said():
            assert process.poll() is None, said()
            assert time.monotonic() < deadline, said()
            time.sleep(0.05)

    try:
        wait_for("adapter not loaded (1 of at most 10)")
        flip(run.folder / "adapters" / "v000000.L1" / WEIGHTS)  # and all is well again
        assert server.take(1, 0, 30.0)[0].group.policy_version == 0
        weights = run.publish(1) / WEIGHTS
        content, digest = weights.read_bytes(), sha256_file(weights)
        os.truncate(weights, 100)
        server.set_version(1, digest)
        wait_for("v000001.L1/adapter_model.safetensors: 100 bytes with sha256")
        weights.write_bytes(content)
        while (group := server.take(1, 1, 30.0)[0].group).policy_version == 0:
            pass  # sampled before
        assert group.adapter_digest == digest
        wait_for("adapter v000001.L1 is in use after")
        shutil.rmtree(run.publish(2))
        server.set_version(2, "0" * 64)
        assert process.wait(30) == 2
        assert "10 reloads of the adapter in a row failed" in said()
        assert "last: cannot read" in said()
        assert "Traceback" not in said()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        server.close(finished=False, reason="test over")
