"""Log-probs of the distribution that is really sampled from; sampler and learner both call these functions.

Shapes: B rows, L length, N completion tokens, V vocabulary, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn


def filter_logits(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the logits outside top-k, then outside top-p, to -inf; (N, V) float32 in and out, not in place.

    top_k 0 and top_p 1.0 mean off. Ties at the k-th logit are all kept. The most likely token always stays.
    """
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= top_p  # mass before this token already reaches p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits


def sampling_logprobs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(N, V) logits of any float dtype -> (N, V) float32 log-probs (nats) of the sampling distribution."""
    return filter_logits(logits.float() / temperature, top_k, top_p).log_softmax(dim=-1)


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """(N, V) logits and (N,) ids -> (N,) float32 log-probs. No (N, V) log-softmax is kept.

    A token that the learner's filter leaves out although the sampler drew it (a tie broken by rounding) gets its
    unfiltered log-prob: -inf would poison the whole step.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, token_ids[:, None])[:, 0]  # (N,)
    kept = filter_logits(scaled, top_k, top_p)
    dropped = kept.gather(-1, token_ids[:, None])[:, 0] == float("-inf")
    norm = torch.where(dropped, scaled.logsumexp(dim=-1), kept.logsumexp(dim=-1))
    return chosen - norm


def token_entropy(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(N, V) logits -> (N,) float32 entropy (nats) of the sampling distribution."""
    logprobs = sampling_logprobs(logits, temperature, top_k, top_p)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)).sum(dim=-1)


class Float32Output(nn.Linear):
    """An output layer whose product is float32, whatever its weights are; (…, H) -> (…, V) float32.

    bfloat16 logits near 20 are rounded to 1/8: two ways to compute the same token then differ by so much that clipping
    sets in with no update at all. The product of bfloat16 numbers is exact in float32. As a module, and not a function of
    the weights, it works where ZeRO-3 gathers them.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias)


def use_float32_output(model: Any) -> None:
    """Exchange a transformers model's output layer for a Float32Output on the same parameters, in place.

    Raises ValueError for a model whose logits are not one linear layer's product.
    """
    old = model.get_output_embeddings()
    if not isinstance(old, nn.Linear):
        raise ValueError(f"its output layer is a {type(old).__name__}, expected a Linear")
    new = Float32Output(old.in_features, old.out_features, old.bias is not None, device="meta")
    new.weight, new.bias = old.weight, old.bias
    model.set_output_embeddings(new)


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper (adapters are layers in place), or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_model(config: object) -> None:
    """Refuse a model whose logits are more than its output layer's product. Raises ValueError."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(
                f"this model sets {name}={value}, which its logits go through after the output layer; the learner's "
                "log-probs would be of another distribution. Models of this kind are not supported."
            )
