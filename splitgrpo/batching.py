"""How the rollouts of one optimizer step are split over ranks and micro-batches; the same plan on every rank.

The gradient does not depend on the split: the loss of each micro-batch is divided by the sequences of the whole step.
Shapes: B rows, L length, R ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitgrpo.packed import Packing, pack_rows
from splitgrpo.rollout import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Rows padded on the right to the longest of them; padding is False in both masks.

    input_ids (B, L) int64 · attention_mask (B, L) int64 · completion_mask (B, L) bool ·
    old_logprobs, ref_logprobs (B, L) float32 nats, 0.0 off the completion, ref None if kl_coef = 0 · advantages (B,) float32
    packing: the same rows as one stream; None on the plain road
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    packing: Packing | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device."""
        moved: dict[str, Any] = {
            f.name: value if value is None else value.to(device)
            for f in fields(self)
            for value in [getattr(self, f.name)]
        }
        return MicroBatch(**moved)


def plan_rows(
    rollouts: Sequence[Rollout], num_ranks: int, micro_batch_size: int
) -> list[list[list[int]]]:
    """Give each rank the same number of micro-batches: result[micro][rank] lists row numbers.

    Rows are taken longest first, so that the rows of one micro-batch, and the ranks at one moment, have like lengths.
    Where rows run out, a rank gets an empty list and must still take part (see `collate`).
    """
    lengths = [len(r.token_ids) for r in rollouts]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    per_micro = num_ranks * micro_batch_size
    return [
        [order[start : start + per_micro][rank::num_ranks] for rank in range(num_ranks)]
        for start in range(0, len(order), per_micro)
    ]


def plan_packed(
    rollouts: Sequence[Rollout], num_ranks: int, micro_batch_size: int
) -> list[list[list[int]]]:
    """As `plan_rows`, for packed rows: as many tokens a micro-batch as `micro_batch_size` of the longest rows would have.

    A prompt is counted once where its completions are together. Groups stay whole, unless that makes too few pieces for
    the ranks, and pieces go longest first to where there is least.
    """
    groups: dict[bytes, list[int]] = {}
    for i, r in enumerate(rollouts):
        groups.setdefault(_prompt(r).tobytes(), []).append(i)
    budget = micro_batch_size * max((len(r.token_ids) for r in rollouts), default=0)
    completion_lens = np.array([r.completion_len for r in rollouts])
    whole = [(rows, len(_prompt(rollouts[rows[0]]))) for rows in groups.values()]
    total = sum(prompt_len + int(completion_lens[rows].sum()) for rows, prompt_len in whole)
    num_bins = num_ranks * max(1, -(-total // max(1, num_ranks * budget)))
    num_cut = [1] * len(whole)
    while rollouts:
        share = -(-num_bins // len(groups))  # pieces of each group, so that no bin need stay empty
        pieces = []
        for i, (rows, prompt_len) in enumerate(whole):
            cut = _cut(rows, completion_lens[rows], prompt_len, max(share, num_cut[i]), budget)
            num_cut[i] = len(cut)  # fewer were too few: none of the next rounds tries them again
            pieces += cut
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        load = [(0, b) for b in range(num_bins)]  # a heap
        for cost, rows in sorted(pieces, key=lambda piece: (-piece[0], piece[1][0])):
            least, b = load[0]
            bins[b] += rows
            heapq.heapreplace(load, (least + cost, b))
        if max(load)[0] <= budget:
            order = [b for _, b in sorted(load, key=lambda found: (-found[0], found[1]))]
            return [
                [bins[b] for b in order[start : start + num_ranks]]
                for start in range(0, num_bins, num_ranks)
            ]
        num_bins += num_ranks
    return []


def _cut(
    rows: Sequence[int], completion_lens: np.ndarray, prompt_len: int, num_pieces: int, budget: int
) -> list[tuple[int, list[int]]]:
    """Cut a group into `num_pieces` of equal numbers of rows, or into more where one would cost more than `budget`.

    Returns each piece's cost and rows.
    """
    n = len(rows)
    sums = np.concatenate([[0], completion_lens.cumsum()])
    least = -(-int(sums[-1]) // max(1, budget - prompt_len))
    for num in range(min(max(num_pieces, least), n), n + 1):
        size, longer = divmod(n, num)
        ends = size * np.arange(num + 1) + np.minimum(np.arange(num + 1), longer)
        costs = np.diff(sums[ends]) + prompt_len
        if costs.max() <= budget:
            break
    return [(int(c), list(rows[s:e])) for c, s, e in zip(costs, ends, ends[1:], strict=False)]


def _prompt(r: Rollout) -> np.ndarray:
    return r.token_ids[: len(r.token_ids) - r.completion_len]


def collate(
    rollouts: Sequence[Rollout],
    advantages: Tensor,
    rows: Sequence[int],
    pad_id: int,
    *,
    packed: bool = False,
) -> MicroBatch:
    """Pad the chosen rows, and pack them where asked.

    No rows: one row of two pads with an empty mask, so that every rank runs the same collectives.
    """
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
    packing = None
    if packed:
        prompts = [_prompt(r) for r in chosen] or [ids[0]]
        packing = pack_rows(prompts, [r.completion_len for r in chosen] or [0], shape[1])
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(attention),
        completion_mask=torch.from_numpy(mask),
        old_logprobs=torch.from_numpy(old),
        ref_logprobs=torch.from_numpy(ref) if has_ref else None,
        advantages=picked.to(torch.float32),
        packing=packing,
    )
