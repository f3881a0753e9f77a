"""The losses beside grpo_loss and gspo_loss, and the arithmetic that all of them share. Pure functions of tensors.

Every loss takes the arguments of utils.grpo_loss and returns (loss, sums for the metrics); those that a paper's formula
has no use for are accepted and not read (config.py refuses their flags). Shapes: B rows, L length, S completions of the
whole optimizer step, N their sampled tokens.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of more overflows float32 into NaN gradients
AGGREGATIONS = ("sequence", "token", "fixed")

LossResult = tuple[Tensor, dict[str, Tensor]]

# ---- variants of GRPO ---------------------------------------------------------------------------


def dr_grpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, completion_mask: Tensor, *,
    clip_eps: float = 0.2, clip_eps_high: float | None = None, kl_coef: float = 0.0, denominator: float | None = None,
    aggregation: str = "fixed", dual_clip: float | None = None,
) -> LossResult:  # fmt: skip
    """Dr. GRPO: a constant divisor instead of each row's length (arXiv 2503.20783); advantages r - mean, without the std.

    `denominator` is S * max_new_tokens; None takes the longest completion of this batch for max_new_tokens.
    """
    ratio = token_ratio(logprobs, old_logprobs, completion_mask)  # (B, L)
    policy, clipped = clipped_loss(ratio, advantages, clip_eps, clip_eps_high, dual_clip)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return finish(policy, ratio, clipped, kl, kl_coef, completion_mask, aggregation, denominator)


def dapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, completion_mask: Tensor, *,
    clip_eps: float = 0.2, clip_eps_high: float | None = 0.28, kl_coef: float = 0.0, denominator: float | None = None,
    aggregation: str = "token", dual_clip: float | None = None,
) -> LossResult:  # fmt: skip
    """DAPO: a higher upper clip bound, every token of the step weighs the same (arXiv 2503.14476, equation 8).

    `denominator` is N.
    """
    ratio = token_ratio(logprobs, old_logprobs, completion_mask)  # (B, L)
    policy, clipped = clipped_loss(ratio, advantages, clip_eps, clip_eps_high, dual_clip)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return finish(policy, ratio, clipped, kl, kl_coef, completion_mask, aggregation, denominator)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, completion_mask: Tensor, *,
    clip_eps: float = 0.2, clip_eps_high: float | None = 4.0, kl_coef: float = 0.0, denominator: float | None = None,
    aggregation: str = "token", dual_clip: float | None = None,
) -> LossResult:  # fmt: skip
    """CISPO: REINFORCE with a capped, detached ratio, so that no token loses its gradient (arXiv 2506.13585, equation 4).

    The cap is 1 + clip_eps_high (TRL's is epsilon_high itself: its 5.0 is 4.0 here). None caps at 1 + clip_eps. There is no
    lower bound. clip_frac is the share of capped tokens. `denominator` is N.
    """
    ratio = token_ratio(logprobs, old_logprobs, completion_mask)  # (B, L)
    cap = 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high)
    policy = (
        -ratio.detach().clamp(max=cap) * per_token(advantages) * masked(logprobs, completion_mask)
    )
    capped = (torch.zeros_like(completion_mask), ratio > cap)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return finish(policy, ratio, capped, kl, kl_coef, completion_mask, aggregation, denominator)


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, completion_mask: Tensor, *,
    clip_eps: float = 0.2, clip_eps_high: float | None = None, kl_coef: float = 0.0, denominator: float | None = None,
    aggregation: str = "sequence", dual_clip: float | None = None,
) -> LossResult:  # fmt: skip
    """SAPO: a smooth gate in place of the clip, steeper for negative advantages (arXiv 2511.20347).

    -sigmoid(tau * (w - 1)) * 4 / tau * A, tau 1.0 for A > 0 and 1.05 otherwise. Nothing is clipped: no clip_frac.
    """
    ratio = token_ratio(logprobs, old_logprobs, completion_mask)  # (B, L)
    a = per_token(advantages)
    tau = torch.full_like(a, 1.05).masked_fill(a > 0, 1.0)
    policy = -torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * a
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return finish(policy, ratio, None, kl, kl_coef, completion_mask, aggregation, denominator)


def reinforce_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, completion_mask: Tensor, *,
    clip_eps: float = 0.2, clip_eps_high: float | None = None, kl_coef: float = 0.0, denominator: float | None = None,
    aggregation: str = "token", dual_clip: float | None = None,
) -> LossResult:  # fmt: skip
    """REINFORCE with a baseline: -A * log-prob, every token of the step weighs the same. `denominator` is N.

    No ratio enters the loss, so stale rollouts are not corrected for; the ratio is still measured.
    """
    ratio = token_ratio(logprobs.detach(), old_logprobs, completion_mask)  # (B, L)
    policy = -per_token(advantages) * masked(logprobs, completion_mask)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return finish(policy, ratio, None, kl, kl_coef, completion_mask, aggregation, denominator)


# ---- pieces of a loss ---------------------------------------------------------------------------


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values on the mask, 0 with gradient exactly 0 elsewhere, whatever stood there."""
    return values.masked_fill(~mask, 0.0)


def lengths(mask: Tensor) -> Tensor:
    """(B,) sampled tokens of each row, at least 1."""
    return mask.sum(dim=1).clamp(min=1)


def per_token(advantages: Tensor) -> Tensor:
    """(B,) advantages as (B, 1); (B, L) ones, where each token has a weight of its own, as they are."""
    return advantages[:, None] if advantages.dim() == 1 else advantages


def token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(B, L) exp(lp - old), 1 off the mask."""
    log_ratio = masked(logprobs - old_logprobs, mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(B, L) the geometric mean of a row's token ratios, the same at each of its tokens."""
    log_ratio = masked(logprobs - old_logprobs, mask).sum(dim=1, keepdim=True)
    mean = log_ratio / lengths(mask)[:, None]  # (B, 1)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(logprobs)


def clipped_loss(
    ratio: Tensor,
    advantages: Tensor,
    clip_eps: float,
    clip_eps_high: float | None,
    dual_clip: float | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """-min(w A, clip(w, 1 - eps, 1 + eps_high) A), and where the lower and the upper bound took the gradient away.

    `dual_clip` c > 1 bounds the loss of a token with A < 0 by -c A (arXiv 1912.09729); None: no bound.
    """
    low, high = 1.0 - clip_eps, 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high)
    a = per_token(advantages)
    objective = torch.minimum(ratio * a, ratio.clamp(low, high) * a)  # (B, L)
    at_low, at_high = (ratio < low) & (a < 0), (ratio > high) & (a > 0)
    if dual_clip is not None:
        objective = torch.where(a < 0, torch.maximum(objective, dual_clip * a), objective)
        at_high = at_high | ((ratio > dual_clip) & (a < 0))
    return -objective, (at_low, at_high)


def token_kl(logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor) -> Tensor | None:
    """(2, B, L): k3 = exp(f - lp) - (f - lp) - 1, never negative, and k1 = lp - f; None without a reference."""
    if ref_logprobs is None:
        return None
    gap = masked(ref_logprobs - logprobs, mask)
    return torch.stack([k3(gap), -gap.detach()])


def k3(gap: Tensor) -> Tensor:
    """exp(gap) - gap - 1, never negative; the gap is bounded first, or exp() would overflow into NaN gradients."""
    bounded = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.expm1() - bounded


def aggregate(values: Tensor, mask: Tensor, aggregation: str, denominator: float | None) -> Tensor:
    """(B, L) -> scalar. "sequence": mean over each row's tokens, then sum / S; "token": sum / N; "fixed": sum / (S * limit).

    `denominator` is S, N or S * max_new_tokens of the whole optimizer step (`step_denominator`), so that micro-batches add
    up; None takes this batch's own count, with its longest completion as the limit.
    """
    values = masked(values, mask)
    if aggregation == "sequence":
        values = values / lengths(mask)[:, None]
    elif aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r} is none of {AGGREGATIONS}")
    if denominator is None:
        rows = mask.sum(dim=1)
        longest = int(rows.max()) if len(rows) else 0
        denominator = step_denominator(aggregation, int((rows > 0).sum()), int(rows.sum()), longest)
    return values.sum() / max(1.0, denominator)


