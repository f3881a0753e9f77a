"""The losses that TRL has too: the same batch through TRL's own code gives the same value and the same gradient.

GRPOTrainer._compute_loss runs unbound on a stand-in that has only what that method reads; its model is replaced by given
log-probs. reinforce has no twin there. TRL scales advantages and corrects the mismatch of sampler and learner inside of
the method that also generates, so neither can be called alone, and neither is compared here.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from splitgrpo.losses import step_denominator
from utils import LOSSES, group_advantages

LIMIT = 9  # max_completion_length, more than the longest row below
AGGREGATION = {"grpo": "sequence", "sapo": "sequence", "dr_grpo": "fixed", "dapo": "token", "cispo": "token"}  # fmt: skip
SEEDS = pytest.mark.parametrize("seed", range(5))


def ragged_batch(seed):
    """Log-probs, old and reference ones (float64), advantages of both signs, and a mask of ragged rows.

    Every row has a token: TRL's mean is over all rows, ours over those with tokens. No log-ratio comes near 20, where
    ours is clamped and TRL's is not.
    """
    rng = np.random.default_rng(seed)
    rows, length = 8, 6
    lp = -rng.exponential(1.0, (rows, length))
    old, ref = (lp + rng.normal(0, 0.4, lp.shape) for _ in range(2))
    mask = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
    rewards = torch.tensor(rng.choice([0.0, 1.0, 1.25, 2.25], rows))
    adv = group_advantages(rewards, 4).double()
    return *map(torch.tensor, (lp, old, ref)), adv, torch.tensor(mask)


class StandIn:
    """A trainer in train mode on one process, without accumulation: every normalizer beside the batch's own is 1."""

    def __init__(self, per_token_logps, **options):
        self.args = SimpleNamespace(
            delta=options.pop("delta", None),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        )
        self.accelerator = SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        self.model = SimpleNamespace(training=True)
        self.current_gradient_accumulation_steps = 1
        self.max_completion_length = LIMIT
        self.importance_sampling_level = "token"
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None
        self.use_vllm = self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self._metrics = {"train": defaultdict(list)}
        self.per_token_logps = per_token_logps
        self.__dict__.update(options)

    def _get_per_token_logps_and_entropies(self, *_, **__):
        return self.per_token_logps, torch.zeros_like(self.per_token_logps), None


def theirs(batch, loss_type, **options):
    """Loss, gradient with respect to the log-probs, and the metrics that TRL logs."""
    lp, old, ref, adv, mask = batch
    lp = lp.clone().requires_grad_()
    trainer = StandIn(lp, loss_type=loss_type, **options)
    ids = torch.zeros(lp.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": adv,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), lp.grad, {k: v[0] for k, v in trainer._metrics["train"].items()}


def ours(batch, name, aggregation, **options):
    """The same with the divisor of a step that is this batch."""
    lp, old, ref, adv, mask = batch
    lp = lp.clone().requires_grad_()
    step = step_denominator(aggregation, len(lp), int(mask.sum()), LIMIT)
    loss, metrics = LOSSES[name](lp, old, ref, adv, mask, denominator=step, **options)
    loss.backward()
    return loss.item(), lp.grad, metrics


def assert_same(mine, trl, close=1e-10):
    assert mine[0] == pytest.approx(trl[0], abs=close)
    torch.testing.assert_close(mine[1], trl[1], atol=close, rtol=close)
    assert mine[1].norm() > 0.01  # two losses without a gradient would agree on anything


@SEEDS
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_a_clipped_loss_and_its_counts_are_those_of_trl(name, beta, seed):
    batch = ragged_batch(seed)
    trl = theirs(batch, name, epsilon_low=0.2, epsilon_high=0.28, beta=beta)
    mine = ours(
        batch, name, AGGREGATION[name], clip_eps=0.2, clip_eps_high=0.28, kl_coef=beta
    )  # fmt: skip
    assert_same(mine, trl)
    # TRL logs means over tokens
    tokens = mine[2]["num_tokens"].item()
    for side in ("low", "high"):
        share = mine[2][f"clipped_{side}_sum"].item() / tokens
        assert share == pytest.approx(trl[2][f"clip_ratio/{side}_mean"], abs=1e-6)
        assert share > 0


@SEEDS
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_gspo_is_trls_grpo_at_the_sequence_level(beta, seed):
    batch = ragged_batch(seed)
    trl = theirs(
        batch, "grpo", importance_sampling_level="sequence", epsilon_low=0.1, epsilon_high=0.15, beta=beta
    )  # fmt: skip
    mine = ours(batch, "gspo", "sequence", clip_eps=0.1, clip_eps_high=0.15, kl_coef=beta)
    assert_same(mine, trl)
    assert mine[2]["clipped_low_sum"] + mine[2]["clipped_high_sum"] > 0


@SEEDS
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_cispo_is_that_of_trl_whose_upper_bound_is_the_cap_itself(beta, seed):
    batch = ragged_batch(seed)
    trl = theirs(batch, "cispo", epsilon_low=0.2, epsilon_high=1.25, beta=beta)
    mine = ours(batch, "cispo", "token", clip_eps_high=0.25, kl_coef=beta)
    assert_same(mine, trl)
    # ours counts every capped token, TRL only those with A > 0
    tokens = mine[2]["num_tokens"].item()
    assert mine[2]["clipped_high_sum"].item() / tokens >= trl[2]["cispo_clip_ratio"] > 0


@SEEDS
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_sapo_is_that_of_trl(beta, seed):
    batch = ragged_batch(seed)
    trl = theirs(batch, "sapo", beta=beta)
    # 4 / 1.05 may be rounded to float32 in one and not in the other
    assert_same(ours(batch, "sapo", "sequence", kl_coef=beta), trl, close=2e-7)


@SEEDS
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_the_dual_clip_is_trls_delta_where_that_lies_above_the_upper_bound(name, seed):
    # TRL clamps the unclipped ratio at delta for both signs of A. Where delta >= 1 + epsilon_high that changes nothing
    # for A > 0, where the upper bound has already taken over, and bounds the loss at -delta A for A < 0: our dual clip.
    batch = ragged_batch(seed)
    trl = theirs(batch, name, epsilon_low=0.2, epsilon_high=0.28, beta=0.0, delta=1.4)
    options = {"clip_eps": 0.2, "clip_eps_high": 0.28, "kl_coef": 0.0}
    mine = ours(batch, name, AGGREGATION[name], **options, dual_clip=1.4)
    assert_same(mine, trl)
    assert mine[0] != ours(batch, name, AGGREGATION[name], **options)[0]  # some token is bounded


def test_a_delta_below_the_upper_bound_is_another_loss_than_the_dual_clip():
    # TRL's is then a lower upper bound for A > 0 and void for A < 0; ours holds for A < 0 alone.
    old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    lp = torch.tensor([[2.0]], dtype=torch.float64).log()
    trl, mine = [], []
    for a in (1.0, -1.0):
        batch = lp, old, old, torch.tensor([a], dtype=torch.float64), mask
        trl.append(theirs(batch, "grpo", epsilon_low=0.2, epsilon_high=0.5, beta=0.0, delta=1.2)[0])
        options = {"clip_eps": 0.2, "clip_eps_high": 0.5, "kl_coef": 0.0, "dual_clip": 1.2}
        mine.append(ours(batch, "grpo", "sequence", **options)[0])
    assert trl == pytest.approx([-1.2, 1.5])
    assert mine == pytest.approx([-1.5, 1.2])
