"""Real runs that are signalled, killed or lose their terminal: all of them ends in ten seconds, with its state saved."""

import json
import logging
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from test_scoring import gone

from splitgrpo.checkpoints import find_checkpoint
from splitgrpo.demo import build_model, build_tokenizer
from splitgrpo.launch import train
from splitgrpo.ledger import audit, read_lines
from splitgrpo.reward_child import Target
from splitgrpo.reward_process import RewardFault, RewardProcess
from splitgrpo.warmstart import save_model
from splitgrpo.workers import Worker, end_all
from splitgrpo.zero import free_port

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("test")
MARK = "SPLITGRPO_TEST_MARK"
WITHIN_S = 10.0
INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
LAUNCH = ["-m", "splitgrpo.launch"]
DEEPSPEED = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus=2"]
# A learner whose disk takes its time with checkpoints, and says when.
SLOW_DISK = f"""
import os, runpy, sys, time
real = os.fsync

def slow(fd):
    if "checkpoints" in os.readlink(f"/proc/self/fd/{{fd}}"):
        open(sys.argv[1 + sys.argv.index("--save_path")] + "/saving", "w").close()
        time.sleep(0.2)
    real(fd)

os.fsync = slow
sys.path.insert(0, {str(ROOT)!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def processes(mark: str, name: str = "") -> list[psutil.Process]:
    """Living processes that were started under a mark, by whomever, wherever they hang in the tree now."""
    wanted, found = f"{MARK}={mark}-{name}".encode(), []
    for pid in psutil.pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(psutil.Process(pid))
        except (OSError, psutil.Error):
            pass
    return found


def catches(pid: int, number: int) -> bool:
    """True while a process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


class Terminal:
    """A terminal in which a shell runs one command, as the session's leader."""

    def __init__(self) -> None:
        self.fd, self._slave = pty.openpty()
        self.command = f"exec <>{os.ttyname(self._slave)} >&0 2>&0; "
        self._shut = threading.Event()
        self._reader = threading.Thread(target=self._drain)
        self.text = b""

    def open(self) -> None:
        """Once the shell has opened its end."""
        os.close(self._slave)
        self._reader.start()

    def _drain(self) -> None:
        while not self._shut.is_set():
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.text += os.read(self.fd, 65536)
                except OSError:
                    return

    def close(self) -> None:
        """As the window manager does."""
        if not self._shut.is_set():
            self._shut.set()
            self._reader.join()
            os.close(self.fd)