def step_denominator(aggregation: str, sequences: int, tokens: int, max_new_tokens: int) -> float:
    """What the sum of a step's losses is divided by: S, N or S * max_new_tokens, at least 1."""
    chosen = {"sequence": sequences, "token": tokens, "fixed": sequences * max_new_tokens}
    return float(max(1, chosen[aggregation]))


def aggregation_of(loss_fn: Callable[..., LossResult], options: Mapping[str, Any]) -> str:
    """How a loss takes its mean: as asked, or by its own default; a loss of a user's own without a say: "sequence"."""
    parameter = inspect.signature(loss_fn).parameters.get("aggregation")
    return str(options.get("aggregation") or (parameter.default if parameter else "sequence"))


def finish(
    policy: Tensor,
    ratio: Tensor,
    clipped: tuple[Tensor, Tensor] | None,
    kl: Tensor | None,
    kl_coef: float,
    mask: Tensor,
    aggregation: str,
    denominator: float | None,
) -> LossResult:
    """Add the KL, take the mean, and collect what is worth knowing.

    Metrics are detached sums over this batch (ratio_max a maximum, ratio_min a minimum), for the learner to add up over
    micro-batches and ranks. kl_sum and kl_k1_sum are over rows (mean over tokens each) and absent without a KL; clipped
    sums are absent where nothing is clipped; the others are over tokens.
    """
    loss = aggregate(
        policy if kl is None else policy + kl_coef * kl[0], mask, aggregation, denominator
    )
    seen = ratio.detach()[mask]  # (N,)
    metrics = {
        "ratio_sum": seen.sum(),
        "ratio_min": torch.cat([seen, seen.new_full((1,), float("inf"))]).min(),
        "ratio_max": torch.cat([seen, seen.new_zeros(1)]).max(),
        "num_tokens": mask.sum().float(),
        "num_sequences": mask.any(dim=1).sum().float(),
    }
    if clipped is not None:
        metrics["clipped_low_sum"], metrics["clipped_high_sum"] = (
            (c & mask).sum().float() for c in clipped
        )
    if kl is not None:
        rows = (masked(kl.detach(), mask).sum(dim=2) / lengths(mask)).sum(dim=1)
        metrics["kl_sum"], metrics["kl_k1_sum"] = rows[0], rows[1]
    return loss, metrics


