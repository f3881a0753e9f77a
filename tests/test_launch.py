"""The launcher: both workers end together, nothing is left behind, and success is told from failure."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from splitgrpo.config import LearnerSettings, SamplerSettings, SettingsError
from splitgrpo.launch import Restarts, learner_command, route, run_ids, train
from splitgrpo.workers import Worker

ROOT = Path(__file__).resolve().parent.parent
STAY = "import time; print('here', flush=True); time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def commands(learner: str, sampler: str) -> dict[str, list[str]]:
    return {"learner": [sys.executable, "-c", learner], "sampler": [sys.executable, "-c", sampler]}


def test_flags_go_to_the_worker_they_belong_to():
    flags = [
        "--seed",
        "3",
        "--batch_size=16",
        "--save_steps",
        "5",
        "--verbose",
        "--learning_rate",
        "1e-3",
    ]
    assert route(flags, LearnerSettings, ["--x"]) == [
        "--seed=3", "--save_steps=5", "--verbose", "--learning_rate=1e-3", "--x",
    ]  # fmt: skip
    assert route(flags, SamplerSettings, []) == [
        "--seed=3", "--batch_size=16", "--verbose", "--learning_rate=1e-3",
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["--sed", "--save-steps", "seed", "-s", "--save_step"])
def test_a_flag_that_neither_worker_knows_is_refused(flag):
    with pytest.raises(SettingsError, match="unknown flag"):
        route([flag, "1"], LearnerSettings, [])


def test_more_than_one_rank_is_started_by_deepspeeds_launcher():
    command = learner_command(2, ["--seed=1"])
    assert "--num_gpus=2" in command
    assert Path(command[1]).name == "deepspeed"
    assert Path(command[1]).exists()


def test_a_run_folder_that_cannot_serve_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be made"):
        train([], run_dir=tmp_path / "file")
    (tmp_path / "latest.json").write_text("{}")
    with pytest.raises(SettingsError, match="holds an earlier run"):
        train([], run_dir=tmp_path)


def test_a_replay_is_no_job_for_two_workers(tmp_path):
    with pytest.raises(SettingsError, match="needs no sampler"):
        train(["--replay", str(tmp_path)], run_dir=tmp_path / "run")


def test_a_finished_run_is_done_json_and_two_zeros(tmp_path):
    write = f"open({str(tmp_path / 'done.json')!r}, 'w').write('{{}}')"
    assert train([], run_dir=tmp_path, commands=commands(write, "pass")) == 0
    assert (tmp_path / "curves.png").exists()
    (tmp_path / "done.json").unlink()
    assert train([], run_dir=tmp_path, commands=commands("pass", "pass")) == 70


def test_a_worker_that_fails_ends_the_other_and_its_last_words_are_shown(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("splitgrpo.launch.AFTERMATH_S", 0.5)
    started = time.monotonic()
    code = train(
        [],
        run_dir=tmp_path,
        commands=commands("import sys; print('my last words'); sys.exit(65)", STAY),
    )
    assert code == 65
    assert time.monotonic() - started < 10
    assert "the learner ended with code 65" in caplog.text
    assert "my last words" in caplog.text


def test_a_killed_worker_is_a_failure_too(tmp_path, monkeypatch):
    monkeypatch.setattr("splitgrpo.launch.AFTERMATH_S", 0.2)
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert train([], run_dir=tmp_path, commands=commands(STAY, kill)) == 128 + signal.SIGKILL


SCRIPT = """
import sys
from pathlib import Path
from splitgrpo import launch
from splitgrpo.monitor import setup_logging
from splitgrpo.process import end_process, run_main
setup_logging("launch", verbose=False)
words = {words!r}
def story(stop):
    launch.train([], run_dir=Path({run_dir!r}), check_stop=stop.raise_if_set, commands=words)

end_process(run_main(story, launch.log))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("worker", [STAY, DEAF])
def test_a_signal_ends_both_workers_and_their_children_within_ten_seconds(tmp_path, number, worker):
    parent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}]); {worker}"
    )
    script = SCRIPT.format(words=commands(parent, parent), run_dir=str(tmp_path))
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        family = []
        deadline = time.monotonic() + 30
        while len(family) < 4 and time.monotonic() < deadline:
            family = psutil.Process(launcher.pid).children(recursive=True)
            time.sleep(0.2)
        assert len(family) == 4
        time.sleep(1)
        started = time.monotonic()
        launcher.send_signal(number)
        _, text = launcher.communicate(timeout=15)
        assert time.monotonic() - started < 10, text
        assert launcher.returncode == 128 + number, text
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    finally:
        launcher.kill()


def test_run_sh_explains_itself_and_refuses_an_unknown_verb():
    shown = subprocess.run(
        ["bash", "run.sh", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for verb in ("test", "train", "sampler", "learner", "smollm2", "qwen"):
        assert f"run.sh {verb}" in shown.stdout
    wrong = subprocess.run(
        ["bash", "run.sh", "tets"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "unknown verb 'tets'" in wrong.stderr


@pytest.mark.skipif(
    os.environ.get("CUDA_VISIBLE_DEVICES") is not None, reason="skipped: GPUs are set"
)
def test_the_gpu_recipe_says_what_this_machine_lacks():
    import torch

    if torch.cuda.device_count() >= 3:
        pytest.skip("skipped: this machine has the GPUs")
    got = subprocess.run(
        [sys.executable, "-m", "splitgrpo.recipes", "qwen", "--name", "never"],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert got.returncode == 2
    assert "3 CUDA GPUs" in got.stderr
    assert "Qwen/Qwen2.5-1.5B-Instruct" in got.stderr
    assert not (ROOT / "runs" / "never").exists()


def test_a_run_that_was_to_be_removed_is_not_gone_on_with_by_a_restart(tmp_path, monkeypatch):
    """The learner may die before it has removed the earlier run's checkpoints."""
    monkeypatch.setattr("splitgrpo.launch.RESTART_PAUSE_S", 0.0)
    told = []

    class Fake:
        name, log_path = "learner", tmp_path / "log"

        def last_lines(self, count):
            return ""

        def start_again(self, how):
            told.append(how)

    monkeypatch.setattr("splitgrpo.launch.end_all", lambda workers, wait_s: None)
    for run_id, step in (("old", 7), ("new", 0)):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"run_id": run_id}))
        if run_id == "old":
            assert run_ids(tmp_path) == {"old"}
        Restarts(9, frozenset({"old"})).restart(Fake(), [Fake()], tmp_path, 137)
    assert told == ["--overwrite", "--resume"]


def test_curves_that_cannot_be_drawn_change_no_exit_code(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("splitgrpo.launch.plot_curves", fail)
    commands = {"learner": [sys.executable, "-c", "import sys; sys.exit(75)"],
                "sampler": [sys.executable, "-c", ""]}  # fmt: skip
    assert train([], run_dir=tmp_path, commands=commands) == 75


def test_last_words_are_a_workers_own_and_a_log_that_was_moved_away_has_none(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("of the run before\n")
    worker = Worker.start("learner", [sys.executable, "-c", "print('mine')"], log)
    worker.process.wait()
    assert worker.last_lines() == "    mine"
    worker.start_again("")
    worker.process.wait()
    assert worker.last_lines() == "    mine"
    log.unlink()
    assert worker.last_lines() == ""
