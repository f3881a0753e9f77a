"""How the rollouts of one optimizer step are split over ranks and micro-batches; the same plan on every rank.

The gradient does not depend on the split: the loss of each micro-batch is divided by the sequences of the whole step.
Shapes: B rows, L length, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitgrpo.rollout import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Rows padded on the right to the longest of them; padding is False in both masks.

    input_ids (B, L) int64 · attention_mask (B, L) int64 · completion_mask (B, L) bool ·
    old_logprobs, ref_logprobs (B, L) float32 nats, 0.0 off the completion, ref None if kl_coef = 0 · advantages (B,) float32
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device."""
        moved: dict[str, Any] = {
            f.name: value if value is None else value.to(device)
            for f in fields(self)
            for value in [getattr(self, f.name)]
        }
        return MicroBatch(**moved)


def plan_rows(
    lengths: Sequence[int], num_ranks: int, micro_batch_size: int
) -> list[list[list[int]]]:
    """Give each rank the same number of micro-batches: result[micro][rank] lists row numbers.

    Rows are taken longest first, so that the rows of one micro-batch, and the ranks at one moment, have like lengths.
    Where rows run out, a rank gets an empty list and must still take part (see `collate`).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    per_micro = num_ranks * micro_batch_size
    return [
        [order[start : start + per_micro][rank::num_ranks] for rank in range(num_ranks)]
        for start in range(0, len(order), per_micro)
    ]


def collate(
    rollouts: Sequence[Rollout], advantages: Tensor, rows: Sequence[int], pad_id: int
) -> MicroBatch:
    """Pad the chosen rows. No rows: one row of two pads with an empty mask, so that every rank runs the same collectives."""
    chosen = [rollouts[i] for i in rows]
    shape = (max(1, len(chosen)), max([2, *(len(r.token_ids) for r in chosen)]))
    ids = np.full(shape, pad_id, dtype=np.int64)
    attention = np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    old = np.zeros(shape, dtype=np.float32)
    ref = np.zeros(shape, dtype=np.float32)
    attention[len(chosen) :, :] = 1  # a row that attends to nothing gives NaN
    for i, r in enumerate(chosen):
        n = len(r.token_ids)
        ids[i, :n], attention[i, :n], mask[i, :n] = r.token_ids, 1, r.completion_mask
        old[i, :n] = r.old_logprobs
        if r.ref_logprobs is not None:
            ref[i, :n] = r.ref_logprobs
    has_ref = bool(rollouts) and rollouts[0].ref_logprobs is not None
    picked = advantages[list(rows)] if chosen else torch.zeros(1)
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(attention),
        completion_mask=torch.from_numpy(mask),
        old_logprobs=torch.from_numpy(old),
        ref_logprobs=torch.from_numpy(ref) if has_ref else None,
        advantages=picked.to(torch.float32),
    )
