"""The whole loop, completions a second in steady state: sampler and learner together against TRL's synchronous trainer.

Ours as `bash run.sh train` starts it, one thread a worker, max_staleness 1; TRL in one process with all cores. Both with
LoRA of rank 16, kl_coef 0.04, temperature 1, end tokens as they come: the mean lengths are in the note.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import common  # noqa: E402

GROUP_SIZE, PROMPTS, NEW_TOKENS, KL_COEF, LORA_RANK, LORA_ALPHA = 4, 8, 128, 0.04, 16, 32
SKIPPED, OUR_STEPS, PEER_STEPS, MICRO_BATCH, LIMIT_S = 2, 6, 3, 8, 900.0
QUICK_TOKENS, QUICK_STEPS = 12, 5
ROUND = re.compile(r"sampled (\d+) completions, (\d+) tokens in .* waited ([0-9.]+) s")


def flags_of(job: dict[str, Any], run_dir: Path) -> list[str]:
    """What `run.sh train` is given."""
    from splitgrpo.zero import free_port

    config = json.loads((HERE.parent / "ds_config.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": MICRO_BATCH, "bf16": {"enabled": job["dtype"] == "bfloat16"},
               "gradient_accumulation_steps": job["completions"] // MICRO_BATCH}  # fmt: skip
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(config))
    given = {
        "model_path": job["model"], "data": job["data"], "save_path": run_dir, "ds_config": path,
        "group_size": job["group_size"], "batch_size": job["completions"], "max_new_tokens": job["new_tokens"],
        "kl_coef": job["kl_coef"], "lora_rank": job["lora_rank"], "lora_alpha": job["lora_alpha"], "max_staleness": 1,
        "learning_rate": 1e-5, "max_steps": job["max_steps"], "num_threads": 1, "port": free_port(), "device": "cpu",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in given.items()]


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """One run by the launcher; rates of its steps after the first SKIPPED. Raises common.Missing."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, said = Path(folder) / "run", Path(folder) / "launch.log"
        common.wait_for_quiet()
        watch = common.Others()
        command = [sys.executable, "-m", "splitgrpo.launch", *flags_of(job, run_dir)]
        with said.open("wb") as file:
            env = os.environ | {"GLIBC_TUNABLES": common.ALLOCATOR["GLIBC_TUNABLES"]}  # as run.sh
            process = subprocess.Popen(command, cwd=HERE.parent, stdout=file, stderr=file, env=env)
        peak, started = 0.0, time.monotonic()
        try:
            while process.poll() is None and time.monotonic() - started < LIMIT_S:
                peak = max(peak, tree_rss(process.pid))
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(20.0)
        others = watch.others_share()
        if process.returncode:
            lines = said.read_text().strip().splitlines()
            raise common.Missing(f"ended with code {process.returncode}: {lines[-1:]}")
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        rounds = [m.groups() for m in ROUND.finditer((run_dir / "sampler.log").read_text())]
    found = summary(steps, rounds, job["completions"])
    return found | {"peak_rss_mib": peak, "others_share": others}


def tree_rss(pid: int) -> float:
    """Resident MiB of a process and all below it."""
    import psutil

    try:
        root = psutil.Process(pid)
        return sum(
            common.status_mib("VmRSS", p.pid) for p in [root, *root.children(recursive=True)]
        )
    except psutil.Error:
        return 0.0


def summary(steps: list[dict[str, Any]], rounds: list[Any], completions: int) -> dict[str, Any]:
    """Steady state of metrics.jsonl and the sampler's log lines: rates, idle shares and share of the ideal.

    The ideal is a step as long as the busier side needs: a step's seconds less those it waits.
    """
    steady = steps[SKIPPED:]
    if not steady:
        raise common.Missing(f"the run has {len(steps)} steps, the first {SKIPPED} are left out")
    num, step_s = len(steady), sum(s["step_s"] for s in steady) / len(steady)
    wait_s = sum(s["wait_s"] for s in steady) / num
    # A round makes one step's completions; those of the left-out steps were sampled first.
    waited = [float(w) for _, _, w in rounds[SKIPPED : SKIPPED + num]]
    if not waited:
        raise common.Missing(
            f"sampler.log tells of {len(rounds)} rounds, the first {SKIPPED} are left out"
        )
    sampler_wait_s = sum(waited) / len(waited)
    tokens = sum(s["completion_tokens"] for s in steady) / num
    return {
        "completions_per_s": completions / step_s,
        "tokens_per_s": tokens / step_s,
        "mean_len": tokens / completions,
        "learner_idle": wait_s / step_s,
        "sampler_idle": min(1.0, sampler_wait_s / step_s),
        "ideal_share": min(1.0, max(step_s - wait_s, step_s - sampler_wait_s) / step_s),
    }


