"""Completion tokens a second of one optimizer step (forward, backward, update): ours against padded rows through PEFT.

Groups of real prompts and random completions, LoRA of rank 16 on every linear layer, bfloat16, kl_coef 0, micro-batches of 8
rows. Ours is what the learner runs: zero.start_engine and step.optimizer_step, metrics included.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import ceiling  # noqa: E402
import common  # noqa: E402

LORA_RANK, LORA_ALPHA, LEARNING_RATE, MICRO_BATCH = 16, 32, 1e-5, 8
# name, prompts, group size, prompt tokens, new tokens, timed steps
WORKLOADS = (
    ("SmolLM2-135M, 8 rows of 112 + 128", 2, 4, 112, 128, 3),
    ("SmolLM2-135M, 32 rows of 112 + 128", 8, 4, 112, 128, 1),
)
QUICK = ("demo model, 8 rows of 24 + 16", 2, 4, 24, 16, 2)


# ---- in a process of its own ------------------------------------------------------------------------


def record_groups(job: dict[str, Any]) -> list[Any]:
    """Groups as a sampler sends them: the job's prompts, random completions, rewards 0 to 2, nobody finished."""
    import numpy as np

    from splitgrpo.rollout import Group, Rollout

    rng = np.random.default_rng(3)
    groups = []
    for seq, prompt in enumerate(job["prompts"]):
        rollouts = []
        for _ in range(job["group_size"]):
            completion = rng.integers(3, job["vocab_size"], job["new_tokens"])
            ids = np.concatenate([prompt, completion]).astype(np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            old = rng.uniform(-11.0, -9.0, len(ids)).astype(np.float32) * mask
            rollouts.append(Rollout(ids, mask, old, None, float(rng.integers(3)), False, False, {}))
        groups.append(Group(tuple(rollouts), 0, seq, seq, 0, 0, 1, "", 1.0, "benchmark"))
    return groups


class OurLearner:
    """What splitgrpo.learner builds, without a server, a journal or a run folder."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        from splitgrpo import models, zero
        from splitgrpo.mismatch import PolicyHistory
        from splitgrpo.policy import PolicyModule
        from splitgrpo.step import StepPlan
        from utils import LOSSES

        rows = len(job["prompts"]) * job["group_size"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ds_config.json"
            micro = min(MICRO_BATCH, rows)
            change = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": rows // micro,
                      "bf16": {"enabled": job["dtype"] == "bfloat16"}}  # fmt: skip
            path.write_text(
                json.dumps(json.loads((HERE.parent / "ds_config.json").read_text()) | change)
            )
            ds = zero.read_ds_config(str(path), LEARNING_RATE)
        models.use_threads(job["threads"])
        ranks = zero.start_ranks()
        base = models.load_base(job["model"], getattr(torch, job["dtype"]))
        model = models.add_lora(base, LORA_RANK, LORA_ALPHA, 0)
        policy = PolicyModule(model, 1.0, 0, 1.0)
        self.engine = zero.start_engine(policy, ds)
        packed = job["side"] != "plain" and policy.pack(logging.getLogger("learner"))
        self.plan = StepPlan(
            ranks=ranks, loss_fn=LOSSES["grpo"], loss_options={"kl_coef": 0.0},
            micro_batch_size=ds.micro_batch_size, packed=packed, pad_id=0, max_new_tokens=job["new_tokens"],
            mask_truncated=False, entropy_coef=0.0, history=PolicyHistory(model, 2), correction=None,
            agree=lambda values: values, should_stop=lambda: False, bump=lambda: None,
        )  # fmt: skip

    def step(self, groups: list[Any], version: int) -> None:
        """One optimizer step on fresh groups. Raises SystemExit where it was not taken."""
        import dataclasses

        import torch

        from splitgrpo.step import optimizer_step
        from utils import group_advantages

        fresh = [dataclasses.replace(g, policy_version=version) for g in groups]
        rewards = torch.tensor([r.reward for g in fresh for r in g.rollouts], dtype=torch.float64)
        advantages = group_advantages(rewards, len(fresh[0].rollouts))
        result = optimizer_step(self.engine, fresh, advantages, self.plan, version)
        if result is None or not result["applied"]:
            raise SystemExit(f"the step was not taken: {result}")


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """Time `repeat` steps after one of warm-up; where job["memory"], what the first step takes above the weights."""
    learner, groups = OurLearner(job), record_groups(job)
    level = common.reset_peak()
    learner.step(groups, 0)
    above = common.status_mib("VmHWM") - level
    if job.get("memory"):
        return {"above_mib": above, "level_mib": level}
    steps = iter(range(1, 1 + job["repeat"]))
    seconds = sum(common.timed(lambda: learner.step(groups, next(steps)), job["repeat"]))
    tokens = len(groups) * job["group_size"] * job["new_tokens"] * job["repeat"]
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "above_mib": above}


# ---- the topic --------------------------------------------------------------------------------------


def sides_of(job: dict[str, Any], *, trl: bool) -> dict[str, Any]:
    """By side, what measures it."""

    def side(name: str, script: str, peer: str | None = None, *, tuned: bool = True) -> Any:
        def run() -> dict[str, Any]:
            python = sys.executable if peer is None else common.python_of(peer)
            return common.measure(python, script, job | {"side": name}, tuned=tuned)

        return run

    sides = {
        common.OURS: side("ours", "learner.py"),
        "plain": side("plain", "learner.py"),
        "padded peft": side("padded peft", "peer_learner.py", tuned=False),
        "padded peft" + common.TUNED: side("padded peft", "peer_learner.py"),
    }
    if trl:
        sides["trl"] = side("trl step", "peer_trl.py", "trl", tuned=False)
    return sides


def vocab_size(model: str) -> int:
    """Of a model folder."""
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


def rows(args: argparse.Namespace) -> list[common.Row]:
    """One row a workload."""
    out = []
    for name, num_prompts, group_size, prompt_len, new_tokens, repeat in (
        (QUICK,) if args.quick else WORKLOADS
    ):
        title = f"learner: {name}"
        try:
            model = common.demo_model(args.work) if args.quick else common.model_of(args)
            data = "arithmetic" if args.quick else common.data_of(args)
            job = {
                "model": model, "dtype": "bfloat16", "threads": common.all_threads(), "repeat": repeat,
                "group_size": group_size, "new_tokens": new_tokens, "vocab_size": vocab_size(model),
                "prompts": common.prompt_ids(model, data, num_prompts, length=prompt_len),
                "micro_batch": MICRO_BATCH, "lora_rank": LORA_RANK, "lora_alpha": LORA_ALPHA,
            }  # fmt: skip
            common.say(title)
            results, notes = common.interleave(sides_of(job, trl=not args.quick), args.runs)
            # Each prompt needs to be computed once a group, whatever is done.
            each = 1 + prompt_len / (group_size * new_tokens)
            limit = ceiling.learning_ceiling(model, "bfloat16", job["threads"], args.quick, each)
        except common.Missing as error:
            out.append(common.row(title, "tokens/s", {}, note=str(error)))
            continue
        words = [f"bfloat16, {job['threads']} threads, micro-batch {MICRO_BATCH}"]
        out.append(
            common.row(
                title, "tokens/s", common.values_of(results, "tokens_per_s"), ceiling=limit,
                peak_rss_mib=common.rss_of(results),
                note="; ".join(filter(None, [*words, common.noise(results), *notes])),
            )
        )  # fmt: skip
    return out


if __name__ == "__main__":
    common.give(ours(common.read_job()))
