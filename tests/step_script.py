"""One rank of the learner's step on a tiny model and fixed groups; test_step.py starts it, once for each rank."""

import json
import os
import sys

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]

import numpy as np
import torch
from conftest import VOCAB, tiny_model
from safetensors.torch import save_file

from splitgrpo import models, zero
from splitgrpo.logprobs import PolicyModule
from splitgrpo.rollout import Group, Rollout
from splitgrpo.step import StepPlan, optimizer_step
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
                Rollout(ids, mask, old, ref, float(rng.integers(0, 3)), False, True, {})
            )
        groups.append(Group(tuple(rollouts), 0, seq, 0, 0, 0, 1, "", 1.0, "run"))
    return groups


def main(job: dict) -> None:
    """Take job["steps"] steps; rank 0 writes weights and metrics."""
    ds = zero.read_ds_config(job["ds_config"], job["lr"])
    ranks = zero.start_ranks(1)
    base = tiny_model().requires_grad_(False)
    model = models.add_lora(base.to(models.DTYPES[ds.dtype_name]), rank=4, alpha=8, seed=0)
    engine = zero.start_engine(PolicyModule(model, 1.0, 0, 1.0), ds)

    def agree(values: list[int]) -> list[int]:
        tensor = torch.tensor(values)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=ranks.control)
        return tensor.tolist()

    plan = StepPlan(
        ranks=ranks,
        loss_fn=LOSSES[job["loss"]],
        loss_options=job["loss_options"],
        micro_batch_size=ds.micro_batch_size,
        pad_id=0,
        agree=agree,
        should_stop=lambda: False,
        bump=lambda: None,
    )
    groups = fixed_groups(4, 4)
    rewards = torch.tensor([r.reward for g in groups for r in g.rollouts])
    results = []
    for step in range(job["steps"]):
        advantages = group_advantages(rewards, 4)
        if step in job["nan_steps"]:
            advantages = advantages * float("nan")
        results.append(optimizer_step(engine, groups, advantages, plan))
    before, moments = zero.lora_state(model), zero.optimizer_state(model)
    if ranks.is_main:
        save_file(before | moments, job["out"])
        with open(job["out"] + ".json", "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