class Run:
    """One run folder and port; starts programs on it, and finds all that they started."""

    def __init__(self, model: Path, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.run_dir, self.port = folder, folder / "run", free_port()
        self.mark = f"{folder.name}-{os.getpid()}-{self.port}"
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
                  "zero_optimization": {"stage": 2},
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}  # fmt: skip
        (folder / "ds.json").write_text(json.dumps(config))
        self.shared = ["--model_path", str(model), "--data", "arithmetic", "--group_size", "4", "--max_new_tokens", "16",
                       "--max_prompt_tokens", "48", "--lora_rank", "8", "--lora_alpha", "16", "--num_threads", "1",
                       "--max_steps", "5000", "--wait_timeout_s", "90", "--port", str(self.port)]  # fmt: skip
        self.for_learner = ["--save_path", str(self.run_dir), "--ds_config", str(folder / "ds.json"),
                            "--save_steps", "100"]  # fmt: skip
        self.started: list[subprocess.Popen] = []
        self.terminals: list[Terminal] = []

    def start(self, name: str, *command: str, terminal: Terminal | None = None) -> subprocess.Popen:
        """Start a Python program in a session of its own, in a shell's terminal if one is given."""
        words = [sys.executable, *command]
        if terminal is not None:
            words = ["bash", "-c", f"{terminal.command}{shlex.join(words)}; true"]
        env = os.environ | {"OMP_NUM_THREADS": "1", MARK: f"{self.mark}-{name}"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        if terminal is not None:
            self.terminals.append(terminal)
            wait_until(lambda: os.path.exists(f"/proc/{process.pid}/fd/0") and "pts" in os.readlink(
                f"/proc/{process.pid}/fd/0"), 5, "the shell has no terminal")  # fmt: skip
            terminal.open()
        return process

    def sampler(self, *flags: str) -> subprocess.Popen:
        return self.start("sampler", "sampling_worker.py", "--lora_path", str(self.run_dir), "--batch_size", "4",
                          *self.shared, *flags)  # fmt: skip

    def learner(self, *flags: str, program: Sequence[str] = ("training_worker.py",), **how) -> subprocess.Popen:  # fmt: skip
        return self.start("learner", *program, *self.for_learner, *self.shared, *flags, **how)

    def launch(self, *flags: str, **how) -> subprocess.Popen:
        return self.start(
            "launch", *LAUNCH, "--batch_size", "4", *self.for_learner, *self.shared, *flags, **how
        )

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def texts(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.run_dir.glob("*.log")]
        return "\n".join(f"--- {p}\n{p.read_text()[-3000:]}" for p in logs)

    def steps(self) -> int:
        rows = read_lines(self.run_dir / "metrics.jsonl")
        return rows[-1]["step"] if rows else 0

    def wait_more_steps(self, num: int = 2, timeout_s: float = 60) -> None:
        """Wait until this many steps were taken from now on."""
        goal = self.steps() + num
        wait_until(lambda: self.steps() >= goal, timeout_s, f"no step {goal}", self)

    def ends(self, since: float, name: str = "", *, port: bool = True) -> float:
        """Seconds until nothing that was started under a name is left and the port is free; fails after 10."""
        left = lambda: processes(self.mark, name)  # noqa: E731
        wait_until(lambda: not left(), since + WITHIN_S - time.monotonic(), "left over", self, left)
        took = time.monotonic() - since
        if port:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", self.port))
        LOG.warning("%s %s ended in %.1f s", self.folder.name, name, took)
        return took

    def check_saved(self, least: int = 1) -> None:
        """The newest checkpoint is whole and of the last finished step."""
        path, index = find_checkpoint(self.run_dir, LOG)
        assert index.step == self.steps() >= least, (path, self.texts())
        assert audit(self.run_dir)["steps"] == index.step

    def close(self) -> None:
        for terminal in self.terminals:
            terminal.close()
        for process in processes(self.mark):
            process.kill()
        for process in self.started:
            process.kill()
            process.wait()


def wait_until(true, timeout_s: float, what: str, run: Run | None = None, tell=lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} after {timeout_s:.1f} s: {tell()}\n{run.texts() if run else ''}")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo's model as it is before its warm start: any will do."""
    out = tmp_path_factory.mktemp("signals") / "model"
    tokenizer = build_tokenizer()
    save_model(build_model(tokenizer, 0), tokenizer, out)
    return out


@pytest.fixture
def run(model, tmp_path, request):
    made = Run(model, tmp_path / "signals")
    yield made
    made.close()


# ---- while the libraries load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment_s", "number"), [(0.1, INT), (0.5, INT), (2.0, INT), (2.0, HUP), (4.0, TERM)]
)
def test_a_signal_while_the_libraries_load_ends_every_program_without_a_traceback(
    run, moment_s, number
):
    programs = {"sampler": run.sampler(), "learner": run.learner(), "launch": run.launch("--save_path",
                str(run.folder / "launched"), "--ranks", "2")}  # fmt: skip
    time.sleep(moment_s)
    for process in programs.values():  # Python's own first moments are not ours
        wait_until(lambda p=process: number != INT or is_ready(p.pid), 3, "Python still starts")
        process.send_signal(number)
    since = time.monotonic()
    for name, process in programs.items():
        code = process.wait(WITHIN_S)
        assert code in (-number, 128 + number), (name, run.texts())
    run.ends(since)
    assert "Traceback" not in run.texts()


def is_ready(pid: int) -> bool:
    """True where Ctrl-C ends the process at once, or is handled by a worker's own thread."""
    return not catches(pid, INT) or len(os.listdir(f"/proc/{pid}/task")) > 1


