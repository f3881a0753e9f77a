"""The demo's training for some minutes while everything that takes part is killed, stopped and started again at random.

    bash run.sh soak [--minutes 2] [--seed 0] [--folder runs/soak]

A launcher with --max_restarts runs the learner, on one rank or two, and a sampler; a second sampler is run beside it. Each
blow hits a random process of them, at a random moment, with SIGKILL, SIGTERM or a SIGSTOP of some seconds. In the end the
run is let go on to its last step, and the books are audited: every group of every sampler was trained once, dropped with a
reason or lost with a crash, no group was too old, no process is left, the port is free. Exit code 0 if all of that holds.
"""

import argparse
import collections
import json
import logging
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import build_prompts, load_problems, worked_response  # noqa: E402
from splitgrpo.demo import make_demo_model  # noqa: E402
from splitgrpo.files import read_lines  # noqa: E402
from splitgrpo.ledger import audit  # noqa: E402
from splitgrpo.monitor import setup_logging  # noqa: E402
from splitgrpo.workers import Worker, end_all  # noqa: E402
from splitgrpo.zero import free_port  # noqa: E402

MAX_STALENESS = 2
SAVE_STEPS = 3
GROUPS_PER_STEP, GROUP_SIZE = 2, 8
ENDED_S = 20.0  # for the rest of a run to end when its launcher was killed
LAST_S = 240.0  # for the last, undisturbed start to finish
LAST_STEPS = 3

log = logging.getLogger("soak")


def role_of(process: psutil.Process) -> str | None:
    """What a process of the run is, by its command line; None for one that is gone or none of ours."""
    try:
        command = process.cmdline()
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    text = " ".join(command)
    if "splitgrpo.reward_child" in text:
        return "reward process"
    if "sampling_worker.py" in text:
        return "sampler"
    if "splitgrpo.launch" in text:
        return "launcher"
    if "training_worker.py" in text:
        return "deepspeed launcher" if "deepspeed" in text else "rank"
    return None


