"""The module that DeepSpeed wraps: a language model whose forward gives log-probs of completion tokens.

Shapes: B rows, L length, N completion tokens, V vocabulary, H hidden.
"""

import logging

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splitgrpo.decoder import Decoder, why_unsupported
from splitgrpo.logprobs import base_model, token_entropy, token_logprobs
from splitgrpo.packed import PackedAttention, Packing
from splitgrpo.vocab import VocabLogprobs

CHUNK_TOKENS = 512  # rows of logits held at once where whole rows of them are needed


class PolicyModule(nn.Module):
    """A causal language model whose forward gives the log-prob of each completion token; what DeepSpeed wraps.

    Position t of the result speaks of token t. Rows that come with a Packing take the fast road: decoder.py over a stream
    without padding, vocab.py over the vocabulary in parts. Without one, transformers' own forward pass runs over padded
    rows, and logits of completion tokens exist `chunk_tokens` at a time, computed again in the backward pass. The model
    inside stays in eval mode: dropout would give log-probs of another policy than the one that sampled.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        top_k: int,
        top_p: float,
        *,
        entropy_grad: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """`entropy_grad`: the entropy is part of the loss."""
        super().__init__()
        self.model = model
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.entropy_grad, self.chunk_tokens = entropy_grad, chunk_tokens
        self.decoder: Decoder | None = (
            None  # what packed rows go through; `pack` or an engine sets it
        )

    def pack(self, log: logging.Logger) -> bool:
        """Whether rows may come packed from now on; where not, the log says why."""
        if reason := why_unsupported(self.model):
            log.warning("taking the plain, slower forward pass, since %s", reason)
            return False
        self.decoder = Decoder(self.model)
        return True

    def train(self, mode: bool = True) -> "PolicyModule":
        """As any module, but the model inside stays in eval mode."""
        super().train(mode)
        self.model.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,  # (B, L) int64
        attention_mask: Tensor,  # (B, L) int64, rows padded on the right
        completion_mask: Tensor,  # (B, L) bool, False at position 0
        with_entropy: bool = False,
        packing: Packing | None = None,  # of these rows; only after `pack` said True
    ) -> Tensor:
        """Return (B, L) float32 nats, 0.0 outside the completion; (2, B, L), log-probs and entropy, `with_entropy`."""
        drawn = input_ids[completion_mask]  # (N,), row by row
        if packing is None:
            hidden = (
                base_model(self.model)
                .get_decoder()(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
                .last_hidden_state
            )  # (B, L, H)
            before = hidden[:, :-1][
                completion_mask[:, 1:]
            ]  # (N, H): position t - 1 predicts token t
            found = self._in_chunks(before, drawn, with_entropy)
        else:
            assert self.decoder is not None
            attend = PackedAttention(packing, self.decoder.num_kv_heads, self.decoder.scale)
            ids = input_ids.flatten()[packing.source]
            before = self.decoder.hidden(ids, packing.positions, attend)[packing.before]
            found = self._by_parts(before, drawn, with_entropy)
        zeros = torch.zeros(input_ids.shape, dtype=torch.float32, device=input_ids.device)
        out = torch.stack([zeros.masked_scatter(completion_mask, stream) for stream in found])
        return out if with_entropy else out[0]

    def _by_parts(self, before: Tensor, drawn: Tensor, with_entropy: bool) -> Tensor:
        """As `_in_chunks`, for what needs no whole row of logits."""
        head = base_model(self.model).get_output_embeddings()
        filtered = self.top_p < 1.0 or 0 < self.top_k < head.weight.shape[0]
        if filtered or (with_entropy and self.entropy_grad):
            return self._in_chunks(before, drawn, with_entropy)
        out: Tensor = VocabLogprobs.apply(before, head.weight, head.bias, drawn, self.temperature)
        return out

    def _in_chunks(self, before: Tensor, drawn: Tensor, with_entropy: bool) -> Tensor:
        """(N, H) hidden states and the (N,) ids that follow them -> (1 or 2, N)."""
        chunks = [
            checkpoint(self._chunk, h, i, with_entropy, use_reentrant=False)
            for h, i in zip(
                before.split(self.chunk_tokens), drawn.split(self.chunk_tokens), strict=True
            )
        ]
        return torch.cat(chunks, dim=1)

    def _chunk(self, hidden: Tensor, token_ids: Tensor, with_entropy: bool) -> Tensor:
        """(N, H) -> (1 or 2, N)."""
        how = (self.temperature, self.top_k, self.top_p)
        logits = base_model(self.model).get_output_embeddings()(hidden)  # (N, V)
        streams = [token_logprobs(logits, token_ids, *how)]
        if with_entropy:
            with torch.set_grad_enabled(self.entropy_grad and torch.is_grad_enabled()):
                streams.append(token_entropy(logits, *how))
        return torch.stack(streams)