def test_a_shell_killed_above_a_launcher_takes_all_with_it(run):
    shell = run.launch(terminal=Terminal())
    wait_until(lambda: len(processes(run.mark)) >= 4, 20, "no workers", run)
    time.sleep(1)
    since = time.monotonic()
    shell.kill()
    shell.wait()
    run.ends(since)


# ---- lone workers ---------------------------------------------------------------------------------------------------


def test_a_worker_that_waits_for_the_other_ends_at_a_signal(run):
    learner = run.learner()
    sampler = run.start("sampler", "sampling_worker.py", "--lora_path", str(run.folder / "no"), *run.shared)  # fmt: skip
    wait_until(lambda: any(run.run_dir.glob("checkpoints/step_*")), 40, "nothing saved", run)
    wait_until(lambda: catches(sampler.pid, TERM), 20, "no handler", run)
    time.sleep(0.7)
    since = time.monotonic()
    learner.send_signal(TERM)
    sampler.send_signal(INT)
    assert (learner.wait(WITHIN_S), sampler.wait(WITHIN_S)) == (143, 130), run.texts()
    run.ends(since)
    run.check_saved(least=0)
    assert "Traceback" not in run.texts()


def test_workers_signalled_while_they_sample_train_and_save_are_gone_and_saved(run):
    learner, sampler = run.learner(), run.sampler()
    run.wait_more_steps()
    assert len(processes(run.mark, "sampler")) == 2  # one of them scores
    since = time.monotonic()
    os.killpg(sampler.pid, HUP)
    learner.send_signal(INT)
    time.sleep(0.03)
    learner.send_signal(INT)  # while it saves: launchers pass on what the whole group has had
    assert (learner.wait(WITHIN_S), sampler.wait(WITHIN_S)) == (130, 129), run.texts()
    run.ends(since)
    run.check_saved()

    script = run.folder / "slow.py"
    script.write_text(SLOW_DISK)
    program = (str(script), "training_worker.py")
    learner = run.learner("--resume", "--save_steps", "1", program=program)
    sampler = run.sampler()
    run.wait_more_steps(1)
    (run.run_dir / "saving").unlink(missing_ok=True)
    wait_until((run.run_dir / "saving").exists, 10, "it does not save", run)
    since = time.monotonic()
    learner.send_signal(HUP)
    sampler.send_signal(TERM)
    assert (learner.wait(WITHIN_S), sampler.wait(WITHIN_S)) == (129, 143), run.texts()
    run.ends(since)
    run.check_saved()
    assert "Traceback" not in run.texts()


# ---- launchers ------------------------------------------------------------------------------------------------------


def test_a_closed_terminal_ends_a_run_and_under_nohup_only_a_killed_launcher_does(run):
    terminal = Terminal()
    shell = run.launch(terminal=terminal)
    run.wait_more_steps()
    since = time.monotonic()
    terminal.close()
    run.ends(since)
    run.check_saved()
    assert shell.wait(5) == -HUP
    assert b"step" in terminal.text  # its bar wrote there to the last

    terminal = Terminal()
    terminal.command += "trap '' HUP; "  # what nohup does
    run.launch("--resume", terminal=terminal)
    run.wait_more_steps()
    terminal.close()
    run.wait_more_steps(5)
    (launcher,) = (
        p for p in processes(run.mark) if LAUNCH[1] in p.cmdline() and p.name() != "bash"
    )
    since = time.monotonic()
    launcher.kill()
    run.ends(since)
    run.check_saved()


def test_deepspeeds_launcher_signalled_alone_or_by_ctrl_c_in_its_terminal_leaves_no_rank(run):
    program = (*DEEPSPEED, f"--master_port={free_port()}", "training_worker.py")
    sampler, launcher = run.sampler(), run.learner(program=program)
    run.wait_more_steps()
    assert len(processes(run.mark, "learner")) == 4
    since = time.monotonic()
    launcher.send_signal(INT)
    run.ends(since, "learner")
    run.check_saved()

    terminal = Terminal()
    shell = run.learner("--resume", program=program, terminal=terminal)
    run.wait_more_steps()
    since = time.monotonic()
    os.write(terminal.fd, b"\x03")
    run.ends(since, "learner")
    run.check_saved()
    assert shell.wait(1) is not None
    since = time.monotonic()
    sampler.send_signal(TERM)
    assert sampler.wait(WITHIN_S) == 143
    run.ends(since)