class Soak:
    """One run that is beaten, and what is known of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.run_dir = folder, folder / "run"
        self.folder.mkdir(parents=True)
        problems = load_problems("arithmetic", "train")
        model = make_demo_model(folder / "model", 0, problems, build_prompts, worked_response)
        self.port = free_port()
        self.flags = ["--model_path", str(model), "--data", "arithmetic", "--group_size", str(GROUP_SIZE),
                      "--max_new_tokens", "16", "--max_prompt_tokens", "48", "--lora_rank", "8", "--lora_alpha", "16",
                      "--num_threads", "1", "--wait_timeout_s", "60", "--max_staleness", str(MAX_STALENESS),
                      "--dynamic_sampling", "4", "--port", str(self.port), "--batch_size", "16", "--device", "cpu",
                      "--save_steps", str(SAVE_STEPS), "--journal"]  # fmt: skip
        self.blows: collections.Counter[str] = collections.Counter()
        self.starts = 0
        self.launcher: Worker | None = None
        self.second: Worker | None = None

    def ds_config(self, ranks: int) -> Path:
        """DeepSpeed's settings under which a step is the same on any number of ranks."""
        path = self.folder / f"ds_{ranks}.json"
        config = {"train_micro_batch_size_per_gpu": GROUPS_PER_STEP * GROUP_SIZE // ranks,
                  "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2},
                  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}  # fmt: skip
        path.write_text(json.dumps(config))
        return path

    def start_launcher(self, ranks: int, max_steps: int) -> None:
        """Start the run, or go on with it."""
        saved = any((self.run_dir / "checkpoints").glob("step_*"))
        command = [sys.executable, "-m", "splitgrpo.launch", "--save_path", str(self.run_dir), "--ranks", str(ranks),
                   "--max_restarts", "10000", "--ds_config", str(self.ds_config(ranks)), "--max_steps", str(max_steps),
                   "--resume" if saved else "--overwrite", *self.flags]  # fmt: skip
        self.launcher = Worker.start("launcher", command, self.folder / "launch.log")
        self.starts += 1
        log.info("launcher started with %d ranks", ranks)

    def start_second(self) -> None:
        """Start the sampler that no launcher watches."""
        known = ("--save_steps", str(SAVE_STEPS), "--journal")
        command = [sys.executable, str(ROOT / "sampling_worker.py"), "--lora_path", str(self.run_dir), "--sampler_id", "1",
                   *self.flags[: -len(known)]]  # fmt: skip
        self.second = Worker.start("second sampler", command, self.folder / "second.log")

    def processes(self) -> list[psutil.Process]:
        """Everything that runs."""
        found = []
        for worker in (self.launcher, self.second):
            if worker is not None and worker.process.poll() is None:
                try:
                    own = psutil.Process(worker.process.pid)
                    found += [own, *own.children(recursive=True)]
                except psutil.Error:
                    pass
        return [p for p in found if role_of(p)]

    def strike(self) -> None:
        """Hit one process: each kind as often as another, whatever their numbers."""
        by_role = collections.defaultdict(list)
        for process in self.processes():
            by_role[role_of(process)].append(process)
        if not by_role:
            return
        role = self.random.choice(sorted(by_role))
        process = self.random.choice(by_role[role])
        blow = self.random.choices(["kill", "stop", "end"], [6, 2, 1])[0]
        before = self.processes()
        try:
            if blow == "stop":
                process.suspend()
                time.sleep(self.random.uniform(0.5, 14.0))
                process.resume()
            else:
                process.send_signal(signal.SIGKILL if blow == "kill" else signal.SIGTERM)
        except psutil.Error:
            return
        self.blows[f"{blow} {role}"] += 1
        log.info("%s %s %d, step %d", blow, role, process.pid, self.step())
        if role == "launcher" and blow != "stop":
            self.wait_for_end(before)

    def wait_for_end(self, before: list[psutil.Process]) -> None:
        """What a launcher started ends with it; the second sampler is none of these."""
        second = self.second.process.pid if self.second else -1
        kept = {second, *(p.pid for p in before if is_below(p, second))}
        left = [p for p in before if p.pid not in kept]
        _, alive = psutil.wait_procs(left, timeout=ENDED_S)
        if alive := [p for p in alive if role_of(p)]:
            raise AssertionError(f"still there {ENDED_S:.0f} s after the launcher: {alive}")

    def step(self) -> int:
        """The last step in the metrics."""
        rows = read_lines(self.run_dir / "metrics.jsonl")
        return rows[-1]["step"] if rows else 0

    def keep_up(self) -> None:
        """Start again what has ended; a worker that gives up for good ends the launcher."""
        if self.launcher is None or self.launcher.process.poll() is not None:
            self.start_launcher(self.random.choice([1, 2]), 1_000_000)
        if self.second is None or self.second.process.poll() is not None:
            self.start_second()

    def beat(self, seconds: float) -> None:
        """Strike for so long, about every ten seconds, which lets a run get some steps further."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.keep_up()
            time.sleep(min(self.random.uniform(1, 18), max(0.0, deadline - time.monotonic())))
            self.strike()

    def finish(self) -> int:
        """End the run by a signal, then let it go on to a last step; returns its number."""
        before = self.processes()
        for worker in (self.launcher, self.second):
            if worker is not None:
                end_all([worker], ENDED_S)
        if alive := [p for p in psutil.wait_procs(before, timeout=1.0)[1] if role_of(p)]:
            raise AssertionError(f"still there after SIGTERM: {alive}")
        last = self.step() + LAST_STEPS
        self.start_launcher(1, last)
        self.start_second()
        assert self.launcher is not None
        assert self.second is not None
        code = self.launcher.process.wait(LAST_S)
        if code != 0 or not (self.run_dir / "done.json").exists():
            raise AssertionError(f"the last start ended with {code}:\n{self.launcher.last_lines()}")
        self.second.process.wait(ENDED_S)
        socket.create_server(("127.0.0.1", self.port)).close()
        return last

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self.processes():
            try:
                process.resume()
            except psutil.Error:
                pass
        end_all([w for w in (self.launcher, self.second) if w is not None], ENDED_S)


def is_below(process: psutil.Process, ancestor: int) -> bool:
    """True for a descendant."""
    try:
        return any(parent.pid == ancestor for parent in process.parents())
    except psutil.Error:
        return False


def soak(folder: Path, minutes: float, seed: int) -> dict[str, int]:
    """Beat one run, then audit it; returns the books' totals. Raises AssertionError, AuditError."""
    run = Soak(folder, seed)
    try:
        run.beat(60 * minutes)
        last = run.finish()
    finally:
        run.close()
    books = audit(run.run_dir)
    if (books["steps"], books["trained"]) != (last, last * GROUPS_PER_STEP):
        raise AssertionError(
            f"{last} steps of {GROUPS_PER_STEP} groups were to be trained: {books}"
        )
    oldest = max(row["staleness_max"] for row in read_lines(run.run_dir / "metrics.jsonl"))
    if oldest > MAX_STALENESS:
        raise AssertionError(f"a group {oldest} versions old was trained, above {MAX_STALENESS}")
    blows = ", ".join(f"{num} {what}" for what, num in sorted(run.blows.items()))
    log.info("%d blows (%s), %d starts of the launcher", run.blows.total(), blows, run.starts)
    log.info("books: %s", " ".join(f"{k}={v}" for k, v in books.items()))
    return books | {"blows": run.blows.total()}


def main() -> int:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(
        prog="run.sh soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="new folder (default: runs/soak-DATE-TIME)")
    args = parser.parse_args()
    setup_logging("soak", verbose=False)
    folder = args.folder or ROOT / "runs" / time.strftime("soak-%Y%m%d-%H%M%S")
    try:
        soak(folder, args.minutes, args.seed)
    except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
        log.error("%s (logs in %s)", error, folder)
        return 70
    log.info("every group is accounted for; %s", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
