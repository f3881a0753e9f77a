"""The same engine on decoder.py: fused weights, a cache of fixed size, a group's prompt held once.

Draws the same tokens as HFEngine from the same seed, up to rounding; that one is kept behind --plain.
Shapes: B rows in the batch, n prompts in it, G completions of each, P longest prompt, T max_new_tokens; A, K, D as in
decoder.py; V vocabulary, U part of it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitgrpo.decoder import Decoder, why_unsupported
from splitgrpo.engines.base import Completion, Sampling
from splitgrpo.engines.cache import Cache
from splitgrpo.engines.draw import draw_in_parts, uniforms
from splitgrpo.engines.hf import LEAVE_FRAC, HFEngine
from splitgrpo.logprobs import base_model
from splitgrpo.packed import PackedAttention, pack_rows
from splitgrpo.vocab import exact_bfloat16_products, wide_product

ROWS = 32  # of a batch, to lay weights out for; others work too


class Product:
    """x W^T + bias with a frozen W. On CPUs a copy of W lies as oneDNN wants it, instead of being laid out at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """float32 weights of a bfloat16 output layer stay float32: what comes out is not rounded."""
        self.weight, self.bias, self.packed = weight, bias, None
        if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, H) -> (B, O)."""
        if self.packed is None:
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class Fused:
    """Several linear layers on one input as one product, and their LoRA A matrices as another.

    The modules' own parameters become views of the fused ones: what is copied into them is at once in use here.
    """

    def __init__(self, modules: Sequence[Any], join: int = 1) -> None:
        """The first `join` layers' outputs are handed out as one."""
        bases = [getattr(m, "base_layer", m) for m in modules]
        lora = [m for m in modules if m.__class__ is not nn.Linear]
        self.switch = lora[0] if lora else None
        sizes = [b.weight.shape[0] for b in bases]
        self.sizes = [sum(sizes[:join]), *sizes[join:]]
        downs = [m.lora_A["default"] for m in lora]
        self.weight = weight = torch.cat([b.weight.data for b in bases])
        self.down = torch.cat([d.weight.data for d in downs]) if lora else weight[:0]
        self.bias = None
        if any(b.bias is not None for b in bases):
            parts = [b.weight.new_zeros(n) if b.bias is None else b.bias.data
                     for b, n in zip(bases, sizes, strict=True)]  # fmt: skip
            self.bias = torch.cat(parts)
        self.up = weight.new_zeros(len(weight), len(self.down))  # (O, R)
        self.scale, self.scales = 1.0, None
        if len(found := {float(m.scaling["default"]) for m in lora}) == 1:
            (self.scale,) = found
        elif lora:  # an alpha_pattern: (R,), a number for each row of A
            each = [torch.full((len(d.weight),), m.scaling["default"])
                    for m, d in zip(lora, downs, strict=True)]  # fmt: skip
            self.scales = torch.cat(each).to(weight)
        self.product = Product(weight, self.bias)
        row, column = 0, 0  # B's other columns stay 0: they are of other layers
        for module, base in zip(modules, bases, strict=True):
            n = base.weight.shape[0]
            base.weight.data = weight[row : row + n]
            if module is not base:
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
                r = a.shape[0]
                view = self.up[row : row + n, column : column + r]
                view.copy_(b.data)
                a.data, b.data = self.down[column : column + r], view
                column += r
            row += n

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, H) -> (B, O) of each layer."""
        out = self.product(x)
        if self.switch is not None and not self.switch.disable_adapters:
            low = functional.linear(x, self.down)
            low = low if self.scales is None else low * self.scales
            out.addmm_(low, self.up.t(), alpha=self.scale)
        return out.split(self.sizes, dim=-1)

    def single(self, x: Tensor) -> Tensor:
        """The output where there is but one layer."""
        return self(x)[0]


class FastEngine(HFEngine):
    """Implements engines.base.Engine for the models that decoder.py knows."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Raises ValueError for other models. The model's weights become views of fused ones."""
        super().__init__(model, tokenizer)
        self.decoder = self._policy.decoder = Decoder(model)
        for layer in self.decoder.layers:
            attention, mlp = layer.module.self_attn, layer.module.mlp
            layer.qkv = Fused([attention.q_proj, attention.k_proj, attention.v_proj], join=2)
            layer.gate_up = Fused([mlp.gate_proj, mlp.up_proj])
            layer.out = Fused([attention.o_proj]).single
            layer.down = Fused([mlp.down_proj]).single
        self.head = base_model(model).get_output_embeddings()
        # Float32 copies of bfloat16 numbers: the product is exact, and made anew for every token it would cost more.
        self._head: Product | None = None
        if self.device.type == "cpu":
            with exact_bfloat16_products(self.head.weight):
                self._head = Product(self.head.weight.data.float(), _wide(self.head.bias))

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[np.ndarray],
        num_completions: int,
        sampling: Sampling,
        *,
        seed: int,
        on_token: Callable[[], None],
    ) -> list[list[Completion]]:
        """See Engine.generate."""
        num_rows, limit = len(prompts) * num_completions, sampling.max_new_tokens
        points = uniforms(num_rows, limit, seed).to(self.device)
        last, cache = self._start(prompts, num_completions, limit)
        ids = torch.zeros(num_rows, limit, dtype=torch.int64, device=self.device)
        logprobs = torch.zeros(num_rows, limit, device=self.device)
        lengths, finished = np.full(num_rows, limit), np.zeros(num_rows, dtype=bool)
        rows = np.arange(num_rows)  # those still in the batch, by their number in the result
        at = torch.from_numpy(rows).to(self.device)
        positions = torch.tensor([len(p) for p in prompts], device=self.device)
        positions = positions.repeat_interleave(num_completions)
        for t in range(limit):
            on_token()
            drawn, drawn_logprobs = draw_in_parts(self._logits(last), sampling, points[at, t])
            ids[at, t], logprobs[at, t] = drawn, drawn_logprobs
            ended = np.isin(drawn.cpu().numpy(), self.end_ids) & ~finished[rows]
            lengths[rows[ended]], finished[rows[ended]] = t + 1, True
            active = ~finished[rows]
            if not active.any() or t + 1 == limit:
                break
            if 1.0 - active.mean() >= LEAVE_FRAC:
                keep = torch.from_numpy(np.flatnonzero(active)).to(self.device)
                rows, drawn, positions = rows[active], drawn[keep], positions[keep]
                cache.keep(rows)
                at = torch.from_numpy(rows).to(self.device)
            last = self.decoder.hidden(drawn, positions, lambda *a, t=t: cache.attend(t, *a))
            positions = positions + 1
        flat_ids, flat_logprobs = ids.int().cpu().numpy(), logprobs.cpu().numpy()
        flat = [
            Completion(flat_ids[i, :n], flat_logprobs[i, :n], bool(finished[i]))
            for i, n in enumerate(lengths)
        ]
        return [flat[i : i + num_completions] for i in range(0, num_rows, num_completions)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """(B, H) -> (B, V) float32."""
        if self._head is not None:
            with exact_bfloat16_products(self.head.weight):
                return self._head(hidden.float())
        logits = wide_product(
            hidden, self.head.weight
        )  # the head would widen its weight at every token
        return logits if self.head.bias is None else logits.add_(self.head.bias)

    def _start(
        self, prompts: Sequence[np.ndarray], num_completions: int, limit: int
    ) -> tuple[Tensor, Cache]:
        """Compute each prompt once: the (n * G, H) hidden state that the first token is drawn from, and the cache."""
        lens = [len(p) for p in prompts]
        # The cache wants the keys of every prompt, of equal ones too.
        packing = pack_rows(prompts, [1] * len(prompts), max(lens), share=False).to(self.device)
        attend = PackedAttention(packing, self.decoder.num_kv_heads, self.decoder.scale)
        cache = Cache(lens, num_completions, limit, self.decoder.scale)

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.add_prompts(k, v)
            return attend(layer, q, k, v)

        ids = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(self.device)
        last = self.decoder.hidden(ids, packing.positions, keep)[packing.before]
        return last.repeat_interleave(num_completions, dim=0), cache


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def open_engine(model: Any, tokenizer: Any, log: logging.Logger, *, plain: bool) -> HFEngine:
    """The fast engine, or the plain one where it is asked for or the model is of another kind, which the log says."""
    reason = None if plain else why_unsupported(model)
    if reason:
        log.warning("sampling with the plain, slower engine, since %s", reason)
    return HFEngine(model, tokenizer) if plain or reason else FastEngine(model, tokenizer)
