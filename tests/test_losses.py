"""Losses and advantages: recomputed in NumPy (value and gradient), the paper's reference values, and invariances."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitgrpo.losses import (
    AGGREGATIONS,
    aggregate,
    mismatch_weights,
    reinforce_loss,
    soft_overlong_penalty,
    step_denominator,
)
from utils import LOSSES, group_advantages, grpo_loss, gspo_loss

LP = [[-0.5, -1.2, -0.3, -2.0], [-0.9, -0.4, -1.5], [-0.2, -0.7], [-1.1, -0.6, -0.8, -0.1]]
OLD = [[-0.7, -1.0, -0.3, -1.2], [-0.6, -0.9, -1.4], [-0.5, -0.3], [-1.0, -1.1, -0.5, -0.4]]
REF = [[-0.6, -1.1, -0.5, -1.5], [-0.8, -0.5, -1.6], [-0.3, -0.6], [-1.2, -0.9, -0.7, -0.2]]
REWARDS = [1.0, 0.0, 0.0, 1.0]

DEFAULT_AGGREGATION = {
    "grpo": "sequence", "gspo": "sequence", "dr_grpo": "fixed", "dapo": "token", "cispo": "token", "sapo": "sequence",
    "reinforce": "token",
}  # fmt: skip
CLIPPED = ("grpo", "gspo", "dr_grpo", "dapo")
ESTIMATORS = ("group", "batch", "none", "rloo")
# Float64 throughout, except that the 1.05 of SAPO may be rounded to float32 (a relative 5e-8)
TOLERANCE = {kind: 2e-7 if kind == "sapo" else 1e-9 for kind in LOSSES}

every_loss = pytest.mark.parametrize("kind", LOSSES)


def padded(rows, fill=0.0, length=4):
    return torch.tensor([[*r, *[fill] * (length - len(r))] for r in rows], dtype=torch.float64)


MASK = padded([[1.0] * len(r) for r in LP]).bool()


def reference_advantages():
    return group_advantages(torch.tensor(REWARDS), 4).double()


def run(loss_fn, lp, old, ref, adv, mask, **options):
    """Loss, gradient with respect to lp, metrics."""
    lp = lp.clone().requires_grad_(True)
    loss, metrics = loss_fn(lp, old, ref, adv, mask, **options)
    loss.backward()
    return loss.item(), lp.grad, metrics


def random_batch(rng, spread):
    """A ragged batch of float64 arrays with holes in its mask, sometimes with a row of no tokens at all."""
    rows, length = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    lp = -rng.exponential(1.0, (rows, length))
    old = lp + rng.normal(0, spread, lp.shape)
    ref = lp + rng.normal(0, spread, lp.shape)
    mask = rng.random((rows, length)) < 0.7
    if rng.random() < 0.3:
        mask[rng.integers(rows)] = False
    adv = rng.normal(size=(rows, length) if rng.random() < 0.3 else rows)
    return lp, old, ref, adv, mask


def clip_bounds(kind):
    # a whole completion's ratio stays closer to 1, so its bounds are tighter, or few tokens would be clipped
    return (3e-3, 4e-3) if kind == "gspo" else (0.2, 0.28)


# ---- recomputed from the definitions ------------------------------------------------------------


def numpy_ratios(kind, lp, old, mask):
    """Log-ratio of each token: its own, for GSPO the mean over its row."""
    log_ratio = np.zeros_like(lp)
    for i in range(len(lp)):
        on = np.flatnonzero(mask[i])
        for t in on:
            own = lp[i, t] - old[i, t]
            log_ratio[i, t] = np.mean(lp[i, on] - old[i, on]) if kind == "gspo" else own
    return log_ratio


def numpy_token(kind, w, a, lp, low, high, dual):
    """Loss of one token, its slope in log w, and its slope in lp with w held fixed.

    The clip by cases instead of minima: for A > 0 the loss -A min(w, 1 + high), moving below the bound; for A < 0 it is
    |A| max(w, 1 - low), at most |A| c, moving between the two.
    """
    if kind == "reinforce":
        return -a * lp, 0.0, -a
    if kind == "cispo":
        return -min(w, 1 + high) * a * lp, 0.0, -min(w, 1 + high) * a
    if kind == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gate = 1 / (1 + np.exp(-tau * (w - 1)))
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * w * a, 0.0
    if a >= 0:
        return -a * min(w, 1 + high), -a * w if w <= 1 + high else 0.0, 0.0
    ceiling = math.inf if dual is None else dual
    loss = -a * min(max(w, 1 - low), ceiling)
    return loss, -a * w if 1 - low <= w <= ceiling else 0.0, 0.0


def numpy_loss(
    kind, lp, old, ref, adv, mask, low, high, kl_coef, denominator, aggregation, dual=None
):
    """The loss from the definitions, a loop over rows and tokens in float64: value and gradient.

    With l = log w, clamped to +-20 (no slope beyond), the slopes of a token's loss are, derived by hand,
      clipped losses  d/dl = -w A where no bound is active, else 0;
      sapo            g = sigmoid(tau (w - 1)): d/dl = -(4 / tau) A * tau g (1 - g) * w = -4 g (1 - g) w A;
      cispo           w is constant: d/dlp = -min(w, 1 + high) A;
      reinforce       d/dlp = -A.
    dl/dlp = 1 for the token's own ratio; for GSPO l = mean(lp - old), so each of a row's T tokens gets 1/T of it.
    d k3 / dlp = 1 - exp(f - lp), 0 where f - lp is clamped.
    """
    value, grad = 0.0, np.zeros_like(lp)
    counts = [int(row.sum()) for row in mask]
    sequences = sum(n > 0 for n in counts)
    if denominator is None:
        own = {"sequence": sequences, "token": sum(counts), "fixed": sequences * max(counts)}
        denominator = max(1, own[aggregation])
    log_ratio = numpy_ratios(kind, lp, old, mask)
    for i in range(len(lp)):
        on = np.flatnonzero(mask[i])
        for t in on:
            share = 1 / denominator / (len(on) if aggregation == "sequence" else 1)
            a = adv[i] if adv.ndim == 1 else adv[i, t]
            w = np.exp(np.clip(log_ratio[i, t], -20, 20))
            loss, by_ratio, direct = numpy_token(kind, w, a, lp[i, t], low, high, dual)
            value += share * loss
            grad[i, t] += share * direct
            if abs(log_ratio[i, t]) <= 20:
                if kind == "gspo":
                    grad[i, on] += share * by_ratio / len(on)
                else:
                    grad[i, t] += share * by_ratio
            if kl_coef and ref is not None:
                gap = np.clip(ref[i, t] - lp[i, t], -20, 20)
                value += share * kl_coef * (np.exp(gap) - gap - 1)
                grad[i, t] += (
                    share * kl_coef * (1 - np.exp(gap)) if abs(ref[i, t] - lp[i, t]) <= 20 else 0.0
                )
    return value, grad


@every_loss
@given(
    seed=st.integers(0, 10_000),
    kl_coef=st.sampled_from([0.0, 0.04, 1.0]),
    spread=st.sampled_from([0.01, 0.3, 2.0, 15.0]),
    aggregation=st.sampled_from(AGGREGATIONS),
    denominator=st.sampled_from([None, 7.0]),
    dual=st.sampled_from([None, 1.5, 3.0]),
)
@settings(max_examples=80, deadline=None)
def test_value_and_gradient_equal_a_loop_over_the_definition(
    kind, seed, kl_coef, spread, aggregation, denominator, dual
):
    batch = random_batch(np.random.default_rng(seed), spread)
    low, high = clip_bounds(kind)
    value, grad = numpy_loss(kind, *batch, low, high, kl_coef, denominator, aggregation, dual)
    got, got_grad, _ = run(
        LOSSES[kind], *map(torch.tensor, batch), clip_eps=low, clip_eps_high=high, kl_coef=kl_coef,
        denominator=denominator, aggregation=aggregation, dual_clip=dual,
    )  # fmt: skip
    close = TOLERANCE[kind]
    assert got == pytest.approx(value, abs=close, rel=close)
    np.testing.assert_allclose(got_grad.numpy(), grad, atol=close, rtol=close)


@every_loss
def test_without_an_aggregation_or_an_upper_bound_a_loss_takes_its_own_and_the_lower_one(kind):
    batch = random_batch(np.random.default_rng(3), 0.5)
    value, grad = numpy_loss(kind, *batch, 0.1, 0.1, 0.0, None, DEFAULT_AGGREGATION[kind])
    options = {"clip_eps": 0.1, "clip_eps_high": None, "kl_coef": 0.0}
    got, got_grad, _ = run(LOSSES[kind], *map(torch.tensor, batch), **options)
    assert got == pytest.approx(value, abs=TOLERANCE[kind])
    np.testing.assert_allclose(got_grad.numpy(), grad, atol=TOLERANCE[kind])


@every_loss
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 0.3, 2.0, 15.0]),
    dual=st.sampled_from([None, 1.5]),
)
@settings(max_examples=25, deadline=None)
def test_metrics_equal_a_loop_over_the_definition(kind, seed, spread, dual):
    lp, old, ref, adv, mask = batch = random_batch(np.random.default_rng(seed), spread)
    low, high = clip_bounds(kind)
    seen, at_low, at_high, k3, k1 = [], 0, 0, 0.0, 0.0
    log_ratio = numpy_ratios(kind, lp, old, mask)
    for i, t in zip(*np.nonzero(mask), strict=True):
        w = np.exp(np.clip(log_ratio[i, t], -20, 20))
        a = adv[i] if adv.ndim == 1 else adv[i, t]
        seen.append(w)
        if kind == "cispo":
            at_high += w > 1 + high  # capped whatever the sign of A
        elif kind in CLIPPED:
            at_low += w < 1 - low and a < 0
            at_high += (w > 1 + high and a > 0) or (dual is not None and w > dual and a < 0)
        gap = ref[i, t] - lp[i, t]
        bounded = np.clip(gap, -20, 20)
        k3 += (np.exp(bounded) - bounded - 1) / mask[i].sum()
        k1 += -gap / mask[i].sum()
    want = {
        "ratio_sum": sum(seen), "ratio_min": min(seen, default=math.inf), "ratio_max": max(seen, default=0.0),
        "clipped_low_sum": at_low, "clipped_high_sum": at_high, "kl_sum": k3, "kl_k1_sum": k1,
        "num_tokens": len(seen), "num_sequences": sum(row.any() for row in mask),
    }  # fmt: skip
    if kind in ("sapo", "reinforce"):
        del want["clipped_low_sum"], want["clipped_high_sum"]
    _, _, got = run(
        LOSSES[kind], *map(torch.tensor, batch),
        clip_eps=low, clip_eps_high=high, kl_coef=0.1, dual_clip=dual,
    )  # fmt: skip
    assert {k: v.item() for k, v in got.items()} == pytest.approx(want, abs=1e-9, rel=1e-9)
    assert not any(v.requires_grad for v in got.values())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 6), groups=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_advantages_equal_a_loop_over_the_definition(estimator, seed, size, groups):
    rng = np.random.default_rng(seed)
    # few distinct values, so that groups of equal rewards occur
    rewards = rng.choice([0.0, 1.0, 1.25, 2.25], size * groups)
    want = []
    for s, r in enumerate(rewards):
        group = rewards[s // size * size : s // size * size + size]
        better = r - sum(group) / size
        if estimator == "group":
            better /= (
                math.sqrt(sum((x - sum(group) / size) ** 2 for x in group) / (size - 1)) + 1e-4
            )
        elif estimator == "batch":
            mean = sum(rewards) / len(rewards)
            better /= math.sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1)) + 1e-4
        elif estimator == "rloo":
            others = np.delete(group, s % size)
            better = r - sum(others) / (size - 1)
        want.append(better)
    got = group_advantages(torch.tensor(rewards), size, estimator=estimator)
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6, rtol=1e-6)
    assert got.dtype == torch.float32


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    limit=st.integers(2, 32),
    share=st.floats(0.05, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_the_overlong_penalty_is_a_ramp_over_the_buffer(lengths, limit, share):
    buffer = max(1, int(limit * share))
    want = []
    for n in lengths:
        over = n - (limit - buffer)
        want.append(0.0 if over <= 0 else -1.0 if over >= buffer else -over / buffer)
    got = soft_overlong_penalty(torch.tensor(lengths), limit, buffer)
    assert got.tolist() == pytest.approx(want, abs=1e-12)
    assert got.dtype == torch.float64


def test_the_overlong_penalty_by_hand():
    got = soft_overlong_penalty(torch.tensor([0, 80, 85, 90, 100, 120]), 100, 20)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    cap=st.sampled_from([1.2, 2.0, 5.0]),
)
@settings(max_examples=30, deadline=None)
def test_mismatch_weights_equal_a_loop_over_the_definition(mode, level, seed, spread, cap):
    rng = np.random.default_rng(seed)
    gap = rng.normal(0, spread, (3, 5))
    mask = rng.random(gap.shape) < 0.7
    got = mismatch_weights(torch.tensor(gap).requires_grad_(), torch.tensor(mask), mode, level, cap)
    assert not got.requires_grad
    for i, t in zip(*np.nonzero(mask), strict=True):
        nats = gap[i, t] if level == "token" else sum(gap[i, mask[i]])
        ratio = math.exp(min(20.0, max(-20.0, nats)))
        want = min(ratio, cap) if mode == "truncate" else ratio if ratio <= cap else 0.0
        assert got[i, t].item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_junk_on_masked_positions_moves_no_mismatch_weight(junk, level):
    clean = mismatch_weights(padded(LP) - padded(OLD), MASK, "truncate", level, 2.0)
    dirty = mismatch_weights(padded(LP, junk) - padded(OLD), MASK, "truncate", level, 2.0)
    assert torch.equal(dirty, clean)
    assert dirty.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "low", "high", "kl_coef"),
    [
        ("grpo", 0.2, None, 0.04), ("gspo", 3e-4, 4e-4, 0.0), ("dr_grpo", 0.2, None, 0.0), ("dapo", 0.2, 0.28, 0.0),
        ("cispo", 0.2, 4.0, 0.0), ("sapo", 0.2, None, 0.0), ("reinforce", 0.2, None, 0.0),
    ],
)  # fmt: skip
def test_a_loss_has_the_bounds_and_the_aggregation_of_its_paper_as_defaults(
    kind, low, high, kl_coef
):
    got = {name: p.default for name, p in inspect.signature(LOSSES[kind]).parameters.items()}
    assert (got["clip_eps"], got["clip_eps_high"], got["kl_coef"]) == (low, high, kl_coef)
    assert got["aggregation"] == DEFAULT_AGGREGATION[kind]
    assert (got["denominator"], got["dual_clip"]) == (None, None)


# ---- reference values and values by hand --------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "loss", "norm", "slopes"),
    [
        ("grpo", {"kl_coef": 0.0}, 0.0680477, 0.221922, (0, -0.024316, 0, 0)),
        ("grpo", {"kl_coef": 0.04}, 0.0687301, 0.222622, (0.000238, -0.025938, -0.000351, 0.000648)),
        ("gspo", {"clip_eps": 0.2, "clip_eps_high": 0.2}, 0.0132528, 0.245066,
         (-0.044307, -0.044307, 0.074602, -0.059809)),
        ("gspo", {}, 0.0464249, 0.156681, (-0.044307, -0.044307, 0.074602, 0)),
        ("dapo", {}, -0.1459800, 0.211579, (-0.081353, -0.029928, 0, 0)),
    ],
)  # fmt: skip
def test_reference_values(kind, options, loss, norm, slopes):
    # the printed digits are six or seven places, so half a unit of the last is less than 1e-6
    adv = reference_advantages()
    got, grad, _ = run(LOSSES[kind], padded(LP), padded(OLD), padded(REF), adv, MASK, **options)
    assert got == pytest.approx(loss, abs=1e-6)
    assert grad.norm().item() == pytest.approx(norm, abs=1e-6)
    for (i, t), slope in zip(((0, 0), (0, 3), (1, 0), (3, 1)), slopes, strict=True):
        assert grad[i, t].item() == pytest.approx(slope, abs=1e-6)


def test_advantages_of_the_reference_case():
    a = 0.8658754
    assert reference_advantages().tolist() == pytest.approx([a, -a, -a, a], abs=1e-6)


def test_sequence_ratios_and_kl_of_the_reference_case():
    adv = torch.zeros(4, dtype=torch.float64)
    batch = padded(LP), padded(OLD), padded(REF), adv, MASK
    _, _, m = run(gspo_loss, *batch, kl_coef=1.0)
    ratios = np.array([0.8187308, 1.0338951, 0.9512294, 1.1051709])
    assert m["ratio_sum"].item() == pytest.approx((ratios * [4, 3, 2, 4]).sum(), abs=1e-6)
    assert m["ratio_max"].item() == pytest.approx(1.1051709, abs=1e-6)
    assert m["ratio_min"].item() == pytest.approx(0.8187308, abs=1e-6)
    assert m["kl_sum"].item() / 4 == pytest.approx(0.01705846, abs=1e-6)
    assert m["num_tokens"].item() == 13
    assert m["num_sequences"].item() == 4
    for i, ratio in enumerate(ratios):
        _, _, m = run(gspo_loss, *(x[i : i + 1] for x in batch))
        assert m["ratio_max"].item() == pytest.approx(ratio, abs=1e-6)
    # with no advantage and weight 1 the loss is the mean k3 itself
    for aggregation, k3 in (("sequence", 0.01705846), ("token", 0.01984449)):
        loss, *_ = run(grpo_loss, *batch, kl_coef=1.0, aggregation=aggregation)
        assert loss == pytest.approx(k3, abs=1e-6)


@pytest.mark.parametrize("kind", CLIPPED)
@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "flows"),
    [(1, 1.5, -1.28, False), (1, 0.5, -0.5, True), (-1, 0.5, 0.8, False), (-1, 1.5, 1.5, True), (-1, 10, 10, True)],
)  # fmt: skip
def test_clipping_by_hand(kind, advantage, ratio, loss, flows):
    lp = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    one, adv = torch.ones(1, 1, dtype=torch.bool), torch.tensor([float(advantage)])
    options = {"clip_eps": 0.2, "clip_eps_high": 0.28, "kl_coef": 0.0}
    got, grad, m = run(LOSSES[kind], lp, lp * 0, None, adv, one, **options)
    assert got == pytest.approx(loss, abs=1e-6)
    assert grad.item() == pytest.approx(-advantage * ratio if flows else 0.0, abs=1e-6)
    assert (m["clipped_low_sum"] + m["clipped_high_sum"]).item() == (not flows)


@pytest.mark.parametrize("kind", CLIPPED)
@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [(-1, 10, 3, 0), (-1, 2.5, 2.5, 2.5), (-1, 0.5, 0.8, 0), (-2, 10, 6, 0), (1, 10, -1.2, 0), (1, 0.1, -0.1, -0.1)],
)  # fmt: skip
def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only(
    kind, advantage, ratio, loss, slope
):
    lp = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    one, adv = torch.ones(1, 1, dtype=torch.bool), torch.tensor([float(advantage)])
    options = {"clip_eps": 0.2, "clip_eps_high": 0.2, "kl_coef": 0.0, "dual_clip": 3.0}
    got, grad, m = run(LOSSES[kind], lp, lp * 0, None, adv, one, **options)
    assert got == pytest.approx(loss, abs=1e-6)
    assert grad.item() == pytest.approx(slope, abs=1e-6)
    assert m["clipped_low_sum"].item() == (ratio < 0.8 and advantage < 0)
    assert m["clipped_high_sum"].item() == (slope == 0 and ratio > 1)


@pytest.mark.parametrize(("gap", "k3"), [(0.5, 0.14872), (-0.5, 0.10653), (0.0, 0.0)])
def test_kl_by_hand_is_never_negative(gap, k3):
    lp = torch.tensor([[-1.0]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.bool)
    _, _, m = run(grpo_loss, lp, lp, lp + gap, torch.zeros(1), one)
    assert m["kl_sum"].item() == pytest.approx(k3, abs=5e-6)
    assert m["kl_k1_sum"].item() == pytest.approx(-gap, abs=1e-12)


def test_the_three_aggregations_by_hand():
    # A = 1 makes -lp the loss of a token: two tokens of loss 4, eight of loss 1
    lp = padded([[-4.0] * 2, [-1.0] * 8], length=8)
    mask, adv = lp != 0, torch.ones(2)
    for aggregation, want in (("sequence", 2.5), ("token", 1.6), ("fixed", 0.8)):
        step = step_denominator(aggregation, sequences=2, tokens=10, max_new_tokens=10)
        options = {"aggregation": aggregation, "denominator": step}
        loss, *_ = run(reinforce_loss, lp, lp, None, adv, mask, **options)
        assert loss == pytest.approx(want, abs=1e-12)
        assert aggregate(-lp, mask, aggregation, step).item() == pytest.approx(want, abs=1e-12)
    # without a limit of its own the longest completion, 8 tokens, stands for it
    assert aggregate(-lp, mask, "fixed", None).item() == pytest.approx(1.0, abs=1e-12)


def test_a_token_mean_weighs_the_tokens_of_uneven_micro_batches_the_same():
    step = step_denominator("token", sequences=2, tokens=4, max_new_tokens=10)
    parts = [
        run(reinforce_loss, lp, lp, None, torch.ones(1), lp != 0, denominator=step)[0]
        for lp in (torch.tensor([[-4.0, 0.0, 0.0]]), torch.tensor([[-1.0, -1.0, -1.0]]))
    ]
    assert sum(parts) == pytest.approx(1.75, abs=1e-6)  # the mean of the two means would be 2.5


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'mean' is none of"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "mean", None)


def test_a_step_without_tokens_divides_by_one():
    assert [step_denominator(a, 0, 0, 10) for a in AGGREGATIONS] == [1.0, 1.0, 1.0]


@every_loss
def test_on_policy_first_step_has_ratio_one_the_stated_loss_and_a_policy_gradient(kind):
    adv, lp, lengths = reference_advantages(), padded(LP), [4, 3, 2, 4]
    loss, grad, m = run(LOSSES[kind], lp, lp, lp, adv, MASK, kl_coef=0.04)
    weight = {
        "sequence": [1 / 4 / n for n in lengths],
        "token": [1 / 13] * 4,
        "fixed": [1 / 16] * 4,
    }
    want = 0.0
    for i, row in enumerate(LP):
        for x in row:
            a, share = adv[i].item(), weight[DEFAULT_AGGREGATION[kind]][i]
            if kind in ("cispo", "reinforce"):
                want += -a * x * share
            elif kind == "sapo":
                want += -a * share * 2 / (1.0 if a > 0 else 1.05)  # sigmoid(0) * 4 / tau
            else:
                want += -a * share
    assert loss == pytest.approx(want, abs=TOLERANCE[kind])
    if kind in ("grpo", "gspo"):
        assert loss == pytest.approx(0.0, abs=1e-7)  # equal weights for rows, advantages sum to 0
    # at ratio 1 all of them are the plain policy gradient: -A for every token
    share = torch.tensor(weight[DEFAULT_AGGREGATION[kind]], dtype=torch.float64)
    torch.testing.assert_close(grad, (-adv * share)[:, None] * MASK, atol=TOLERANCE[kind], rtol=0)
    assert grad.norm() > 0.1
    assert m["ratio_sum"] / m["num_tokens"] == m["ratio_min"] == m["ratio_max"] == 1.0
    assert m.get("clipped_low_sum", 0) == m.get("clipped_high_sum", 0) == 0
    assert m["kl_sum"] == m["kl_k1_sum"] == 0


def test_the_ratio_is_against_the_stored_log_prob_and_not_a_detached_copy():
    lp, one = torch.tensor([[-0.5]]), torch.ones(1, 1, dtype=torch.bool)
    _, _, m = run(grpo_loss, lp, torch.tensor([[-1.0]]), None, torch.ones(1), one)
    assert m["ratio_sum"].item() == pytest.approx(1.6487, abs=1e-4)
    assert m["clipped_high_sum"].item() == 1
    assert m["clipped_low_sum"].item() == 0


def test_gspo_counts_clipping_at_its_own_scale():
    lp, mask = torch.full((1, 4), -1.0), torch.ones(1, 4, dtype=torch.bool)
    _, _, m = run(gspo_loss, lp + 1e-3, lp, None, torch.ones(1), mask)
    # 1.001 is outside 1 + 4e-4, and all tokens of the row count
    assert (m["clipped_low_sum"], m["clipped_high_sum"]) == (0, 4)
    _, _, m = run(gspo_loss, lp - 1e-3, lp, None, -torch.ones(1), mask)
    assert (m["clipped_low_sum"], m["clipped_high_sum"]) == (4, 0)


# ---- invariances --------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_extreme_log_ratios_stay_finite_in_value_and_gradient(kind, gap):
    lp, one = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
    for adv in (1.0, -1.0):
        for ref in (lp + gap, lp - gap):
            loss, grad, m = run(
                LOSSES[kind], lp, lp - gap, ref, torch.tensor([adv]), one, kl_coef=0.04
            )
            assert math.isfinite(loss)
            assert grad.isfinite().all()
            assert all(v.isfinite() for v in m.values())


@every_loss
@pytest.mark.parametrize("junk", [-6.0, float("nan"), float("inf")])
def test_what_stands_on_masked_positions_moves_nothing(kind, junk):
    adv = torch.tensor([1.0, -1.0, 0.5, 0.2])
    clean = run(LOSSES[kind], padded(LP), padded(OLD), padded(REF), adv, MASK, kl_coef=0.04)
    dirty = run(
        LOSSES[kind], padded(LP, junk), padded(OLD, -junk), padded(REF, junk), adv, MASK, kl_coef=0.04
    )  # fmt: skip
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert (dirty[1][~MASK] == 0).all()
    assert {k: v.item() for k, v in dirty[2].items()} == {k: v.item() for k, v in clean[2].items()}


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_padding_row_order_and_the_split_into_micro_batches_change_nothing(kind, aggregation):
    adv = reference_advantages()
    step = step_denominator(aggregation, sequences=4, tokens=13, max_new_tokens=4)
    options = {"aggregation": aggregation, "kl_coef": 0.04}
    loss_fn, streams = LOSSES[kind], [padded(x) for x in (LP, OLD, REF)]
    whole, grad, metrics = run(loss_fn, *streams, adv, MASK, **options)
    wide = [padded(x, length=9) for x in (LP, OLD, REF)]
    wide_mask = torch.nn.functional.pad(MASK, (0, 5))
    order = torch.tensor([2, 0, 3, 1])
    moved, moved_grad, _ = run(
        loss_fn, *(x[order] for x in wide), adv[order], wide_mask[order], **options
    )
    assert moved == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(moved_grad[:, :4], grad[order])
    assert not moved_grad[:, 4:].any()
    for split in (([0], [1, 2, 3]), ([0, 1], [2, 3]), ([0], [1], [2], [3])):
        parts = [
            run(loss_fn, *(x[r] for x in streams), adv[r], MASK[r], denominator=step, **options)
            for r in split
        ]
        assert sum(p[0] for p in parts) == pytest.approx(whole, abs=1e-12)
        torch.testing.assert_close(torch.cat([p[1] for p in parts]), grad)
        for name in metrics:
            joined = [p[2][name].item() for p in parts]
            total = {"ratio_max": max, "ratio_min": min}.get(name, sum)(joined)
            assert total == pytest.approx(metrics[name].item(), abs=1e-12)


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_advantages_for_each_token_that_are_equal_along_a_row_are_the_same_as_one_for_the_row(
    kind, aggregation
):
    adv = torch.tensor([1.0, -1.0, 0.5, -0.2], dtype=torch.float64)
    options = {"kl_coef": 0.04, "aggregation": aggregation, "dual_clip": 3.0}
    streams = [padded(x) for x in (LP, OLD, REF)]
    row = run(LOSSES[kind], *streams, adv, MASK, **options)
    token = run(LOSSES[kind], *streams, adv[:, None].expand(4, 4).contiguous(), MASK, **options)
    assert token[0] == row[0]
    assert torch.equal(token[1], row[1])
    assert token[2] == row[2]


def test_gspo_equals_grpo_on_completions_of_one_token():
    lp, old, ref = (padded([[r[0]] for r in x], length=1) for x in (LP, OLD, REF))
    adv, mask = torch.tensor([1.0, -1.0, 0.3, 2.0]), torch.ones(4, 1, dtype=torch.bool)
    options = {"clip_eps": 0.1, "clip_eps_high": 0.1, "kl_coef": 0.04}
    for aggregation in AGGREGATIONS:
        options["aggregation"] = aggregation
        one, two = (run(f, lp, old, ref, adv, mask, **options) for f in (grpo_loss, gspo_loss))
        assert one[0] == pytest.approx(two[0], abs=1e-12)
        torch.testing.assert_close(one[1], two[1])


@every_loss
def test_a_reference_equal_to_the_policy_adds_no_kl_and_no_gradient(kind):
    adv, streams = torch.ones(4, dtype=torch.float64), (padded(LP), padded(OLD))
    with_kl = run(LOSSES[kind], *streams, padded(LP), adv, MASK, kl_coef=1.0)
    without = run(LOSSES[kind], *streams, None, adv, MASK, kl_coef=1.0)
    assert with_kl[2]["kl_sum"] == with_kl[2]["kl_k1_sum"] == 0
    assert with_kl[0] == without[0]
    assert torch.equal(with_kl[1], without[1])


@every_loss
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_single_token_gives_zero_with_a_graph(kind, rows, aggregation):
    lp = torch.full((rows, 4), -1.0)
    mask = torch.zeros(rows, 4, dtype=torch.bool)
    options = {"kl_coef": 0.04, "aggregation": aggregation}
    loss, grad, m = run(LOSSES[kind], lp, lp, lp, torch.ones(rows), mask, **options)
    assert loss == 0.0
    assert not grad.any()
    # the neutral elements of a maximum and a minimum: such a rank moves nothing in the reduction
    assert (m["ratio_max"], m["ratio_min"]) == (0, math.inf)
    assert m["num_tokens"] == m["num_sequences"] == 0


@every_loss
def test_without_a_reference_or_with_kl_coef_zero_there_is_no_kl(kind):
    adv, nan = torch.ones(4), padded(LP) * float("nan")
    for ref, kl_coef in ((None, 0.04), (nan, 0.0)):
        loss, grad, m = run(LOSSES[kind], padded(LP), padded(OLD), ref, adv, MASK, kl_coef=kl_coef)
        assert math.isfinite(loss)
        assert grad.isfinite().all()
        assert "kl_sum" not in m
        assert "kl_k1_sum" not in m


# ---- advantages ---------------------------------------------------------------------------------


def test_advantages_by_hand():
    got = group_advantages(torch.tensor([2.25, 1.25, 0.0, 0.0]), 4)
    assert got.tolist() == pytest.approx([1.2617, 0.3441, -0.8029, -0.8029], abs=5e-5)
    got = group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
    assert got.tolist() == pytest.approx([0.7070, -0.7070, 0.0, 0.0], abs=5e-5)
    assert got.dtype == torch.float32


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        # means 0.5 and 2; the std of all four rewards is sqrt(4.75 / 3) = 1.2583057
        ("none", [0.5, -0.5, -1.0, 1.0]),
        ("rloo", [1.0, -1.0, -2.0, 2.0]),
        ("batch", [0.3973281, -0.3973281, -0.7946563, 0.7946563]),
        ("group", [0.7070068, -0.7070068, -0.7070568, 0.7070568]),
    ],
)
def test_the_estimators_by_hand(estimator, want):
    got = group_advantages(torch.tensor([1.0, 0.0, 1.0, 3.0]), 2, estimator=estimator)
    assert got.tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    rewards=st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8),
    constants=st.tuples(st.floats(-1000, 1000, width=32), st.floats(-1000, 1000, width=32)),
)
@settings(max_examples=50, deadline=None)
def test_a_constant_added_to_all_rewards_of_a_group_changes_nothing(estimator, rewards, constants):
    if estimator == "batch":
        # the std of the whole step sees how far groups lie apart: only a constant for all is neutral
        constants = constants[:1] * 2
    one = torch.tensor(rewards, dtype=torch.float64)
    other = one + torch.tensor(constants, dtype=torch.float64).repeat_interleave(4)
    plain, shifted = (group_advantages(r, 4, estimator=estimator) for r in (one, other))
    torch.testing.assert_close(shifted, plain, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 16))
@example(reward=0.1, size=3)  # the float64 mean of three times 0.1 is not 0.1
@settings(max_examples=50, deadline=None)
def test_equal_rewards_give_exact_zeros(estimator, reward, size):
    rewards = torch.full((size * 2,), reward, dtype=torch.float64)
    assert not group_advantages(rewards, size, estimator=estimator).any()
    rewards[size:] += torch.arange(size)  # a neighbour with a spread does not leak in
    assert not group_advantages(rewards, size, estimator=estimator)[:size].any()


@pytest.mark.parametrize(("size", "share"), [(2, 0.7048), (8, 0.2044)])
def test_the_share_of_groups_without_a_signal_falls_with_the_group_size(size, share):
    # all right or all wrong: p^G + (1 - p)^G. 20000 groups have a standard error of 0.003
    solved = np.random.default_rng(0).random(20_000 * size) < 0.18
    advantages = group_advantages(torch.tensor(solved, dtype=torch.float64), size).view(-1, size)
    zero = (advantages == 0).all(dim=1).double().mean().item()
    assert 0.18**size + 0.82**size == pytest.approx(share, abs=5e-5)
    assert zero == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("rewards", "size", "match"),
    [([1.0], 1, "at least 2"), ([1.0, 2.0, 3.0], 2, "groups of 2"), ([1.0, float("nan")], 2, "reward 1 is nan")],
)  # fmt: skip
def test_what_is_no_group_is_refused(rewards, size, match):
    with pytest.raises(ValueError, match=match):
        group_advantages(torch.tensor(rewards), size)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'mean' is none of"):
        group_advantages(torch.tensor([1.0, 2.0]), 2, estimator="mean")
