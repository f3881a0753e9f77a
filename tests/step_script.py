"""One rank of the learner's step on a tiny model and fixed groups; test_step.py starts it, once for each rank."""

import json
import logging
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]

import numpy as np
import torch
from conftest import VOCAB, tiny_model
from safetensors.torch import save_file

from splitgrpo import batching, checkpoints, enginestate, models, zero
from splitgrpo import step as step_module
from splitgrpo.mismatch import Correction, PolicyHistory
from splitgrpo.policy import PolicyModule
from splitgrpo.rollout import Group, Rollout
from splitgrpo.step import StepPlan
from utils import LOSSES, group_advantages


def fixed_groups(num_groups: int, group_size: int) -> list[Group]:
    """Groups of unequal lengths with noisy old log-probs and rewards 0, 1, 2."""
    rng = np.random.default_rng(7)
    groups = []
    for seq in range(num_groups):
        prompt = rng.integers(3, VOCAB, size=int(rng.integers(2, 9)))
        rollouts = []
        for _ in range(group_size):
            completion = rng.integers(3, VOCAB, size=int(rng.integers(1, 12)))
            ids = np.concatenate([prompt, completion]).astype(np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            old = rng.uniform(-4.5, -3.5, len(ids)).astype(np.float32) * mask
            ref = rng.uniform(-4.5, -3.5, len(ids)).astype(np.float32) * mask
            rollouts.append(
                Rollout(
                    ids, mask, old, ref, float(rng.integers(0, 3)), False, len(completion) < 11, {}
                )
            )
        groups.append(Group(tuple(rollouts), 0, seq, 0, 0, 0, 1, "", 1.0, "run"))
    return groups


def make_plan(job: dict, ranks: zero.Ranks, model: Any, ds: zero.DeepSpeedSettings) -> StepPlan:
    """As the learner makes it."""

    def agree(values: list[int]) -> list[int]:
        tensor = torch.tensor(values)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=ranks.control)
        return tensor.tolist()

    correction = job.get("correction")
    return StepPlan(
        ranks=ranks,
        loss_fn=LOSSES[job["loss"]],
        loss_options=job["loss_options"],
        micro_batch_size=ds.micro_batch_size,
        packed=not job.get("plain"),
        pad_id=0,
        max_new_tokens=11,
        mask_truncated=job.get("mask_truncated", False),
        entropy_coef=job.get("entropy_coef", 0.0),
        history=PolicyHistory(model, keep=3),
        correction=Correction(*correction) if correction else None,
        agree=agree,
        should_stop=lambda: False,
        bump=lambda: None,
    )


def split_for(job: dict, ranks: zero.Ranks):
    """How rows are split in this job: "lopsided" gives rank 0 all, "reversed" and "padded" move rows and pads about."""
    if job.get("split") == "lopsided":
        size = job["micro"]
        return lambda rollouts, num_ranks, _: [
            [list(range(i, min(i + size, len(rollouts))))] + [[]] * (num_ranks - 1)
            for i in range(0, len(rollouts), size)
        ]
    return batching.plan_rows if job.get("plain") else batching.plan_packed


