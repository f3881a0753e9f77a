"""How far learner and sampler are apart at the same weights: measured on every step, corrected for where asked.

The gap of a token is the learner's log-prob minus the sampler's, both by the policy version that sampled it. Where that is
the version being trained, the training pass gives it for free; for older ones the learner puts that version's LoRA back
for a forward pass.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from splitgrpo.adapters import adapter_parameters
from splitgrpo.batching import collate, plan_packed, plan_rows
from splitgrpo.losses import k3, masked, mismatch_weights
from splitgrpo.rollout import Rollout
from splitgrpo.zero import Ranks

WARN_ABOVE = {"float32": 1e-3, "bfloat16": 0.1}  # nats, mean over tokens; seen: 1e-5 and 0.02
SAY_EVERY = 20  # steps


@dataclass(frozen=True)
class Correction:
    """Weights for the gap: mode "truncate" or "mask", level "token" or "sequence"."""

    mode: str
    level: str
    cap: float

    def weights(self, gap: Tensor, mask: Tensor) -> Tensor:
        """(B, L) -> (B, L), see losses.mismatch_weights."""
        return mismatch_weights(gap, mask, self.mode, self.level, self.cap)


class PolicyHistory:
    """The LoRA weights of the last `keep` published versions, on the CPU."""

    def __init__(self, model: Any, keep: int) -> None:
        self.model, self.keep = model, keep
        self._held: dict[int, dict[str, Tensor]] = {}

    def add(self, version: int, tensors: dict[str, Tensor]) -> None:
        """Hold float32 tensors as published; the oldest goes."""
        self._held[version] = tensors
        for old in sorted(self._held)[: -self.keep]:
            del self._held[old]

    @contextlib.contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Inside, the model computes as `version` did; afterwards it has its own weights again, bit for bit.

        A collective under ZeRO-3. Raises RuntimeError for a version that isn't held.
        """
        if version not in self._held:
            raise RuntimeError(f"version {version} is not held, only {sorted(self._held)}")
        own = {}
        with self._writable() as parameters:
            for key, parameter in parameters.items():
                own[key] = parameter.data.clone()
                parameter.data.copy_(self._held[version][key])
        try:
            yield
        finally:
            with self._writable() as parameters:
                for key, parameter in parameters.items():
                    parameter.data.copy_(own[key])

    @contextlib.contextmanager
    def _writable(self) -> Iterator[dict[str, Any]]:
        """The LoRA parameters, whole: ZeRO-3 keeps only a part of each on a rank, and shares what is written here."""
        import deepspeed

        parameters = adapter_parameters(self.model)
        with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
            yield parameters


def rows_to_measure(
    versions: Sequence[int], groups: Sequence[int], now: int, everything: bool
) -> list[int]:
    """Rows that need a forward pass of their own: all stale ones, or else, if no row is fresh, those of the newest group.

    `versions` (S,) of the policies that sampled the rows, `groups` (S,) the number of each one's group. `everything` is
    wanted where the gap is corrected for. One group is enough for a mean, and all would cost half a step more.
    """
    stale = [i for i, v in enumerate(versions) if v != now]
    if everything or len(stale) < len(versions):
        return stale if everything else []
    newest = max(range(len(versions)), key=lambda i: (versions[i], groups[i]), default=None)
    return [] if newest is None else [i for i, g in enumerate(groups) if g == groups[newest]]


def old_policy_logprobs(
    module: Any,
    history: PolicyHistory,
    rollouts: Sequence[Rollout],
    versions: Sequence[int],
    rows: Sequence[int],
    *,
    ranks: Ranks,
    micro_batch_size: int,
    packed: bool,
    pad_id: int,
    bump: Callable[[], None],
) -> dict[int, Tensor]:
    """{row: (L,) float32 log-probs by the version that sampled it}, the same on every rank. A collective."""
    found: dict[int, Tensor] = {}
    for version in sorted({versions[i] for i in rows}):
        chosen = [i for i in rows if versions[i] == version]
        sizes = [len(rollouts[i].token_ids) for i in chosen]
        flat = [torch.zeros(n) for n in sizes]
        with history.at(version), torch.no_grad():
            plan = plan_packed if packed else plan_rows
            for micro in plan([rollouts[i] for i in chosen], ranks.num_ranks, micro_batch_size):
                bump()
                mine = micro[ranks.rank]
                batch = collate(
                    rollouts, torch.zeros(len(rollouts)), [chosen[i] for i in mine], pad_id,
                    packed=packed,
                )  # fmt: skip
                batch = batch.to(ranks.device)
                out = module(
                    batch.input_ids,
                    batch.attention_mask,
                    batch.completion_mask,
                    packing=batch.packing,
                ).cpu()
                for i, row in zip(mine, out, strict=False):  # a rank with nothing has one empty row
                    flat[i] = row[: sizes[i]]
        joined = torch.cat(flat)
        if ranks.num_ranks > 1:
            dist.all_reduce(joined, group=ranks.control)
        found |= dict(zip(chosen, joined.split(sizes), strict=True))
    return found


def gap_metrics(gap: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of `mask` (gap_max a maximum); k1 and k3 estimate KL(sampler || learner)."""
    gap = masked(gap, mask)
    size = gap.abs()
    return {
        "gap_sum": size.sum(),
        "gap_max": torch.cat([size.flatten(), size.new_zeros(1)]).max(),
        "gap_k1_sum": -gap.sum(),
        "gap_k3_sum": k3(gap).sum(),
        "gap_tokens": mask.sum().float(),
    }


class MismatchAlarm:
    """Says aloud when the mean gap jumps above a limit: at once, then every SAY_EVERY steps while it stays there."""

    def __init__(self, limit: float, *, filtered: bool) -> None:
        """`filtered`: top-k or top-p is on."""
        self.limit, self.filtered = limit, filtered
        self._above = 0

    def note(self, metrics: dict[str, float]) -> str | None:
        """Take in one step's mismatch_mean and mismatch_max; returns what to say, or None."""
        mean = metrics.get("mismatch_mean", 0.0)
        self._above = self._above + 1 if not mean <= self.limit else 0
        if self._above % SAY_EVERY != 1:
            return None
        edge = (
            " or tokens at the edge of --top_k and --top_p that only one of them keeps,"
            if self.filtered
            else ""
        )
        return (
            f"sampler and learner differ at the same weights: log-probs by {mean:.4g} nats in the mean, "
            f"{metrics['mismatch_max']:.4g} at most, expected is less than {self.limit:g} (--mismatch_warn). Likely the "
            f"sampler computes in another precision or with another version of torch or transformers,{edge} or its adapter "
            "is not the published one. --mismatch_correction truncate bounds the harm."
        )
