"""One NVIDIA GPU: are the fast paths right on it, do both workers run on it together, how fast, in how much memory.

bash benchmarks/gpu.sh --help says how to run it. Each part has a limit, all of them a budget; one that fails is reported and
the rest goes on. The model has Qwen2.5-1.5B's shape and random weights, the prompts are the embedded arithmetic.
Sampler and learner take turns on the card (max_staleness 0), so that neither's rate depends on the other's work.
"""

import argparse
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]
import common  # noqa: E402

BUDGET_S = 440.0  # of all parts; the limits below are of each
LIMITS_S = {"tests": 150.0, "probe": 60.0, "model": 90.0, "workers": 240.0}
LAUNCH_END_S = 10.0  # that ending both workers may take, inside of the limit
PARTS = ("tests", "probe", "workers")
ROUND = re.compile(r"sampled \d+ completions, \d+ tokens in [0-9.]+ s \((\d+) tokens/s\)")
MISMATCH_MAX = 0.1  # nats in the mean, what the learner itself warns of in bfloat16
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True)
class Road:
    """What is run, and on what. `shape` is the model's, probe_* are of the matrix products (square side, seconds each)."""

    device: str
    shape: dict[str, int]
    prompts: int
    group_size: int
    new_tokens: int
    micro_batch: int
    probe_size: int
    probe_num_weights: int
    probe_s: float

    @property
    def rows(self) -> int:
        """Completions of a round, which are those of a step."""
        return self.prompts * self.group_size


QWEN = {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2}  # fmt: skip
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
# 16 weights of 8192 x 8192 are 2 GiB: no cache of a card holds them.
CARD = Road("cuda:0", QWEN, 8, 8, 256, 8, 8192, 16, 1.0)
CPU = Road("cpu", TINY, 2, 4, 12, 4, 256, 4, 0.05)


class Failed(RuntimeError):
    """A part whose check failed; the text says which."""


# ---- the parts --------------------------------------------------------------------------------------


def run_tests(road: Road, limit_s: float) -> str:
    """The equality checks of tests/test_cuda.py; none may be skipped. Raises Failed."""
    command = [sys.executable, "-m", "pytest", "tests/test_cuda.py", "-q", "-k", "on_the_card", "--durations=0"]  # fmt: skip
    env = os.environ | {"SPLITGRPO_TEST_DEVICE": road.device}
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--tb=short"],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Failed(f"took longer than {limit_s:.0f} s") from error
    lines = [line for line in done.stdout.strip().splitlines() if line.strip()]
    last = lines[-1].strip("= ") if lines else "no output"
    if done.returncode or "passed" not in last or "skipped" in last:
        end = "\n".join(f"    {line}" for line in [*lines, *done.stderr.splitlines()][-40:])
        raise Failed(f"{last}\n{end}")
    return last


def run_probe(road: Road, limit_s: float) -> dict[str, Any]:
    """See gpu_side.probe. Raises common.Missing."""
    return common.measure(sys.executable, "gpu_side.py", job_of(road, "probe"), limit_s=limit_s)


def job_of(road: Road, part: str, **more: Any) -> dict[str, Any]:
    """What a process of its own is told."""
    return asdict(road) | {"part": part, "rows": road.rows, "threads": common.all_threads()} | more


