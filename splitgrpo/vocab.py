"""Log-probs and entropy of chosen tokens from hidden states, a part of the vocabulary at a time.

Softmax over parts: the largest logit and the sum of exponentials are carried from part to part and rescaled, and so is
what the gradient needs. No tensor grows with the vocabulary, and nothing is computed twice: d logprob / d hidden is
(W[token] - sum_v p_v W[v]) / temperature whatever the loss is, so it is taken along in the forward pass.
Shapes: N tokens, V vocabulary, U part of it, H hidden.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 27}  # held at once, float32


@contextlib.contextmanager
def exact_bfloat16_products(weight: Tensor) -> Iterator[None]:
    """Inside, float32 products on a CPU may be made of bfloat16 factors, at twice the speed; sums stay float32.

    For numbers that came out of bfloat16 this loses nothing. A global switch of torch: nothing else may run inside.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    matmul.fp32_precision = "bf16" if fits else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


def wide_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """(N, H) x (U, H) of one dtype -> (N, U) float32, not rounded to that dtype."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.t()
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    with exact_bfloat16_products(weight):
        return hidden.float() @ weight.float().t()


class VocabLogprobs(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, (N,) ids -> (2, N) float32: log-prob of each id, entropy (not in the gradient)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
    ) -> Tensor:
        """In nats, at a temperature."""
        need = ctx.needs_input_grad[0]
        parts = [
            _logprobs(h, weight, bias, i, temperature, need)
            for h, i in zip(hidden.split(512), token_ids.split(512), strict=True)
        ]
        out, directions = zip(*parts, strict=True)
        if need:
            ctx.save_for_backward(torch.cat(directions))
        return torch.cat(out, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of the hidden states; the output layer is frozen."""
        (direction,) = ctx.saved_tensors
        return direction * grads[0][0][:, None].to(direction.dtype), None, None, None, None


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    temperature: float,
    need: bool,
) -> tuple[Tensor, Tensor | None]:
    """(2, N) float32, and (N, H) d logprob / d hidden in hidden's dtype where it is needed."""
    n = len(hidden)
    top = hidden.new_full((n, 1), float("-inf"), dtype=torch.float32)
    total, weighted = (
        torch.zeros_like(top) for _ in range(2)
    )  # of exp(l - top), and of l times that
    logit, others = (torch.zeros_like(top) for _ in range(2))  # of the token, and of all but it
    mean = torch.zeros_like(hidden, dtype=torch.float32) if need else None  # of W[v], likewise
    size = max(256, MAX_LOGITS[hidden.device.type] // max(1, n))
    for start in range(0, len(weight), size):
        part = weight[start : start + size]
        logits = wide_product(hidden, part)  # (N, U)
        if bias is not None:
            logits += bias[start : start + size]
        if temperature != 1.0:
            logits /= temperature
        # Of the same product as `top`: for a sure token the two cancel to the last digit.
        place = (token_ids - start)[:, None]
        inside = (place >= 0) & (place < len(part))
        logit = torch.where(inside, logits.gather(1, place.clamp(0, len(part) - 1)), logit)
        higher = torch.maximum(top, logits.amax(-1, keepdim=True))
        shrink = torch.exp(top - higher)
        shifted = logits.sub_(higher)
        weights = shifted.exp()
        # Sum of (l - top) exp(l - top): under a new top every earlier term moves by the difference.
        moved = torch.where(total > 0, top - higher, torch.zeros_like(top))
        weighted = (weighted + moved * total) * shrink + _dot(weights, shifted)
        total = total * shrink + weights.sum(-1, keepdim=True)
        if mean is not None:
            # The token itself is left out: for a sure one, W[token] less a mean that is nearly W[token] has no digits left.
            at = place.clamp(0, len(part) - 1)
            weights.scatter_(1, at, weights.gather(1, at).masked_fill_(inside, 0.0))
            others = others * shrink + weights.sum(-1, keepdim=True)
            mean.mul_(shrink)
            if hidden.dtype == torch.float32:
                mean.addmm_(weights, part)
            else:
                mean += weights.to(hidden.dtype) @ part
        top = higher
    log_total = total.log()
    out = torch.cat([logit - top - log_total, log_total - weighted / total], dim=1).t()
    if mean is None:
        return out, None
    direction = (weight[token_ids].float() * others - mean) / (total * temperature)
    return out, direction.to(hidden.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(N, U) x (N, U) -> (N, 1), row by row."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0]  # vecdot writes all products first
