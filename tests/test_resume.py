"""Going on from a checkpoint: the same weights bit for bit, the right checkpoint, and a clear word where it cannot be."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from failpoints import dies_at
from safetensors.torch import load_file
from test_step import make_job, run_jobs

from data import build_prompts, load_problems, worked_response
from splitgrpo import SCHEMA_VERSION, checkpoints, runfolder
from splitgrpo.config import DiskTrouble, LearnerSettings, SettingsError
from splitgrpo.demo import make_demo_model
from splitgrpo.files import sha256_file, write_json
from splitgrpo.ledger import audit, read_lines
from splitgrpo.pointer import Pointer, read_pointer
from splitgrpo.runfolder import (
    PatientWriter,
    check_unused,
    claim_run_folder,
    next_lineage,
    remove_run,
    rewind,
)
from splitgrpo.zero import free_port

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("test")


# ---- the engine's state -------------------------------------------------------------------------------------------


def add_schedule(job):
    config = json.loads(Path(job["ds_config"]).read_text())
    config["scheduler"] = {"type": "WarmupLR",
                           "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10}}  # fmt: skip
    Path(job["ds_config"]).write_text(json.dumps(config))


def three_jobs(folder, name, **options):
    """Four steps at once; two steps and a checkpoint; two more from it, in an engine that began with other weights."""
    whole, first, second = (
        make_job(folder, f"{name}-{part}", micro=4, **options)
        for part in ("whole", "first", "second")
    )
    for job in (whole, first, second):
        add_schedule(job)
    run = folder / f"{name}-run"
    (run / "checkpoints").mkdir(parents=True)
    whole |= {"steps": 4, "nan_steps": [1]}  # a skipped step: Adam's count is not the learner's
    first |= {"steps": 2, "nan_steps": [1], "save": str(run)}
    second |= {"start": 2, "steps": 4, "lora_seed": 9, "resume": str(run / "checkpoints" / "step_000002")}  # fmt: skip
    return [whole, first, second]


def check_same(found, name):
    (weights, rows), (_, before), (again, after) = (
        found[f"{name}-{part}"] for part in ("whole", "first", "second")
    )
    assert all(torch.equal(weights[k], again[k]) for k in again if k != "rng"), name
    assert sum(k.endswith("|exp_avg_sq") for k in again) > 0
    assert [r["grad_norm"] for r in rows[2:]] == [r["grad_norm"] for r in after]
    assert rows[1]["applied"] == before[1]["applied"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_from_a_checkpoint_are_those_of_one_run_bit_for_bit(tmp_path, ranks):
    cases = {
        "s0": {"stage": 0},
        "s1b": {"stage": 1, "bf16": True},
        "s2": {"stage": 2},
        "s2b": {"stage": 2, "bf16": True},
        "s2off": {"stage": 2, "bf16": True, "offload": True},
        "s3": {"stage": 3},
        "s3b": {"stage": 3, "bf16": True},
    }
    jobs = [job for name, options in cases.items() for job in three_jobs(tmp_path, name, **options)]
    found = run_jobs(jobs, ranks=ranks)
    for name in cases:
        check_same(found, name)


def test_a_checkpoint_of_two_ranks_is_gone_on_with_on_one_and_the_other_way_round(tmp_path):
    (tmp_path / "a").mkdir()
    jobs = three_jobs(tmp_path / "a", "x", stage=2)
    one, two = run_jobs(jobs[:1], ranks=1), run_jobs(jobs[1:2], ranks=2)
    assert len(two["x-first"][1]) == 2
    after = run_jobs([jobs[2] | {"out": str(tmp_path / "a" / "on1")}], ranks=1)
    check_close(one["x-whole"][0], after["on1"][0])
    shutil.rmtree(tmp_path / "a" / "x-run")
    (tmp_path / "a" / "x-run" / "checkpoints").mkdir(parents=True)
    run_jobs(jobs[1:2], ranks=1)
    after = run_jobs([jobs[2] | {"out": str(tmp_path / "a" / "on2")}], ranks=2)
    check_close(one["x-whole"][0], after["on2"][0])


def check_close(expected, found):
    for key, tensor in found.items():
        if "lora_" in key and "|" not in key:
            assert (tensor - expected[key]).norm() <= 1e-4 * expected[key].norm() + 1e-7, key


def test_the_random_state_of_each_rank_comes_back(tmp_path):
    jobs = three_jobs(tmp_path, "r")
    found = run_jobs(jobs[1:], ranks=2)
    state = load_file(tmp_path / "r-run" / "checkpoints" / "step_000002" / "state.safetensors")
    assert not torch.equal(state["rng|rank0"], state["rng|rank1"])
    assert torch.equal(found["r-second"][0]["rng"], state["rng|rank0"])


# ---- which checkpoint ---------------------------------------------------------------------------------------------


def write(run_dir, step, keep=5, **fields):
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    settings = {"data": "arithmetic", "seed": 0, "lora_rank": 32, "learning_rate": None}
    index = {"step": step, "lineage": 1, "run_id": "r", "base_digest": "d", "adam_step": step, "schedule": None,
             "cursor": {0: 4 * step}, "skipped": 0, "bad_in_row": 0, "elapsed_s": 1.0,
             "num_ranks": 1, "settings": settings}  # fmt: skip
    tensors = {"lora|k": torch.full((64,), float(step)), "rng|rank0": torch.get_rng_state()}
    return checkpoints.write_checkpoint(run_dir, tensors, keep, **(index | fields))


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "missing"])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "sha256sums"])
def test_the_newest_whole_checkpoint_is_found_and_the_damaged_one_named(
    tmp_path, caplog, name, how
):
    for step in (8, 9, 10000):
        write(tmp_path, step)
    damage(tmp_path / "checkpoints" / "step_010000" / name, how)
    path, index = checkpoints.find_checkpoint(tmp_path, LOG)
    assert (path.name, index.step, index.cursor) == ("step_000009", 9, {0: 36})
    assert "step_010000" in caplog.text
    assert not (tmp_path / "checkpoints" / "step_010000").exists()  # its number is free again
    write(tmp_path, 10000)


def test_no_whole_checkpoint_an_empty_folder_and_a_later_format_are_told_apart(tmp_path):
    with pytest.raises(SettingsError, match="holds no checkpoint"):
        checkpoints.find_checkpoint(tmp_path, LOG)
    path = write(tmp_path, 3)
    damage(path / "state.safetensors", "flipped")
    with pytest.raises(SettingsError, match=r"none of the 1 checkpoints.*is whole"):
        checkpoints.find_checkpoint(tmp_path, LOG)
    index = json.loads((path / "state.json").read_text())
    index |= {"schema_version": SCHEMA_VERSION + 1, "a_field_of_tomorrow": 1}
    (path / "state.json").write_text(json.dumps(index))
    with pytest.raises(SettingsError, match=f"has format {SCHEMA_VERSION + 1}, this program"):
        checkpoints.find_checkpoint(tmp_path, LOG)


def test_checkpoints_rotate_by_number_and_one_always_stays(tmp_path):
    for step in (0, 10, 9990, 10000):
        write(tmp_path, step, keep=2)
    assert [p.name for p in checkpoints.found_in(tmp_path)] == ["step_010000", "step_009990"]
    write(tmp_path, 10010, keep=1)
    assert [p.name for p in checkpoints.found_in(tmp_path)] == ["step_010010"]


def test_killed_between_any_two_system_calls_of_saving_one_whole_checkpoint_is_left(tmp_path):
    for n in range(1, 400):
        run = tmp_path / str(n)
        for step in (1, 2):
            write(run, step, keep=2)
        done = dies_at(lambda run=run: write(run, 3, keep=2), run, n)
        path, index = checkpoints.find_checkpoint(run, LOG)
        assert index.step in (2, 3)
        assert float(checkpoints.read_state(path)["lora|k"][0]) == index.step
        if done:
            assert index.step == 3
            break
    else:
        pytest.fail("saving never came to its end")
    assert n > 10


def test_another_run_is_refused_and_another_learning_rate_is_said(tmp_path, caplog):
    index = checkpoints.read_index(write(tmp_path, 1))
    with pytest.raises(
        SettingsError, match=r"--resume with another --seed 5 \(the checkpoint has 0\)"
    ):
        checkpoints.check_same_run(index, LearnerSettings(data="arithmetic", seed=5), LOG)
    with pytest.raises(SettingsError, match="--lora_rank 8"):
        checkpoints.check_same_run(index, LearnerSettings(data="arithmetic", lora_rank=8), LOG)
    with pytest.raises(SettingsError, match="another base model"):
        checkpoints.check_base(index, "other", "some/model")
    caplog.set_level("INFO")
    checkpoints.check_same_run(index, LearnerSettings(data="arithmetic", learning_rate=1e-4), LOG)
    assert "--learning_rate is 0.0001 now, was None" in caplog.text


def test_a_folder_that_holds_a_run_is_refused_and_cleared_when_told_so(tmp_path):
    folders = ("checkpoints/step_000001", "adapters/v000001.L3", "journal/step_000000.safetensors")
    for name in ("latest.json", "ledger.jsonl", *folders):
        check_unused(tmp_path)
        if name in folders:
            (tmp_path / name).mkdir(parents=True)
        else:
            (tmp_path / name).write_text("{}")
        with pytest.raises(
            SettingsError, match=r"--resume goes on with it, --overwrite removes it"
        ):
            check_unused(tmp_path)
        remove_run(tmp_path)
    assert next_lineage(tmp_path, 0) == 1
    assert not checkpoints.found_in(tmp_path)


def test_two_learners_on_one_folder_are_refused_until_the_first_is_gone(tmp_path):
    claim = "from splitgrpo.runfolder import claim_run_folder; claim_run_folder(sys.argv[1])"
    script = f"import sys, time; {claim}; print(1, flush=True); time.sleep(60)"
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout.readline() == b"1\n"
        for how in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(SettingsError, match="in use by another learner"):
                claim_run_folder(str(tmp_path), **how)
    finally:
        first.kill()
        first.wait()
    claim_run_folder(str(tmp_path))  # the lock of a dead process is none


def test_a_run_killed_while_it_was_removed_is_neither_gone_on_with_nor_taken_for_none(tmp_path):
    """Not even where its adapters are on another disk."""
    for n in range(1, 100):
        run, disk = tmp_path / str(n), tmp_path / f"disk{n}"
        for step in (1, 2):
            write(run, step)
        for name in ("v000001.L1", "v000002.L1"):
            (disk / name).mkdir(parents=True)
        (run / "adapters").symlink_to(disk)
        for name in ("latest.json", "ledger.jsonl", "metrics.jsonl"):
            (run / name).write_text("{}")
        if dies_at(lambda run=run: remove_run(run), run, n):
            check_unused(run)
            break
        if any((run / "adapters").iterdir()):
            with pytest.raises(SettingsError, match="holds an earlier run"):
                check_unused(run)
        if not (run / "latest.json").exists():
            with pytest.raises(SettingsError, match="holds no checkpoint"):
                checkpoints.find_checkpoint(run, LOG)
    else:
        pytest.fail("removing never came to its end")
    assert n > 5


def test_a_resumed_run_takes_back_what_was_reported_later_and_that_it_is_done(tmp_path):
    (tmp_path / "adapters" / "v000001.L3").mkdir(parents=True)
    assert next_lineage(tmp_path, 0) == 4
    assert next_lineage(tmp_path, 7) == 8
    pointer = Pointer(version=2, lineage=9, folder="v000002.L9", sha256="0", run_id="r", done=True)
    write_json(tmp_path / "latest.json", msgspec.to_builtins(pointer))
    (tmp_path / "done.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    rewind(tmp_path, 1)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert read_pointer(tmp_path) == msgspec.structs.replace(pointer, done=False)
    assert not (tmp_path / "done.json").exists()
    assert next_lineage(tmp_path, 7) == 10
    (tmp_path / "latest.json").write_text("{")  # as damaged as it likes: it is about to be replaced
    rewind(tmp_path, 1)
    assert next_lineage(tmp_path, 7) == 8


def test_a_checkpoint_that_an_earlier_try_has_written_is_no_obstacle(tmp_path, monkeypatch):
    path = write(tmp_path, 1)
    before = sha256_file(path / "state.safetensors")
    write(tmp_path, 1)
    assert sha256_file(path / "state.safetensors") == before


def test_a_full_disk_is_waited_for_and_given_up_with_what_to_do(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(runfolder, "AGAIN_S", 0.01)
    waits, answers = [], [OSError(28, "No space left on device")] * 3

    def write_it():
        if answers:
            raise answers.pop()
        return "written"

    patiently = PatientWriter("runs/x", 60.0, lambda: False, lambda: waits.append(1), LOG)
    assert patiently("save step 3", write_it) == "written"
    assert len(waits) == 3
    assert "cannot save step 3 in runs/x: [Errno 28] No space left on device" in caplog.text
    for limit_s, stop in ((0.05, False), (60.0, True)):
        answers[:] = [OSError(28, "No space left on device")] * 10**6
        patiently = PatientWriter("runs/x", limit_s, lambda stop=stop: stop, lambda: None, LOG)
        with pytest.raises(DiskTrouble, match="free the disk, then start again with --resume"):
            patiently("save step 3", write_it)


# ---- real workers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("resume") / "model"
    problems = load_problems("arithmetic", "train")
    return make_demo_model(out, 0, problems, build_prompts, worked_response)


class Run:
    """A learner and a sampler of one run folder, on a port of its own."""

    def __init__(self, model, run_dir, *flags):
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.ds_config = run_dir.parent / "ds.json"
        self.set_micro_batch(16)
        self.run_dir, self.started = run_dir, []
        self.shared = ["--model_path", str(model), "--data", "arithmetic", "--group_size", "8", "--max_new_tokens", "16",
                       "--max_prompt_tokens", "48", "--lora_rank", "8", "--lora_alpha", "16", "--num_threads", "1",
                       "--max_steps", "20", "--wait_timeout_s", "60", "--port", str(free_port()), *flags]  # fmt: skip

    def set_micro_batch(self, rows):
        config = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
                  "zero_optimization": {"stage": 2},
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}  # fmt: skip
        self.ds_config.write_text(json.dumps(config))

    def start(self, name, *command, env=None):
        env = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
        with (self.run_dir.parent / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, command[0], *self.shared, *command[1:]],
                cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def learner(self, *flags, script="training_worker.py", env=None):
        return self.start("learner", script, "--save_path", str(self.run_dir), "--ds_config", str(self.ds_config),
                          "--save_steps", "3", *flags, env=env)  # fmt: skip

    def sampler(self, *flags):
        return self.start("sampler", "sampling_worker.py", "--lora_path", str(self.run_dir), "--batch_size", "16",
                          "--device", "cpu", *flags)  # fmt: skip

    def log(self, name):
        return (self.run_dir.parent / f"{name}.log").read_text()

    def wait_for_step(self, step):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            rows = read_lines(self.run_dir / "metrics.jsonl")
            if rows and rows[-1]["step"] >= step:
                return
            time.sleep(0.005)
        pytest.fail(f"no step {step}: {self.log('learner')[-2000:]}")

    def adapter(self):
        return sha256_file(self.run_dir / "adapter" / "adapter_model.safetensors")

    def close(self):
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def runs(model, tmp_path):
    made = []

    def make(name, *flags):
        made.append(Run(model, tmp_path / name / "run", *flags))
        return made[-1]

    yield make
    for run in made:
        run.close()


def finish(run, learner, sampler):
    assert learner.wait(100) == 0, run.log("learner")[-3000:]
    if sampler is not None:
        assert sampler.wait(20) == 0, run.log("sampler")[-3000:]
    assert (run.run_dir / "done.json").exists()


def test_a_run_killed_at_step_7_and_resumed_ends_with_the_same_weights(runs):
    one = runs("one", "--max_staleness", "0")
    finish(one, one.learner("--journal"), one.sampler())
    two = runs("two", "--max_staleness", "0")
    learner, sampler = two.learner("--journal"), two.sampler()
    two.wait_for_step(7)
    learner.kill()
    learner.wait()
    finish(two, two.learner("--journal", "--resume"), sampler)
    assert two.adapter() == one.adapter()
    books = audit(two.run_dir)
    assert (books["steps"], books["trained"], books["restarts"]) == (20, 40, 1)
    assert audit(one.run_dir)["undone"] == 0
    rows = [read_lines(r.run_dir / "metrics.jsonl") for r in (one, two)]
    assert [r["step"] for r in rows[1]] == list(range(1, 21))
    assert [r["loss"] for r in rows[0]] == [r["loss"] for r in rows[1]]
    assert rows[1][-1]["time_s"] > rows[1][0]["time_s"]
    # The journal of the run with a crash gives the same weights again, at once and with a crash of its own.
    for name, source in (("replay", two), ("again", two)):
        replay = runs(name)
        flags = ["--replay", str(source.run_dir), "--max_staleness", "0"]
        if name == "again":
            flags += ["--max_steps", "8"]
            finish(replay, replay.learner(*flags), None)
            flags[-1] = "20"
            flags += ["--resume"]
        finish(replay, replay.learner(*flags), None)
        assert replay.adapter() == one.adapter(), name


def test_every_prompt_of_an_epoch_is_used_once_whoever_is_killed(runs):
    run = runs("three", "--max_staleness", "2")
    learner, sampler = run.learner("--journal"), run.sampler()
    run.wait_for_step(5)
    learner.kill()
    learner.wait()
    learner = run.learner("--journal", "--resume")
    run.wait_for_step(9)
    sampler.kill()
    sampler.wait()
    sampler = run.sampler()
    run.wait_for_step(13)
    learner.kill()
    sampler.kill()
    learner.wait()
    sampler.wait()
    finish(run, run.learner("--journal", "--resume"), run.sampler())
    books = audit(run.run_dir)
    assert (books["steps"], books["trained"], books["restarts"]) == (20, 40, 2)
    from safetensors import safe_open

    trained, prompts = set(), {}
    for row in read_lines(run.run_dir / "ledger.jsonl"):
        if "resumed_at" in row:
            trained = {(s, g) for s, g in trained if s <= row["resumed_at"]}
        else:
            trained |= {(row["step"], g) for g in row["trained"]}
    for path in sorted((run.run_dir / "journal").glob("step_*")):
        with safe_open(path, "numpy") as file:
            for header in json.loads(file.metadata()["headers"]):
                header = json.loads(header)
                prompts[f"{header['sampler_id']}:{header['seq']}"] = header["prompt_index"]
    used = [prompts[g] for _, g in trained]
    assert len(used) == len(set(used)) == 40


def test_a_checkpoint_between_two_publishes_is_gone_on_with(runs):
    """Its weights were not published; a sampler waits for those of the learner's start."""
    run = runs("six", "--max_staleness", "1", "--max_steps", "8")
    learner, sampler = run.learner("--sync_steps", "2"), run.sampler()
    run.wait_for_step(4)
    learner.kill()
    learner.wait()
    finish(run, run.learner("--resume", "--sync_steps", "2"), sampler)
    assert "going on from step 3 of 8" in run.log("learner")
    assert audit(run.run_dir)["steps"] == 8


