"""Losses and advantages: recomputed in NumPy (value and gradient), the paper's reference values, and invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from utils import LOSSES, group_advantages, grpo_loss, gspo_loss

LP = [[-0.5, -1.2, -0.3, -2.0], [-0.9, -0.4, -1.5], [-0.2, -0.7], [-1.1, -0.6, -0.8, -0.1]]
OLD = [[-0.7, -1.0, -0.3, -1.2], [-0.6, -0.9, -1.4], [-0.5, -0.3], [-1.0, -1.1, -0.5, -0.4]]
REF = [[-0.6, -1.1, -0.5, -1.5], [-0.8, -0.5, -1.6], [-0.3, -0.6], [-1.2, -0.9, -0.7, -0.2]]
REWARDS = [1.0, 0.0, 0.0, 1.0]


def padded(rows, fill=0.0, length=4):
    return torch.tensor([[*r, *[fill] * (length - len(r))] for r in rows], dtype=torch.float64)


MASK = padded([[1.0] * len(r) for r in LP]).bool()


def run(loss_fn, lp, old, ref, adv, mask, **options):
    """Loss, gradient with respect to lp, metrics."""
    lp = lp.clone().requires_grad_(True)
    loss, metrics = loss_fn(lp, old, ref, adv, mask, **options)
    loss.backward()
    return loss.item(), lp.grad, metrics


def numpy_loss(kind, lp, old, ref, adv, mask, low, high, kl_coef, denominator):
    """The same from the definitions, a loop over rows and tokens in float64: value and gradient.

    d(-min(wA, clip(w)A)) / d lp = -w A where the unclipped branch is taken (GRPO: of that token; GSPO: each of the
    row's T tokens gets 1/T of the sum over its tokens); d k3 / d lp = 1 - exp(f - lp).
    """
    value, grad = 0.0, np.zeros_like(lp)
    for i in range(len(lp)):
        on = np.flatnonzero(mask[i])
        n = len(on)
        if n == 0:
            continue
        log_ratio = np.clip(lp[i, on] - old[i, on], -20, 20)
        ratios = np.exp(log_ratio) if kind == "grpo" else np.full(n, np.exp(log_ratio.mean()))
        for j, t in enumerate(on):
            w, a = ratios[j], adv[i]
            unclipped, clipped = w * a, np.clip(w, 1 - low, 1 + high) * a
            value += -min(unclipped, clipped) / n / denominator
            flows = unclipped < clipped or 1 - low <= w <= 1 + high
            slope = -w * a / n / denominator if flows else 0.0
            if kind == "grpo":
                grad[i, t] += slope
            else:
                grad[i, on] += slope / n
            if kl_coef and ref is not None:
                gap = np.clip(ref[i, t] - lp[i, t], -20, 20)
                value += kl_coef * (np.exp(gap) - gap - 1) / n / denominator
                grad[i, t] += kl_coef * (1 - np.exp(gap)) / n / denominator
    return value, grad


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@given(
    seed=st.integers(0, 10_000),
    kl_coef=st.sampled_from([0.0, 0.04, 1.0]),
    spread=st.sampled_from([0.01, 0.3, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_value_and_gradient_equal_a_loop_over_the_definition(kind, seed, kl_coef, spread):
    rng = np.random.default_rng(seed)
    rows, length = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    lp = -rng.exponential(1.0, (rows, length))
    old = lp + rng.normal(0, spread, lp.shape)
    ref = lp + rng.normal(0, spread, lp.shape)
    mask = rng.random((rows, length)) < 0.7
    adv = rng.normal(size=rows)
    low, high = (0.2, 0.28) if kind == "grpo" else (3e-3, 4e-3)
    value, grad = numpy_loss(kind, lp, old, ref, adv, mask, low, high, kl_coef, 7.0)
    got, got_grad, _ = run(
        LOSSES[kind], *map(torch.tensor, (lp, old, ref, adv, mask)),
        clip_eps=low, clip_eps_high=high, kl_coef=kl_coef, denominator=7.0,
    )  # fmt: skip
    assert got == pytest.approx(value, abs=1e-9)
    np.testing.assert_allclose(got_grad.numpy(), grad, atol=1e-9)


@pytest.mark.parametrize(
    ("loss_fn", "options", "loss", "norm", "slopes"),
    [
        (grpo_loss, {"kl_coef": 0.0}, 0.0680477, 0.221922, (0, -0.024316, 0, 0)),
        (grpo_loss, {"kl_coef": 0.04}, 0.0687301, 0.222622, (0.000238, -0.025938, -0.000351, 0.000648)),
        (gspo_loss, {"clip_eps": 0.2, "clip_eps_high": 0.2}, 0.0132528, 0.245066,
         (-0.044307, -0.044307, 0.074602, -0.059809)),
        (gspo_loss, {}, 0.0464249, 0.156681, (-0.044307, -0.044307, 0.074602, 0)),
    ],
)  # fmt: skip
def test_reference_values(loss_fn, options, loss, norm, slopes):
    adv = group_advantages(torch.tensor(REWARDS), 4).double()
    got, grad, _ = run(loss_fn, padded(LP), padded(OLD), padded(REF), adv, MASK, **options)
    assert got == pytest.approx(loss, abs=2e-6)
    assert grad.norm().item() == pytest.approx(norm, abs=2e-6)
    for (i, t), slope in zip(((0, 0), (0, 3), (1, 0), (3, 1)), slopes, strict=True):
        assert grad[i, t].item() == pytest.approx(slope, abs=2e-6)


def test_sequence_ratios_and_kl_of_the_reference_case():
    adv = torch.ones(4, dtype=torch.float64)
    _, _, m = run(gspo_loss, padded(LP), padded(OLD), padded(REF), adv, MASK, kl_coef=1.0)
    lengths = np.array([4, 3, 2, 4])
    ratios = np.array([0.8187308, 1.0338951, 0.9512294, 1.1051709])
    assert m["ratio_sum"].item() == pytest.approx((ratios * lengths).sum(), abs=1e-5)
    assert m["ratio_max"].item() == pytest.approx(1.1051709, abs=1e-6)
    assert m["kl_sum"].item() / 4 == pytest.approx(0.01705846, abs=1e-7)
    assert m["num_tokens"].item() == 13
    assert m["num_sequences"].item() == 4


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss"), [(1, 1.5, -1.28), (1, 0.5, -0.5), (-1, 0.5, 0.8), (-1, 1.5, 1.5), (-1, 10, 10)]
)  # fmt: skip
def test_clipping_by_hand(advantage, ratio, loss):
    lp = torch.tensor([[math.log(ratio)]])
    one = torch.ones(1, 1, dtype=torch.bool)
    options = {"clip_eps": 0.2, "clip_eps_high": 0.28, "kl_coef": 0.0}
    got, *_ = run(grpo_loss, lp, lp * 0, None, torch.tensor([float(advantage)]), one, **options)
    assert got == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(("gap", "k3"), [(0.5, 0.14872), (-0.5, 0.10653), (0.0, 0.0)])
def test_kl_by_hand_is_never_negative(gap, k3):
    lp, one = torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool)
    _, _, m = run(grpo_loss, lp, lp, lp + gap, torch.zeros(1), one)
    assert m["kl_sum"].item() == pytest.approx(k3, abs=1e-5)


@pytest.mark.parametrize("loss_fn", LOSSES.values())
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_extreme_log_ratios_stay_finite_in_value_and_gradient(loss_fn, gap):
    lp, one = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
    for adv in (1.0, -1.0):
        loss, grad, _ = run(loss_fn, lp, lp - gap, lp + gap, torch.tensor([adv]), one, kl_coef=0.04)
        assert math.isfinite(loss)
        assert grad.isfinite().all()


@pytest.mark.parametrize("loss_fn", LOSSES.values())
@pytest.mark.parametrize("junk", [-6.0, float("nan"), float("inf")])
def test_what_stands_on_masked_positions_moves_nothing(loss_fn, junk):
    adv = torch.tensor([1.0, -1.0, 0.5, 0.2])
    clean = run(loss_fn, padded(LP), padded(OLD), padded(REF), adv, MASK, kl_coef=0.04)
    dirty = run(
        loss_fn, padded(LP, junk), padded(OLD, -junk), padded(REF, junk), adv, MASK, kl_coef=0.04
    )
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert (dirty[1][~MASK] == 0).all()
    assert {k: v.item() for k, v in dirty[2].items()} == {k: v.item() for k, v in clean[2].items()}


@pytest.mark.parametrize("loss_fn", LOSSES.values())
def test_padding_row_order_and_the_split_into_micro_batches_change_nothing(loss_fn):
    adv = group_advantages(torch.tensor(REWARDS), 4).double()
    whole, grad, metrics = run(loss_fn, padded(LP), padded(OLD), padded(REF), adv, MASK)
    wide = [padded(x, length=9) for x in (LP, OLD, REF)]
    wide_mask = torch.nn.functional.pad(MASK, (0, 5))
    order = torch.tensor([2, 0, 3, 1])
    moved, moved_grad, _ = run(loss_fn, *(x[order] for x in wide), adv[order], wide_mask[order])
    assert moved == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(moved_grad[:, :4], grad[order])
    parts = [
        run(
            loss_fn,
            *(padded(x)[rows] for x in (LP, OLD, REF)),
            adv[rows],
            MASK[rows],
            denominator=4,
        )
        for rows in ([0], [1, 2, 3])
    ]
    assert sum(p[0] for p in parts) == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), grad)
    for name in metrics:
        joined = [p[2][name].item() for p in parts]
        total = max(joined) if name == "ratio_max" else sum(joined)
        assert total == pytest.approx(metrics[name].item(), abs=1e-12)


def test_gspo_equals_grpo_on_completions_of_one_token():
    lp, old, ref = (padded([[r[0]] for r in x], length=1) for x in (LP, OLD, REF))
    adv, mask = torch.tensor([1.0, -1.0, 0.3, 2.0]), torch.ones(4, 1, dtype=torch.bool)
    options = {"clip_eps": 0.1, "clip_eps_high": 0.1, "kl_coef": 0.04}
    one, two = (run(f, lp, old, ref, adv, mask, **options) for f in (grpo_loss, gspo_loss))
    assert one[0] == pytest.approx(two[0], abs=1e-12)
    torch.testing.assert_close(one[1], two[1])


@pytest.mark.parametrize("loss_fn", LOSSES.values())
def test_on_policy_first_step_has_ratio_one_loss_zero_and_a_gradient(loss_fn):
    adv = group_advantages(torch.tensor(REWARDS), 4).double()
    lp = padded(LP)
    loss, grad, m = run(loss_fn, lp, lp, lp, adv, MASK, kl_coef=0.04)
    assert loss == pytest.approx(0.0, abs=1e-7)
    assert grad.norm() > 0.1
    assert m["ratio_sum"] / m["num_tokens"] == 1.0
    assert m["clipped_sum"] == 0
    assert m["kl_sum"] == 0


def test_the_ratio_is_against_the_stored_log_prob_and_not_a_detached_copy():
    lp, one = torch.tensor([[-0.5]]), torch.ones(1, 1, dtype=torch.bool)
    _, _, m = run(grpo_loss, lp, torch.tensor([[-1.0]]), None, torch.ones(1), one)
    assert m["ratio_sum"].item() == pytest.approx(1.6487, abs=1e-4)
    assert m["clipped_sum"].item() == 1


@pytest.mark.parametrize("loss_fn", LOSSES.values())
@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_a_single_token_gives_zero_with_a_graph(loss_fn, rows):
    lp = torch.full((rows, 4), -1.0)
    mask = torch.zeros(rows, 4, dtype=torch.bool)
    loss, grad, _ = run(loss_fn, lp, lp, lp, torch.ones(rows), mask, kl_coef=0.04)
    assert loss == 0.0
    assert not grad.any()


def test_without_a_reference_or_with_kl_coef_zero_there_is_no_kl():
    adv, nan = torch.ones(4), padded(LP) * float("nan")
    for ref, kl_coef in ((None, 0.04), (nan, 0.0)):
        loss, grad, m = run(grpo_loss, padded(LP), padded(OLD), ref, adv, MASK, kl_coef=kl_coef)
        assert math.isfinite(loss)
        assert grad.isfinite().all()
        assert "kl_sum" not in m


def test_gspo_counts_clipping_at_its_own_scale():
    adv, lp = torch.ones(1), torch.full((1, 4), -1.0)
    _, _, m = run(gspo_loss, lp + 1e-3, lp, None, adv, torch.ones(1, 4, dtype=torch.bool))
    assert m["clipped_sum"] == 4  # 1.001 is outside 1 + 4e-4, and all tokens of the row count


def test_advantages_by_hand():
    got = group_advantages(torch.tensor([2.25, 1.25, 0.0, 0.0]), 4)
    assert got.tolist() == pytest.approx([1.2617, 0.3441, -0.8029, -0.8029], abs=1e-4)
    got = group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
    assert got.tolist() == pytest.approx([0.7070, -0.7070, 0.0, 0.0], abs=1e-4)
    assert got.dtype == torch.float32


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), st.floats(-1000, 1000, width=32)
)
@settings(max_examples=100, deadline=None)
def test_a_constant_added_to_all_rewards_of_a_group_changes_nothing(rewards, constant):
    one = torch.tensor(rewards, dtype=torch.float64)
    torch.testing.assert_close(
        group_advantages(one, 4), group_advantages(one + constant, 4), atol=1e-4, rtol=1e-4
    )


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 16))
def test_equal_rewards_give_exact_zeros(reward, size):
    assert not group_advantages(torch.full((size * 2,), reward), size).any()


@pytest.mark.parametrize(
    ("rewards", "size", "match"),
    [([1.0], 1, "at least 2"), ([1.0, 2.0, 3.0], 2, "groups of 2"), ([1.0, float("nan")], 2, "reward 1 is nan")],
)  # fmt: skip
def test_what_is_no_group_is_refused(rewards, size, match):
    with pytest.raises(ValueError, match=match):
        group_advantages(torch.tensor(rewards), size)