# ---- beside the loss ----------------------------------------------------------------------------


def soft_overlong_penalty(num_tokens: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """(S,) completion lengths -> (S,) float64 penalties from 0 to -1, linear over the last `buffer` tokens.

    DAPO, arXiv 2503.14476, equation 13, with max_new_tokens as L_max and `buffer` as L_cache; a completion that reaches
    the limit gets -1.
    """
    start = max_new_tokens - buffer
    return ((start - num_tokens.double()) / buffer).clamp(-1.0, 0.0)


def mismatch_weights(gap: Tensor, mask: Tensor, mode: str, level: str, cap: float) -> Tensor:
    """(B, L) weights for the difference of learner and sampler at the same version, `gap` (B, L) = learner - sampler, nats.

    "truncate": min(exp(gap), cap); "mask": exp(gap), and 0 above the cap. `level` "token" weighs each token by its own gap,
    "sequence" a whole completion by the sum of its gaps (the ratio of the probabilities of the two for drawing all of it).
    They multiply the advantages, without a gradient. Known as TIS (truncate) and IcePop or MIS (mask).
    """
    gap = masked(gap, mask)
    if level == "sequence":
        gap = gap.sum(dim=1, keepdim=True).expand_as(gap)
    ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    kept = ratio.clamp(max=cap) if mode == "truncate" else ratio.masked_fill(ratio > cap, 0.0)
    return kept.detach()
