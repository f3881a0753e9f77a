"""Keys and values while rows are drawn: each prompt held once for its completions, a fixed place for every token to come.

Shapes: n prompts held, G completions of each, B rows in the batch, P longest prompt, T max_new_tokens; A, K, D as in
decoder.py, R = A / K query heads to a key head.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def held_dtype(keys: Tensor) -> torch.dtype:
    """Float32 on CPUs, so that neither scores nor probabilities are rounded; elsewhere the model's, with float32 sums."""
    return torch.float32 if keys.device.type == "cpu" else keys.dtype


class Cache:
    """All layers' keys and values. Rows that have ended leave the batch; their places stay until their prompt leaves."""

    def __init__(
        self, prompt_lens: Sequence[int], group_size: int, limit: int, scale: float
    ) -> None:
        """`limit`: T. Prompts come by `add_prompts`, a layer after the other."""
        self.numbers = np.arange(len(prompt_lens))  # of the prompts held
        self.group_size, self.limit, self.scale = group_size, limit, scale
        self.prompt_lens = prompt_lens
        self.slot: Tensor | None = (
            None  # (B,) places of the rows among n * G; None while all are there
        )
        self.bias: Tensor | None = (
            None  # (n * K, 1, P) float32, -inf where a shorter prompt has nothing
        )
        # Keys lie as their product with a query wants them, (…, D, P or T); values (…, P or T, D).
        self._prompt: list[tuple[Tensor, Tensor]] = []  # n * K
        self._drawn: list[tuple[Tensor, Tensor]] = []  # n * K * G

    def add_prompts(self, k: Tensor, v: Tensor) -> None:
        """Of the next layer: (sum of lengths, K, D) each, one prompt after the other."""
        n, longest, (heads, size) = len(self.prompt_lens), max(self.prompt_lens), k.shape[1:]
        held = held_dtype(k)
        pair = []
        for x in (k, v):
            padded = x.new_zeros(n, heads, longest, size, dtype=held)
            for i, one in enumerate(x.split(list(self.prompt_lens))):
                padded[i, :, : len(one)] = one.transpose(0, 1)
            pair.append(padded.flatten(0, 1))
        self._prompt.append((pair[0].transpose(1, 2).contiguous(), pair[1]))
        rows = n * heads * self.group_size
        new_k = k.new_empty(rows, size, self.limit, dtype=held)
        self._drawn.append((new_k, k.new_empty(rows, self.limit, size, dtype=held)))
        if min(self.prompt_lens) < longest and self.bias is None:
            lens = torch.tensor(self.prompt_lens, device=k.device)
            beyond = torch.arange(longest, device=k.device) >= lens[:, None]
            bias = torch.zeros(beyond.shape, device=k.device).masked_fill_(beyond, float("-inf"))
            self.bias = bias.repeat_interleave(heads, dim=0)[:, None]

    def keep(self, rows: np.ndarray) -> None:
        """Go on with the rows of these numbers among all n * G of the beginning, (B,) in rising order."""
        left, which = np.unique(rows // self.group_size, return_inverse=True)
        device = self._drawn[0][0].device
        if len(left) < len(self.numbers):
            before = len(self.numbers)
            at = torch.from_numpy(np.searchsorted(self.numbers, left)).to(device)

            def pick(x: Tensor) -> Tensor:
                return x.unflatten(0, (before, -1))[at].flatten(0, 1)

            self._prompt = [(pick(k), pick(v)) for k, v in self._prompt]
            self._drawn = [(pick(k), pick(v)) for k, v in self._drawn]
            self.bias = None if self.bias is None else pick(self.bias)
            self.numbers = left
        slot = which * self.group_size + rows % self.group_size
        self.slot = torch.from_numpy(slot).to(device)

    def attend(self, t: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One new token a row, the t-th that is drawn: q (B, A, D), k and v (B, K, D) -> (B, A * D)."""
        (prompt_k, prompt_v), (drawn_k, drawn_v) = self._prompt[layer], self._drawn[layer]
        n, group, heads, size = len(self.numbers), self.group_size, k.shape[1], q.shape[-1]
        for place, new in ((drawn_k[:, :, t], k), (drawn_v[:, t], v)):
            new = self._grid(new).view(n, group, heads, size).transpose(1, 2)
            place.unflatten(0, (n, heads, group)).copy_(new)
        # All completions of a prompt are rows of one product with its keys: (n, K, G, R, D).
        wide = q.new_empty(n, heads, group, q.shape[1] // heads, size, dtype=drawn_k.dtype)
        wide.copy_(self._grid(q).view(n, group, heads, -1, size).transpose(1, 2))
        shared = self._scores(wide.view(n * heads, -1, size), prompt_k, self.bias)
        own = self._scores(wide.view(n * heads * group, -1, size), drawn_k[:, :, : t + 1], None)
        longest = shared.shape[-1]
        scores = torch.cat([shared.view(len(own), -1, longest), own], dim=-1)
        probs = scores.softmax(dim=-1).to(drawn_v.dtype)
        of_prompt = probs[..., :longest].unflatten(0, (n * heads, group)).flatten(1, 2)
        if probs.dtype == torch.float32:
            out = torch.bmm(probs[..., longest:], drawn_v[:, : t + 1])
            out.view(n * heads, -1, size).baddbmm_(of_prompt, prompt_v)
        else:
            out = torch.bmm(probs[..., longest:], drawn_v[:, : t + 1], out_dtype=torch.float32)
            more = torch.bmm(of_prompt, prompt_v, out_dtype=torch.float32)
            out += more.view(out.shape)
        found = q.new_empty(n, group, heads, out.shape[1], size)
        found.copy_(out.view(n, heads, group, -1, size).transpose(1, 2))
        found = found.view(n * group, -1)
        return found if self.slot is None else found[self.slot]

    def _grid(self, x: Tensor) -> Tensor:
        """(B, …) -> (n * G, …), 0 where a row has left."""
        if self.slot is None:
            return x
        grid = x.new_zeros(len(self.numbers) * self.group_size, *x.shape[1:])
        grid[self.slot] = x
        return grid

    def _scores(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """(X, M, D) x (X, D, L) -> (X, M, L) float32: a score near 20 in bfloat16 is rounded to 1/16."""
        if q.dtype == torch.float32:
            to = q.new_empty(1, 1, 1) if bias is None else bias
            return torch.baddbmm(to, q, k, beta=0 if bias is None else 1, alpha=self.scale)
        scores = torch.bmm(q, k, out_dtype=torch.float32).mul_(self.scale)
        return scores if bias is None else scores.add_(bias)
