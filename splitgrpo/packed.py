"""Rows of one micro-batch as one stream of tokens: no padding, the prompt of a group once for all its completions.

A row's last token is left out: nothing is predicted from it. Position t of a padded row is found again through `before`.
Shapes: B rows, L length, N tokens of the stream, T completion tokens, C completion, P prompt; A, K, D as in decoder.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from splitgrpo.vocab import exact_bfloat16_products

# Larger score matrices go to torch's own attention, which never holds one whole.
MAX_SCORES = 1 << 25


@dataclass(frozen=True)
class Block:
    """A prompt and its completions, one after the other in the stream.

    index (G, C) int64 pads the completions' tokens on the right, counted from the first; back (sum C,) undoes it; None
    where all have one length.
    """

    start: int
    prompt_len: int
    lengths: tuple[int, ...]
    index: Tensor | None
    back: Tensor | None


@dataclass(frozen=True)
class Packing:
    """source (N,) int64 into the flat (B * L) ids · positions (N,) int64 · before (T,) int64: the token that predicts each
    completion token, these in the order of the (B, L) completion mask."""

    source: Tensor
    positions: Tensor
    before: Tensor
    blocks: tuple[Block, ...]

    def to(self, device: torch.device) -> "Packing":
        """Copy to a device."""

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device)

        blocks = tuple(
            Block(b.start, b.prompt_len, b.lengths, move(b.index), move(b.back))
            for b in self.blocks
        )
        source, positions, before = (
            t.to(device) for t in (self.source, self.positions, self.before)
        )
        return Packing(source, positions, before, blocks)


def pack_rows(
    prompts: Sequence[np.ndarray],
    completion_lens: Sequence[int],
    row_len: int,
    *,
    share: bool = True,
) -> Packing:
    """Pack rows of padded length `row_len`; rows that follow each other with equal prompts `share` it."""
    source: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    before: list[np.ndarray] = []
    blocks: list[Block] = []
    start = row = 0
    while row < len(prompts):
        end = row + 1
        while share and end < len(prompts) and np.array_equal(prompts[end], prompts[row]):
            end += 1
        p, at = len(prompts[row]), start + len(prompts[row])
        source.append(row * row_len + np.arange(p))
        positions.append(np.arange(p))
        lengths = tuple(max(0, c - 1) for c in completion_lens[row:end])
        for i, n in enumerate(lengths):
            source.append((row + i) * row_len + p + np.arange(n))
            positions.append(p + np.arange(n))
            seen = np.concatenate([[start + p - 1], at + np.arange(n)])
            before.append(seen[: completion_lens[row + i]])
            at += n
        blocks.append(_block(start, p, lengths))
        start, row = at, end
    joined = [torch.from_numpy(np.concatenate(a)) for a in (source, positions, before)]
    return Packing(joined[0], joined[1], joined[2], tuple(blocks))


def _block(start: int, prompt_len: int, lengths: tuple[int, ...]) -> Block:
    longest = max(lengths)
    if min(lengths) == longest:
        return Block(start, prompt_len, lengths, None, None)
    firsts = np.cumsum([0, *lengths[:-1]])
    offsets = np.arange(longest)
    # A pad repeats its row's last token, or, of an empty row, any token: what is computed there is not used.
    index = np.stack(
        [f + np.minimum(offsets, max(n - 1, 0)) for f, n in zip(firsts, lengths, strict=True)]
    )
    back = np.concatenate([i * longest + np.arange(n) for i, n in enumerate(lengths)])
    index = np.minimum(index, sum(lengths) - 1)
    return Block(start, prompt_len, lengths, torch.from_numpy(index), torch.from_numpy(back))


class PackedAttention:
    """Attention inside of each block: a prompt to itself, a completion to its prompt and itself."""

    def __init__(self, packing: Packing, num_kv_heads: int, scale: float) -> None:
        self.packing, self.num_kv_heads, self.scale = packing, num_kv_heads, scale
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, A, D), k and v (N, K, D) -> (N, A * D)."""
        out = []
        for b in self.packing.blocks:
            prompt = slice(b.start, b.start + b.prompt_len)
            own = slice(prompt.stop, prompt.stop + sum(b.lengths))
            out.append(self._rows(q[prompt][None], k[prompt][None], v[prompt][None])[0])
            if own.stop > own.start:
                out.append(self._completions(b, (q[own], k[own], v[own]), k[prompt], v[prompt]))
        return torch.cat(out)

    def _completions(
        self, b: Block, own: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor
    ) -> Tensor:
        """own: q, k, v of all completions; k, v (P, K, D) of the prompt -> (sum C, A * D)."""
        rows = len(b.lengths)
        if b.index is None:
            q, k_own, v_own = (t.unflatten(0, (rows, -1)) for t in own)
        else:
            q, k_own, v_own = (t[b.index] for t in own)
        keys, values = (
            torch.cat([t[None].expand(rows, -1, -1, -1), mine], dim=1)
            for t, mine in ((k, k_own), (v, v_own))
        )
        out = self._rows(q, keys, values).flatten(0, 1)
        return out if b.back is None else out[b.back]

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, C, A, D), the last C of k and v (B, P + C, K, D); causal -> (B, C, A * D)."""
        c, heads = q.shape[1:3]
        repeat = heads // self.num_kv_heads
        # Query heads that share a key head become rows of one product.
        q = (
            q.unflatten(2, (-1, repeat)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        )  # (B, K, repeat * C, D)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        mask = self._mask(c, k.shape[2], repeat, q.device)
        if q.device.type == "cpu" and q.shape[:3].numel() * k.shape[2] <= MAX_SCORES:
            out: Tensor = Attention.apply(q, k.contiguous(), v.contiguous(), mask, self.scale)
        else:
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return out.unflatten(2, (repeat, c)).permute(0, 3, 1, 2, 4).flatten(2)

    def _mask(self, c: int, length: int, repeat: int, device: torch.device) -> Tensor:
        """(repeat * C, L) bool, True where a query may look."""
        key = (c, length, repeat)
        if key not in self._masks:
            mask = torch.ones(c, length, dtype=torch.bool, device=device).tril(length - c)
            self._masks[key] = mask.repeat(repeat, 1)
        return self._masks[key]


class Attention(torch.autograd.Function):
    """Softmax attention by matrix products; the scores are computed again in the backward pass.

    On CPUs the backward pass of torch 2.13's own takes three times as long.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        """q (B, K, M, D), k and v (B, K, L, D), mask (M, L) -> (B, K, M, D)."""
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return (_probs(q, k, mask, scale) @ v.float()).to(v.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        """Gradients of q, k, v."""
        q, k, v, mask = ctx.saved_tensors
        grad = grads[0].contiguous()
        wide = _probs(q, k, mask, ctx.scale)
        grad_v = wide.to(v.dtype).transpose(-1, -2) @ grad
        grad_probs = grad @ v.transpose(-1, -2)
        slope = torch.ops.aten._softmax_backward_data(grad_probs.float(), wide, -1, torch.float32)
        slope = slope.mul_(ctx.scale).to(q.dtype)
        return slope @ k, slope.transpose(-1, -2) @ q, grad_v, None, None


def _probs(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(B, K, M, L) float32: what is rounded to bfloat16 here puts sampler and learner further apart."""
    keys = k.float().transpose(-1, -2).flatten(0, 1)
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))  # (M, L)
    with exact_bfloat16_products(k):
        scores = torch.baddbmm(bias, q.float().flatten(0, 1), keys, alpha=scale)
    return scores.softmax(-1).unflatten(0, q.shape[:2])