def take_steps(job: dict, ranks: zero.Ranks) -> tuple[dict, dict, list]:
    """job["steps"] steps of a fresh engine: LoRA masters, Adam moments and metrics of each step."""
    ds = zero.read_ds_config(job["ds_config"], job["lr"])
    base = tiny_model().requires_grad_(False)
    base = base.to(models.DTYPES[ds.dtype_name])
    model = models.add_lora(base, rank=4, alpha=8, seed=job.get("lora_seed", 0))
    if job.get("trained"):  # an adapter that was loaded, before DeepSpeed makes its masters
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
    policy = PolicyModule(model, 1.0, 0, 1.0, entropy_grad=job.get("entropy_coef", 0.0) > 0)
    engine = zero.start_engine(policy, ds)
    if "resume" in job:
        path = Path(job["resume"])
        checkpoints.restore(engine, ranks, path, checkpoints.read_index(path))
    plan = make_plan(job, ranks, model, ds)
    if plan.packed:
        plan = replace(plan, packed=policy.pack(logging.getLogger("step")))
    step_module.plan_rows = step_module.plan_packed = split_for(job, ranks)
    groups = fixed_groups(job.get("num_groups", 4), job.get("group_size", 4))
    if (
        job.get("split") == "reversed"
    ):  # other groups first, and the rows of each group the other way round
        groups = [replace(g, rollouts=g.rollouts[::-1]) for g in groups[::-1]]
    if job.get("split") == "padded":
        step_module.collate = padded_collate
    if job.get("all_cut"):
        groups = [
            replace(g, rollouts=tuple(replace(r, finished=False) for r in g.rollouts))
            for g in groups
        ]
    rewards = torch.tensor([r.reward for g in groups for r in g.rollouts])
    size = job.get("group_size", 4)
    results, grads = [], {}
    for step in range(job.get("start", 0), job["steps"]):
        advantages = group_advantages(rewards, size) if size > 1 else torch.ones(len(rewards))
        if step in job["nan_steps"] and (job.get("nan_rank") in (None, ranks.rank)):
            advantages = advantages * float(job.get("nan_value", "nan"))
        plan.history.add(step, enginestate.lora_state(model))
        now = [replace(g, policy_version=max(0, step - job.get("staleness", 0))) for g in groups]
        results.append(step_module.optimizer_step(engine, now, advantages, plan, step))
        if (
            step == 0 and results[0]["applied"] and "save" not in job
        ):  # Adam's first moment is then a tenth of the gradient
            first = enginestate.optimizer_state(engine)
            grads = {
                f"{k.removesuffix('|exp_avg')}|grad": 10 * v
                for k, v in first.items()
                if k.endswith("|exp_avg")
            }
    if "save" in job:
        save_checkpoint(Path(job["save"]), engine, ranks, job["steps"])
    for name in ("plan_rows", "plan_packed", "collate"):
        setattr(step_module, name, getattr(batching, name))
    moments = enginestate.optimizer_state(engine) if any(r["applied"] for r in results) else {}
    return enginestate.lora_state(model), moments | grads, results


def save_checkpoint(run_dir: Path, engine: Any, ranks: zero.Ranks, step: int) -> None:
    """As the learner does."""
    torch.manual_seed(1000 + ranks.rank)  # a random state that no fresh process has
    tensors = checkpoints.gather_state(engine, ranks)
    fields = {"step": step, "lineage": 1, "run_id": "r", "base_digest": "d", "cursor": {}, "skipped": 0, "bad_in_row": 0,
              "elapsed_s": 0.0,
              "num_ranks": ranks.num_ranks, "settings": {}, "adam_step": enginestate.adam_step(engine),
              "schedule": zero.schedule_step(engine)}  # fmt: skip
    if ranks.is_main:
        checkpoints.write_checkpoint(run_dir, tensors, 2, **fields)
    torch.distributed.barrier(group=ranks.control)


def padded_collate(rollouts, advantages, rows, pad_id, packed):
    """The same rows with five more columns of padding."""
    batch = batching.collate(rollouts, advantages, rows, pad_id, packed=packed)
    wider = {
        f.name: torch.nn.functional.pad(value, (0, 5))
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), torch.Tensor) and value.dim() == 2
    }
    if batch.packing is not None:
        old = batch.input_ids.shape[1]
        source = batch.packing.source
        wider["packing"] = replace(batch.packing, source=source // old * (old + 5) + source % old)
    return replace(batch, **wider)


def main(jobs: list[dict]) -> None:
    """Run each job in turn in these processes; rank 0 writes weights and metrics."""
    models.use_threads(1)
    ranks = zero.start_ranks()
    for job in jobs:
        weights, moments, results = take_steps(job, ranks)
        if ranks.is_main:
            state = {"rng": torch.get_rng_state()} if "resume" in job else {}
            save_file(weights | moments | state, job["out"])
            with open(job["out"] + ".json", "w") as file:
                json.dump(results, file)


if __name__ == "__main__":
    with open(sys.argv[1]) as given:
        main(json.load(given))
    sys.stdout.flush()
    os._exit(0)