def test_a_rank_killed_while_saving_costs_the_work_since_the_last_checkpoint(runs):
    """Two ranks by hand, so that nobody but the other one can notice; then on one rank."""
    run = runs("five", "--max_staleness", "1", "--max_steps", "6")
    run.set_micro_batch(8)
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "DIES": "1",
    }
    ranks = [
        run.learner(
            script="tests/dies_saving.py", env=address | {"RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in (0, 1)
    ]
    sampler = run.sampler()
    assert ranks[1].wait(90) == -signal.SIGKILL
    assert ranks[0].wait(15) == 75, run.log("learner")[-3000:]
    assert "rank 1 is gone: its process was killed or crashed" in run.log("learner")
    assert [p.name for p in checkpoints.found_in(run.run_dir)] == ["step_000000"]
    run.set_micro_batch(16)
    finish(run, run.learner("--resume"), sampler)
    books = audit(run.run_dir)
    assert (books["steps"], books["trained"], books["undone"]) == (6, 12, 6)


def test_resuming_what_cannot_be_resumed_ends_with_2_and_says_why(runs):
    run = runs("four", "--max_staleness", "0", "--max_steps", "2")
    assert run.learner("--resume").wait(60) == 2
    assert "holds no checkpoint" in run.log("learner")
    finish(run, run.learner(), run.sampler())
    assert run.learner().wait(60) == 2
    assert "--resume goes on with it, --overwrite removes it" in run.log("learner")
    assert run.learner("--resume", "--seed", "3").wait(60) == 2
    assert "--resume with another --seed 3" in run.log("learner")
    learner = run.learner("--resume", "--max_steps", "4")
    finish(run, learner, run.sampler("--max_steps", "4"))
    assert audit(run.run_dir)["steps"] == 4
    finish(run, run.learner("--overwrite"), run.sampler())
    assert audit(run.run_dir)["steps"] == 2