def trl(job: dict[str, Any], *, tuned: bool) -> dict[str, Any]:
    """The peer's steps after its first, by peer_trl.py. Raises common.Missing."""
    python = common.python_of("trl")
    rows = trl_rows(job["data"], job["model"])
    peer = {
        "side": "trl",
        "rows": rows,
        "threads": common.all_threads(),
        "micro_batch": MICRO_BATCH,
    }
    found = common.measure(
        python,
        "peer_trl.py",
        job | peer | {"max_steps": job["peer_steps"]},
        limit_s=LIMIT_S,
        tuned=tuned,
    )
    total = {
        k: sum(s[k] for s in found["steps"])
        for k in ("step_s", "scored_s", "tokens", "completions")
    }
    return found | {
        "completions_per_s": total["completions"] / total["step_s"],
        "tokens_per_s": total["tokens"] / total["step_s"],
        "mean_len": total["tokens"] / total["completions"],
        "scored_share": total["scored_s"] / total["step_s"],
    }


def trl_rows(data: str, model: str) -> list[dict[str, str]]:
    """The first training problems as the text of our own prompts, so that both sides condition on the same tokens."""
    from data import load_problems, prompt_text
    from splitgrpo.models import load_tokenizer

    tokenizer = load_tokenizer(model)
    problems = load_problems(data, "train")[:256]
    return [
        {"prompt": prompt_text(p.question, tokenizer), "answer": p.ground_truth} for p in problems
    ]


def job_of(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of the two sides."""
    model = common.demo_model(args.work) if args.quick else common.model_of(args)
    return {
        "model": model, "data": "arithmetic" if args.quick else common.data_of(args), "group_size": GROUP_SIZE,
        "dtype": "float32" if args.quick else "bfloat16", "completions": PROMPTS * GROUP_SIZE, "kl_coef": KL_COEF,
        "new_tokens": QUICK_TOKENS if args.quick else NEW_TOKENS, "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA, "max_steps": QUICK_STEPS if args.quick else OUR_STEPS, "peer_steps": PEER_STEPS,
    }  # fmt: skip


def rows(args: argparse.Namespace) -> list[common.Row]:
    """Two rows of one measurement: completions/s, and tokens/s, which does not depend on the lengths."""
    title = f"loop: {'demo model' if args.quick else 'SmolLM2-135M'}, {PROMPTS} x {GROUP_SIZE}, kl_coef {KL_COEF}"
    try:
        job = job_of(args)
    except common.Missing as error:
        return [common.row(title, "completions/s", {}, note=str(error))]
    common.say(title)
    sides: dict[str, Any] = {common.OURS: functools.partial(ours, job)}
    if not args.quick:
        for tuned in (False, True):
            sides["trl" + common.TUNED * tuned] = functools.partial(trl, job, tuned=tuned)
    # A run is minutes long and holds several steps of its own.
    results, notes = common.interleave(sides, min(args.runs, 2))
    words = [f"up to {job['new_tokens']} new tokens, max_staleness 1, a thread a worker"]
    for side, found in results.items():
        means = {
            k: sum(r[k] for r in found) / len(found)
            for k in found[0]
            if isinstance(found[0][k], float)
        }
        words.append(f"{side}: mean length {means['mean_len']:.1f}")
        if side == common.OURS:
            words[-1] += (f", learner idle {means['learner_idle']:.0%}, sampler idle {means['sampler_idle']:.0%}, "
                          f"{means['ideal_share']:.0%} of the ideal reached")  # fmt: skip
        else:
            words[-1] += f", {means['scored_share']:.0%} of its step before any gradient"
    note = "; ".join([*words, *filter(None, [common.noise(results)]), *notes])
    rss = common.rss_of(results)
    return [
        common.row(
            f"{title}, {unit}", unit, common.values_of(results, key), peak_rss_mib=rss, note=note
        )
        for unit, key in (("completions/s", "completions_per_s"), ("tokens/s", "tokens_per_s"))
    ]