def worker_flags(road: Road, folder: Path, steps: int) -> list[str]:
    """Flags of both workers; ds_config.json is the project's but for the batch."""
    from splitgrpo.zero import free_port

    config = json.loads((ROOT / "ds_config.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": road.micro_batch,
               "gradient_accumulation_steps": road.rows // road.micro_batch}  # fmt: skip
    (folder / "ds_config.json").write_text(json.dumps(config))
    given = {
        "model_path": folder / "model", "data": "arithmetic", "ds_config": folder / "ds_config.json",
        "group_size": road.group_size, "batch_size": road.rows, "max_new_tokens": road.new_tokens,
        "max_prompt_tokens": 64, "max_steps": steps, "max_staleness": 0, "learning_rate": 1e-5,
        "port": free_port(), "device": road.device, "wait_timeout_s": 120,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in given.items()]


def run_workers(road: Road, folder: Path, steps: int, limit_s: float) -> dict[str, Any]:
    """Both workers on the device until the run is finished; rates and memory of each. Raises Failed, common.Missing."""
    from splitgrpo import launch
    from splitgrpo.config import LearnerSettings, SamplerSettings

    deadline = time.monotonic() + limit_s - LAUNCH_END_S
    out = str(folder / "model")
    made = common.measure(sys.executable, "gpu_side.py", job_of(road, "model", out=out),
                          limit_s=min(limit_s, LIMITS_S["model"]))  # fmt: skip
    run_dir, flags = folder / "run", worker_flags(road, folder, steps)
    commands = {}
    for name, script, cls, where in (
        ("learner", "training_worker.py", LearnerSettings, f"--save_path={run_dir}"),
        ("sampler", "sampling_worker.py", SamplerSettings, f"--lora_path={run_dir}"),
    ):
        watched = [
            str(HERE / "gpu_side.py"),
            "--watch",
            str(folder / f"{name}.json"),
            str(ROOT / script),
        ]
        commands[name] = [sys.executable, *watched, *launch.route(flags, cls, [where])]

    def check_stop() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        code = launch.train(flags, run_dir=run_dir, check_stop=check_stop, commands=commands)
    except TimeoutError:
        code = None
    if code != 0:
        what = f"took longer than {limit_s:.0f} s" if code is None else f"ended with code {code}"
        raise Failed(what + "".join(last_lines(run_dir / f"{n}.log") for n in commands))
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [float(rate) for rate in ROUND.findall((run_dir / "sampler.log").read_text())]
    memory = {name: json.loads((folder / f"{name}.json").read_text()) for name in commands}
    audit = subprocess.run([sys.executable, "-m", "splitgrpo.ledger", run_dir], cwd=ROOT, timeout=60,
                           capture_output=True, text=True, check=False)  # fmt: skip
    check_run(metrics, rates, steps, audit)
    return summary(metrics, rates) | made | {"memory": memory}


def last_lines(path: Path, count: int = 12) -> str:
    """The end of a worker's log."""
    lines = path.read_text(errors="replace").splitlines()[-count:] if path.exists() else []
    return "".join(f"\n    {path.name}: {line}" for line in lines)


def check_run(
    metrics: Sequence[dict[str, Any]], rates: Sequence[float], steps: int, audit: Any
) -> None:
    """A run that finished did what it should have done. Raises Failed naming what it did not."""
    last = metrics[-1] if metrics else {}
    wrong = []
    if [m["step"] for m in metrics] != list(range(1, steps + 1)) or len(rates) < steps:
        wrong.append(f"{len(metrics)} of {steps} steps, {len(rates)} rounds of the sampler")
    if last.get("skipped_steps"):
        wrong.append(f"{last['skipped_steps']} steps without a finite loss and gradient")
    if not all(math.isfinite(m["loss"]) for m in metrics):
        wrong.append(f"losses {[m['loss'] for m in metrics]}")
    gaps = [m.get("mismatch_mean", math.inf) for m in metrics]
    if not all(gap <= MISMATCH_MAX for gap in gaps):
        wrong.append(f"sampler and learner differ by {gaps} nats in the mean of each step")
    if audit.returncode:
        wrong.append(f"the books: {(audit.stdout + audit.stderr).strip()[-300:]}")
    if wrong:
        raise Failed("; ".join(wrong))


def summary(metrics: Sequence[dict[str, Any]], rates: Sequence[float]) -> dict[str, Any]:
    """Tokens/s of each and of the loop, the first step and round, which warm up, left out where there are others."""
    steady = metrics[1:] or metrics
    tokens = sum(m["completion_tokens"] for m in steady)
    return {
        "sampler_tokens_per_s": statistics.median(rates[1:] or rates),
        "learner_tokens_per_s": tokens / sum(m["train_s"] for m in steady),
        "loop_tokens_per_s": tokens / sum(m["step_s"] for m in steady),
        "mismatch_mean": max(m["mismatch_mean"] for m in metrics),
        "steps": len(metrics),
    }


# ---- the report -------------------------------------------------------------------------------------


def lines_of(found: dict[str, Any]) -> list[str]:
    """What was measured, in words; a share is of this run's own probe."""
    out, probed, run = [], found.get("probe"), found.get("workers")
    if probed:
        out.append(f"card: {probed['card']}")
        out.append(f"bfloat16 products: square {probed['square']:.4g} TFLOP/s; as many rows as a decoding step, weights "
                   f"from memory, {probed['skinny']:.4g} TFLOP/s")  # fmt: skip
    if run:
        for name, flop, kind in (("sampler", 2, "skinny"), ("learner", 4, "square")):
            rate = run[f"{name}_tokens_per_s"]
            share = ""
            if probed:
                used = rate * flop * run["parameters"] / 1e12
                share = f", {used / probed[kind]:.1%} of the {kind} rate ({flop} FLOP a parameter and token)"
            peaks = run["memory"][name].items()
            held = ", ".join(f"{k.removesuffix('_mib')} {v / 1024:.2f} GiB" for k, v in peaks)
            out.append(f"{name}: {rate:,.0f} tokens/s{share}; peak memory: {held}")
        out.append(f"loop, taking turns: {run['loop_tokens_per_s']:,.0f} tokens/s; mismatch at most "
                   f"{run['mismatch_mean']:.2g} nats in a step's mean; {run['parameters']:,} parameters")  # fmt: skip
    return out


def run_all(args: argparse.Namespace, road: Road, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Every part that is wanted within its limit and the budget: what was found, and which failed."""
    found: dict[str, Any] = {}
    failed: list[str] = []
    parts: dict[str, Callable[[float], Any]] = {
        "tests": lambda s: run_tests(road, s),
        "probe": lambda s: run_probe(road, s),
        "workers": lambda s: run_workers(road, folder, args.steps, s),
    }
    deadline = time.monotonic() + BUDGET_S
    for name in (part for part in PARTS if part in args.only):
        started = time.monotonic()
        limit_s = min(LIMITS_S[name], deadline - started)
        try:
            if limit_s < 20.0:
                raise Failed(f"not run: the budget of {BUDGET_S:.0f} s is spent")
            found[name] = parts[name](limit_s)
            verdict, why = "ok", found[name] if isinstance(found[name], str) else ""
        except Exception as error:  # one part's failure is not the others'
            failed.append(name)
            known = isinstance(error, Failed | common.Missing)
            verdict, why = "FAILED", str(error) if known else f"{type(error).__name__}: {error}"
        common.say(f"{verdict} {name} ({time.monotonic() - started:.0f} s) {why}")
    return found, failed


def main() -> int:
    """Parse the flags, run, report; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=5, choices=range(1, 51), metavar="1..50")
    parser.add_argument(
        "--only", type=functools.partial(common.names_of, PARTS, what="part"), default=PARTS
    )
    args = parser.parse_args()
    if args.out and not args.out.absolute().parent.is_dir():
        parser.error(f"--out {args.out}: its folder is not there")
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or the learner would take a GPU that is there
    import torch

    if not args.cpu and not torch.cuda.is_available():
        build = "has no CUDA" if torch.version.cuda is None else "sees no GPU"
        common.say(f"gpu.sh: torch {torch.__version__} {build}: nothing was run. --help says what is needed; --cpu runs "
                   "the same road with a tiny model")  # fmt: skip
        return EXIT_USAGE
    with tempfile.TemporaryDirectory(prefix="splitgrpo-gpu-") as folder:
        found, failed = run_all(args, CPU if args.cpu else CARD, Path(folder))
    if args.cpu:
        sys.stdout.write("a tiny model on the CPU: the figures mean nothing\n")
    for line in lines_of(found):
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"failed: {', '.join(failed)}\n" if failed else "nothing failed\n")
    if args.out:
        args.out.write_text(json.dumps(found | {"failed": failed}, indent=1) + "\n")
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    common.run_main(main)