def test_two_ranks_ctrl_c_twice_then_goes_on_with_its_launcher_and_sampler_killed_and_finishes(run):
    launcher = run.launch("--ranks", "2")
    run.wait_more_steps()
    since = time.monotonic()
    for _ in range(2):
        launcher.send_signal(INT)
        time.sleep(0.5)
    assert launcher.wait(WITHIN_S) == 130, run.texts()
    run.ends(since)
    run.check_saved()
    assert "Traceback" not in run.texts()

    last = run.steps() + 15
    launcher = run.launch(
        "--ranks", "2", "--resume", "--max_restarts", "2", "--max_steps", str(last)
    )
    run.wait_more_steps()
    before = learners(run)
    assert len(before) == 4
    since = time.monotonic()
    next(p for p in before if p.cmdline()[1] == DEEPSPEED[0]).kill()
    psutil.wait_procs(before, WITHIN_S)
    assert not [p for p in before if p.is_running()], run.texts()
    LOG.warning("ranks ended %.1f s after deepspeed's launcher", time.monotonic() - since)
    next(p for p in processes(run.mark) if "sampling_worker.py" in " ".join(p.cmdline())).kill()
    assert launcher.wait(60) == 0, run.texts()
    assert (run.run_dir / "done.json").exists()
    books = audit(run.run_dir)
    assert (books["steps"], books["restarts"]) == (last, 2)
    assert run.text("launch").count("is started again") == 2


def learners(run: Run) -> list[psutil.Process]:
    """The ranks, and DeepSpeed's two launchers above them."""
    return [p for p in processes(run.mark) if "training_worker.py" in " ".join(p.cmdline())]


def test_a_crash_loop_gives_up_with_the_last_lines_and_the_code(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("splitgrpo.launch.RESTART_PAUSE_S", 0.1)
    monkeypatch.setattr("splitgrpo.launch.AFTERMATH_S", 0.2)
    count = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')"
    commands = {
        "learner": [sys.executable, "-c", f"{count}; print('no such luck'); raise SystemExit(75)"],
        "sampler": [sys.executable, "-c", "import time; time.sleep(60)"],
    }
    assert train([], run_dir=tmp_path, commands=commands, max_restarts=2) == 75
    assert (tmp_path / "starts").read_text() == "xxx"
    assert "the learner ended with code 75 after 2 restarts (--max_restarts)" in caplog.text
    assert caplog.text.rstrip().endswith("no such luck")


# ---- what user code leaves behind -----------------------------------------------------------------------------------


SLEEPER = """
import os, pathlib, subprocess

def reward(response, answer):
    pathlib.Path(response).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    os._exit(3)
"""


def test_what_user_code_started_ends_with_its_process_although_that_died_first(tmp_path):
    file = tmp_path / "sleeper.py"
    file.write_text(SLEEPER)
    process = RewardProcess(
        Target([os.fsencode(p) for p in sys.path], "sleeper", str(file), "reward"), lambda: None
    )
    with pytest.raises(RewardFault, match="exit code 3"):
        process.call(str(tmp_path / "pid"), "", 5.0)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_worker_that_has_to_be_killed_takes_other_groups_of_its_session_with_it(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child = f"{deaf}print('here', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0); {deaf}"
    worker = Worker.start(
        "sampler", [sys.executable, "-c", f"{parent}time.sleep(60)"], tmp_path / "log"
    )
    wait_until(lambda: "here" in (tmp_path / "log").read_text(), 5, "no child")
    left = worker.members()
    assert len(left) == 2
    end_all([worker], 0.5)
    assert all(gone(pid) for pid in left)
