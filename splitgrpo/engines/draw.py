"""Drawing tokens from logits by one random number a row. Shapes: B rows, T tokens, V vocabulary, U part of it."""

import torch
from torch import Tensor
from torch.nn import functional

from splitgrpo.engines.base import Sampling
from splitgrpo.logprobs import filter_logits, sampling_logprobs

PART = 256  # tokens of the vocabulary that are summed before one is looked for among them


def uniforms(num_rows: int, limit: int, seed: int) -> Tensor:
    """(B, T) float64 in [0, 1): what each token is drawn by, whoever else is in the batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_rows, limit, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, sampling: Sampling, points: Tensor) -> tuple[Tensor, Tensor]:
    """(B, V) logits and (B,) float64 points in [0, 1) -> (B,) drawn ids and the float32 log-probs of having drawn them.

    Inverts the cumulative distribution: one random number a row, where torch.multinomial takes one a word. Greedy at
    temperature 0.
    """
    if sampling.temperature == 0:
        best = logits.float().log_softmax(dim=-1).max(dim=-1)
        return best.indices, best.values
    logprobs = sampling_logprobs(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    cumulative = logprobs.exp().cumsum(dim=-1)  # (B, V); flat over tokens of probability 0
    point = points[:, None].float() * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, point, right=True)[:, 0]
    # Rounding may put the point on the very end, past the last token that has any probability.
    past_end = ids >= torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0] + 1
    ids = torch.where(past_end, logprobs.argmax(dim=-1), ids.clamp(max=logits.shape[-1] - 1))
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def draw_in_parts(logits: Tensor, sampling: Sampling, points: Tensor) -> tuple[Tensor, Tensor]:
    """(B, V) float32 logits and (B,) points in [0, 1) -> (B,) ids and their float32 log-probs.

    Inverts the cumulative distribution as `draw` does, in three passes over the vocabulary: the point's part is found
    among the sums of parts, then its token in that part.
    """
    if sampling.temperature == 0:
        best = logits.max(dim=-1)
        return best.indices, best.values - logits.logsumexp(dim=-1)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1.0:
        logits = filter_logits(logits, sampling.top_k, sampling.top_p)
    weights = logits.softmax(dim=-1)
    if spare := -weights.shape[-1] % PART:
        weights = functional.pad(weights, (0, spare))
    parts = weights.unflatten(-1, (-1, PART))  # (B, V / U, U)
    ends = parts.sum(dim=-1).double().cumsum(dim=-1)  # (B, V / U), to about 1
    point = points[:, None] * ends[:, -1:]
    part = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[-1] - 1)  # (B, 1)
    chosen = parts.gather(1, part[..., None].expand(-1, -1, PART))[:, 0]  # (B, U)
    begin = (ends.gather(1, part) - chosen.sum(dim=-1, keepdim=True).double()).clamp_(min=0)
    inner = torch.searchsorted(chosen.double().cumsum(dim=-1), point - begin, right=True)
    ids = part * PART + inner.clamp_(max=PART - 1)
    drawn = weights.gather(1, ids)
    if not bool(drawn.all()):
        # Rounding may put a point just past the last token of its part that has any probability.
        best = weights.max(dim=-1, keepdim=True)
        ids, drawn = (
            torch.where(drawn > 0, ids, best.indices),
            torch.where(drawn > 0, drawn, best.values),
        )
    return ids[:, 0], drawn.log()[:, 0]
