"""One optimizer step: micro-batches through the loss, backward, step, and what is worth knowing about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from splitgrpo.batching import collate, plan_rows
from splitgrpo.rollout import Group
from splitgrpo.zero import Ranks

LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]
MAX_METRICS = ("ratio_max",)  # of the loss's metrics, those reduced by max; all others are sums


@dataclass(frozen=True)
class StepPlan:
    """What stays the same from step to step. `loss_options` are clip_eps, clip_eps_high and kl_coef."""

    ranks: Ranks
    loss_fn: LossFn
    loss_options: dict[str, float]
    micro_batch_size: int
    pad_id: int
    agree: Callable[[list[int]], list[int]]
    should_stop: Callable[[], bool]
    bump: Callable[[], None]


@dataclass
class StepMetrics:
    """Sums over the micro-batches of one rank, then over ranks."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Take in one micro-batch."""
        for name, value in metrics.items():
            old = self.values.get(name)
            new = float(value)
            if old is not None:
                new = max(old, new) if name in MAX_METRICS else old + new
            self.values[name] = new

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        """The same on all ranks. A collective."""
        names = sorted(self.values)
        for kind, op in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            chosen = [n for n in names if (n in MAX_METRICS) == kind]
            tensor = torch.tensor([self.values[n] for n in chosen], dtype=torch.float64)
            if chosen and ranks.num_ranks > 1:
                dist.all_reduce(tensor, op=op, group=ranks.control)
            self.values.update(zip(chosen, tensor.tolist(), strict=True))
        return self.values


def optimizer_step(
    engine: Any, groups: Sequence[Group], advantages: Tensor, plan: StepPlan
) -> dict[str, float] | None:
    """Take one optimizer step on whole groups; (S,) advantages in the order of the rollouts.

    Returns loss, kl (absent when no KL was taken), clip_frac, ratio_mean, ratio_max, grad_norm and applied (0.0 if
    DeepSpeed skipped a non-finite gradient), equal on all ranks; None when a signal came, with the weights untouched.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = [len(r.token_ids) for r in rollouts]
    ranks, sums = plan.ranks, StepMetrics()
    micro_steps = plan_rows(lengths, ranks.num_ranks, plan.micro_batch_size)
    for i, rows in enumerate(micro_steps):
        plan.bump()
        if plan.agree([int(plan.should_stop())])[0]:
            return None
        batch = collate(rollouts, advantages, rows[ranks.rank], plan.pad_id).to(ranks.device)
        engine.set_gradient_accumulation_boundary(i == len(micro_steps) - 1)
        logprobs = engine(batch.input_ids, batch.attention_mask, batch.completion_mask)
        loss, metrics = plan.loss_fn(
            logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.advantages,
            batch.completion_mask,
            **plan.loss_options,
            denominator=len(rollouts),
        )
        # DeepSpeed averages gradients over ranks; the loss is divided by the whole step's sequences already.
        engine.backward(loss * ranks.num_ranks, scale_wrt_gas=False)
        sums.add(metrics | {"loss": loss.detach()})
    engine.step()
    total = sums.over_ranks(ranks)
    tokens = max(1.0, total["num_tokens"])
    norm = engine.get_global_grad_norm()
    kl = {"kl": total["kl_sum"] / max(1.0, total["num_sequences"])} if "kl_sum" in total else {}
    return {
        "loss": total["loss"],
        **kl,
        "clip_frac": total["clipped_sum"] / tokens,
        "ratio_mean": total["ratio_sum"] / tokens,
        "ratio_max": total["ratio_max"],
        "grad_norm": float("nan") if norm is None else float(norm),
        "applied": float(engine.was_step_applied()),
    }


def rollout_metrics(groups: Sequence[Group], step_version: int) -> dict[str, float]:
    """What the groups of one step say about the policy that sampled them."""
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = np.array([r.completion_len for r in rollouts])
    staleness = np.array([step_version - g.policy_version for g in groups])
    rewards = np.array([r.reward for r in rollouts])
    parts = {
        f"reward/{name}": float(np.mean([r.reward_parts[name] for r in rollouts]))
        for name in rollouts[0].reward_parts
        if all(name in r.reward_parts for r in rollouts)
    }
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **parts,
        "accuracy": float(np.mean([r.correct for r in rollouts])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "completion_tokens": int(lengths.sum()),
        "completion_len_mean": float(lengths.mean()),
        "finished_frac": float(np.mean([r.finished for r in rollouts])),
        "zero_std_frac": float(np.mean([g.dead for g in groups])),
    }


class BadSteps:
    """Counts steps that DeepSpeed skipped for a non-finite gradient, and ends the run after too many in a row."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.in_row = 0

    def note(self, result: dict[str, float], step: int) -> str | None:
        """Take in one step; returns what to say aloud, or None. Raises RuntimeError after `limit` bad steps in a row."""
        if result["applied"] and np.isfinite(result["loss"]):
            self.in_row = 0
            return None
        self.total += 1
        self.in_row += 1
        text = f"step {step}: loss {result['loss']}, gradient norm {result['grad_norm']}: weights left as they were"
        if self.in_row >= self.limit:
            raise RuntimeError(
                f"{text}; that was {self.in_row} times in a row (--max_bad_steps). Lower the learning rate, or look for "
                "extreme values in the rewards."
            )
        return text
