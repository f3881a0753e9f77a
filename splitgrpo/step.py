"""One optimizer step: micro-batches through the loss, backward, step, and what is worth knowing about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from splitgrpo.batching import MicroBatch, collate, plan_packed, plan_rows
from splitgrpo.losses import LossResult, aggregate, aggregation_of, masked, step_denominator
from splitgrpo.mismatch import (
    Correction,
    PolicyHistory,
    gap_metrics,
    old_policy_logprobs,
    rows_to_measure,
)
from splitgrpo.rollout import Group
from splitgrpo.zero import Ranks, take_step

LossFn = Callable[..., LossResult]
# Metrics reduced by max or min over micro-batches and ranks; all others are sums.
MAX_METRICS, MIN_METRICS = ("ratio_max", "gap_max"), ("ratio_min",)


@dataclass(frozen=True)
class StepPlan:
    """What stays the same from step to step. `loss_options` are those keyword arguments of the loss that were given.

    history     LoRA weights of earlier versions, to measure the sampler/learner mismatch of stale rollouts
    correction  weights for that mismatch; None: measured only
    packed      rows go through the model as one stream (PolicyModule.pack)
    """

    ranks: Ranks
    loss_fn: LossFn
    loss_options: dict[str, Any]
    micro_batch_size: int
    packed: bool
    pad_id: int
    max_new_tokens: int
    mask_truncated: bool
    entropy_coef: float
    history: PolicyHistory
    correction: Correction | None
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
            old, new = self.values.get(name), float(value)
            if old is not None:
                pick = {**dict.fromkeys(MAX_METRICS, max), **dict.fromkeys(MIN_METRICS, min)}.get(
                    name
                )
                new = pick(old, new) if pick else old + new
            self.values[name] = new

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        """The same on all ranks. A collective."""
        ops = {
            **dict.fromkeys(MAX_METRICS, dist.ReduceOp.MAX),
            **dict.fromkeys(MIN_METRICS, dist.ReduceOp.MIN),
        }
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            chosen = [n for n in sorted(self.values) if ops.get(n, dist.ReduceOp.SUM) == op]
            tensor = torch.tensor([self.values[n] for n in chosen], dtype=torch.float64)
            if chosen and ranks.num_ranks > 1:
                dist.all_reduce(tensor, op=op, group=ranks.control)
            self.values.update(zip(chosen, tensor.tolist(), strict=True))
        return self.values


def optimizer_step(
    engine: Any, groups: Sequence[Group], advantages: Tensor, plan: StepPlan, version: int
) -> dict[str, float] | None:
    """Take one optimizer step on whole groups; (S,) advantages in the order of the rollouts, `version` of the weights now.

    Returns `step_metrics`, equal on all ranks; None when a signal came, with the weights untouched. A step whose loss or
    gradient is not finite on any rank leaves the weights as they were on all: applied is 0.0.
    """
    rows = [(r, number) for number, g in enumerate(groups) for r in g.rollouts]
    kept = [i for i, (r, _) in enumerate(rows) if r.finished or not plan.mask_truncated]
    rollouts, group_of = [rows[i][0] for i in kept], [rows[i][1] for i in kept]
    versions = [groups[n].policy_version for n in group_of]
    advantages = advantages[kept]
    measured = old_policy_logprobs(
        engine.module, plan.history, rollouts, versions,
        rows_to_measure(versions, group_of, version, plan.correction is not None),
        ranks=plan.ranks, micro_batch_size=plan.micro_batch_size, packed=plan.packed, pad_id=plan.pad_id, bump=plan.bump,
    )  # fmt: skip
    aggregation = aggregation_of(plan.loss_fn, plan.loss_options)
    num_tokens = sum(r.completion_len for r in rollouts)
    denominator = step_denominator(aggregation, len(rollouts), num_tokens, plan.max_new_tokens)
    ranks, sums, finite = plan.ranks, StepMetrics(), True
    plan_them = plan_packed if plan.packed else plan_rows
    micro_steps = plan_them(rollouts, ranks.num_ranks, plan.micro_batch_size)
    micro_steps = micro_steps or [
        [[]] * ranks.num_ranks
    ]  # every completion was masked: an empty step
    for i, split in enumerate(micro_steps):
        plan.bump()
        if plan.agree([int(plan.should_stop())])[0]:
            return None
        last = i == len(micro_steps) - 1
        mine = split[ranks.rank]
        batch = collate(rollouts, advantages, mine, plan.pad_id, packed=plan.packed)
        own, known = own_logprobs(batch, mine, versions, version, measured)
        batch, own, known = batch.to(ranks.device), own.to(ranks.device), known.to(ranks.device)
        engine.set_gradient_accumulation_boundary(last)
        logprobs, entropy = engine(
            batch.input_ids, batch.attention_mask, batch.completion_mask, with_entropy=True,
            packing=batch.packing,
        )  # fmt: skip
        own = torch.where(known[:, None], own, logprobs.detach())
        loss, metrics = micro_loss(plan, batch, logprobs, own, entropy, aggregation, denominator)
        # Rows that are neither fresh nor measured have no log-probs of the learner's at their version.
        fresh = torch.tensor([versions[r] == version for r in mine] or [False], device=ranks.device)
        metrics |= gap_metrics(
            own - batch.old_logprobs, batch.completion_mask & (known | fresh)[:, None]
        )
        sums.add(metrics | {"loss": loss.detach()})
        finite = finite and bool(torch.isfinite(loss.detach()))
        if last and plan.agree([int(not finite)])[0]:
            loss = loss * float(
                "nan"
            )  # of one rank or another: DeepSpeed drops the gradient on all
        # DeepSpeed averages gradients over ranks; the loss is divided by the whole step's sequences already.
        engine.backward(loss * ranks.num_ranks, scale_wrt_gas=False)
    applied, norm = take_step(engine)
    result = step_metrics(sums.over_ranks(ranks), num_tokens, len(rollouts))
    return result | {"grad_norm": norm, "applied": float(applied)}


def own_logprobs(
    batch: MicroBatch,
    rows: Sequence[int],
    versions: Sequence[int],
    version: int,
    measured: dict[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """(B, L) the learner's log-probs by the versions that sampled the rows, and (B,) bool which rows have them."""
    own = torch.zeros_like(batch.old_logprobs)
    known = torch.zeros(len(own), dtype=torch.bool)
    for i, row in enumerate(rows):
        if row in measured:
            own[i, : len(measured[row])], known[i] = measured[row], True
    return own, known


def micro_loss(
    plan: StepPlan,
    batch: MicroBatch,
    logprobs: Tensor,
    own: Tensor,
    entropy: Tensor,
    aggregation: str,
    denominator: float,
) -> LossResult:
    """The loss of one micro-batch, with what the plan adds to it: mismatch weights and the entropy bonus."""
    old, advantages, more = batch.old_logprobs, batch.advantages, {}
    if plan.correction is not None:
        weights = plan.correction.weights(own - old, batch.completion_mask)
        more["weight_sum"] = masked(weights, batch.completion_mask).sum()
        old, advantages = own, advantages[:, None] * weights
    loss, metrics = plan.loss_fn(
        logprobs, old, batch.ref_logprobs, advantages, batch.completion_mask,
        **plan.loss_options, denominator=denominator,
    )  # fmt: skip
    if plan.entropy_coef:
        loss = loss - plan.entropy_coef * aggregate(
            entropy, batch.completion_mask, aggregation, denominator
        )
    more["entropy_sum"] = masked(entropy.detach(), batch.completion_mask).sum()
    return loss, metrics | more


def step_metrics(total: dict[str, float], num_tokens: int, num_rows: int) -> dict[str, float]:
    """Sums over a whole step -> what README, "Metrics", names; absent where there is nothing to measure."""
    tokens, rows = max(1, num_tokens), max(1, num_rows)
    out = {"loss": total["loss"], "entropy": total["entropy_sum"] / tokens}
    if "kl_sum" in total:
        out |= {"kl": total["kl_sum"] / rows, "kl_k1": total["kl_k1_sum"] / rows}
    if "clipped_low_sum" in total:
        low, high = total["clipped_low_sum"] / tokens, total["clipped_high_sum"] / tokens
        out |= {"clip_frac": low + high, "clip_frac_low": low, "clip_frac_high": high}
    if "ratio_sum" in total:
        out |= {"ratio_mean": total["ratio_sum"] / tokens}
        out |= {name: total[name] for name in ("ratio_min", "ratio_max")}
    if gap_tokens := total["gap_tokens"]:
        out |= {f"mismatch_{new}": total[f"gap_{old}"] / gap_tokens
                for new, old in (("mean", "sum"), ("k1", "k1_sum"), ("k3", "k3_sum"))}  # fmt: skip
        out["mismatch_max"] = total["gap_max"]
    if "weight_sum" in total:
        out["mismatch_weight"] = total["weight_sum"] / tokens
    return out


def rollout_metrics(groups: Sequence[Group], version: int, advantages: Tensor) -> dict[str, float]:
    """What the groups of one step say about the policies that sampled them; `version` of the weights they are trained on."""
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = np.array([r.completion_len for r in rollouts])
    staleness = np.array([version - g.policy_version for g in groups])
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
        "truncated_frac": float(np.mean([not r.finished for r in rollouts])),
        "zero_std_frac": float((advantages.view(len(groups), -1) == 0).all(dim=1).float().mean()),
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
