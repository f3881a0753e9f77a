"""The forward pass of a Llama-like model in plain torch, on the weights of a transformers model and its LoRA layers.

transformers computes a prompt once for every completion, pads rows, and takes a dozen passes over memory where two do.
Here tokens lie in one stream without padding, and what attends to what is the caller's: the learner computes the prompt of
a group once (`attend_packed`), the sampler keeps a cache of fixed size (engines/fast.py). Nothing is copied: the weights
are those of the modules. `why_unsupported` says which models this is not for.
Shapes: N tokens, H hidden, A attention heads, K key/value heads, D head size, R LoRA rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitgrpo.logprobs import Float32Output, base_model

NORMS = ("input_layernorm", "post_attention_layernorm")
KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def why_unsupported(model: Any) -> str | None:
    """What of a transformers model, or a PeftModel around one, this forward pass does not know; None where it knows all."""
    base, config = base_model(model), base_model(model).config
    if type(base).__name__ not in KINDS:
        return f"it is a {type(base).__name__}"
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        return "ZeRO-3 holds its parameters"
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    if rope not in ("default", "linear", "llama3"):
        return f"its rope_type is {rope}"
    if config.hidden_act != "silu":
        return f"its hidden_act is {config.hidden_act}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = type(base).__name__ == "MistralForCausalLM" and config.sliding_window is not None
    if kinds != {"full_attention"} or windowed:
        return "its attention has a window"
    head, inner = base.get_output_embeddings(), base.get_decoder()
    if type(head) not in (nn.Linear, Float32Output):
        return f"its output layer is a {type(head).__name__}"  # one with LoRA has weights of its own beside the base's
    if type(inner.embed_tokens) is not nn.Embedding:
        return f"its embedding is a {type(inner.embed_tokens).__name__}"
    for norm in (inner.norm, *(getattr(m, n) for m in inner.layers for n in NORMS)):
        if not type(norm).__name__.endswith("RMSNorm"):
            return f"one of its norms is a {type(norm).__name__}"
    for layer in inner.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            part = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            if reason := _why_not(getattr(part, name)):
                return f"its {name} {reason}"
    return None


def _why_not(module: Any) -> str | None:
    """What is unknown in one linear layer."""
    base = getattr(module, "base_layer", module)
    if type(base) is not nn.Linear:
        return f"is a {type(base).__name__}"
    if base is module:
        return None
    adapters = list(getattr(module, "lora_A", {}))
    if type(module).__name__ != "Linear" or adapters != ["default"]:
        return f"is adapted by {type(module).__name__} with {adapters}"
    if module.lora_variant or module.lora_B["default"].bias is not None or module.merged:
        return "has a LoRA variant or bias, or is merged"
    return None


class LoraLinear(torch.autograd.Function):
    """x W^T + bias + s (x A^T) B^T with a frozen W: one pass over memory less than the sum of two linear layers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """x (N, H), weight (O, H), a (R, H), b (O, R) -> (N, O)."""
        low = x @ a.t()  # (N, R)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return functional.linear(x, weight, bias).addmm_(low, b.t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The base's weight and bias are frozen and get none."""
        (grad,) = grads
        x, weight, a, b, low = ctx.saved_tensors
        grad_low = (grad @ b).mul_(ctx.scale)
        grad_x = (grad @ weight).addmm_(grad_low, a) if ctx.needs_input_grad[0] else None
        grad_b = (grad.t() @ low).mul_(ctx.scale)
        return grad_x, None, None, grad_low.t() @ x, grad_b, None


class RMSNorm(torch.autograd.Function):
    """weight * (x / rms(x)) in float32, rounded as transformers rounds it; keeps (N, 1) numbers for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (…, H) -> (…, H)."""
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The weight is frozen and gets none."""
        x, weight, inverse = ctx.saved_tensors
        grad = (grads[0] * weight).float()
        unit = x.float() * inverse
        mean = (grad * unit).mean(-1, keepdim=True)
        return grad.addcmul_(unit, mean, value=-1.0).mul_(inverse).to(x.dtype), None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up; silu is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Both (N, F) -> (N, F)."""
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        (grad,) = grads
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), functional.silu(gate).mul_(grad)


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """(N, H) -> (N, O) of an nn.Linear or of PEFT's LoRA layer around one, its adapter on or off."""
    base: Any = getattr(module, "base_layer", module)
    if base is module or module.disable_adapters:
        return functional.linear(x, base.weight, base.bias)
    lora: Any = module
    a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
    out: Tensor = LoraLinear.apply(
        x, base.weight, base.bias, a.to(x.dtype), b.to(x.dtype), lora.scaling["default"]
    )
    return out


def rms_norm(module: Any, x: Tensor) -> Tensor:
    """(…, H) -> (…, H)."""
    if x.requires_grad and torch.is_grad_enabled():
        out: Tensor = RMSNorm.apply(x, module.weight, module.variance_epsilon)
        return out
    # As there, without what a Function costs a token that is being drawn.
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(module.variance_epsilon))
    return module.weight * (wide * inverse).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both (N, F)."""
    if gate.requires_grad and torch.is_grad_enabled():
        out: Tensor = SwiGLU.apply(gate, up)
        return out
    return functional.silu(gate).mul_(up)


def rotary(module: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, (N, 1, D) each, of (N,) positions; the first half of sin negated, as `rotate` takes it."""
    cos, sin = (t.transpose(0, 1) for t in module(x, positions[None]))
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (N, A, D)."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat([x[..., half:], x[..., :half]], dim=-1), sin)


@dataclass
class Layer:
    """One layer: its modules, and how each set of projections is computed (engines/fast.py fuses them).

    qkv gives (N, (A + K) * D) of queries and keys, which are rotated together, and (N, K * D) of values.
    """

    module: Any
    qkv: Callable[[Tensor], Sequence[Tensor]]
    out: Callable[[Tensor], Tensor]
    gate_up: Callable[[Tensor], Sequence[Tensor]]
    down: Callable[[Tensor], Tensor]


class Decoder:
    """All layers of a model; holds no tensor of its own."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError for a model that it does not know."""
        if reason := why_unsupported(model):
            raise ValueError(f"no fast forward pass for this model: {reason}")
        self.base = base_model(model)
        self.inner = self.base.get_decoder()
        config = self.base.config
        self.head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.num_kv_heads = config.num_key_value_heads
        self.scale: float = self.inner.layers[0].self_attn.scaling
        self.layers = [_layer(module) for module in self.inner.layers]

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(N,) ids and their positions in their rows -> (N, H), what the output layer takes.

        attend(layer number, q (N, A, D), k (N, K, D), v (N, K, D)) -> (N, A * D).
        """
        x = self.inner.embed_tokens(token_ids)
        cos, sin = rotary(self.inner.rotary_emb, x, positions)
        for number, layer in enumerate(self.layers):
            attention = layer.module.self_attn
            both, v = layer.qkv(rms_norm(layer.module.input_layernorm, x))
            both = both.view(len(x), -1, self.head_size)
            split = [both.shape[1] - self.num_kv_heads, self.num_kv_heads]
            if hasattr(attention, "q_norm"):  # Qwen3
                q, k = both.split(split, dim=1)
                both = torch.cat(
                    [rms_norm(attention.q_norm, q), rms_norm(attention.k_norm, k)], dim=1
                )
            q, k = rotate(both, cos, sin).split(split, dim=1)
            v = v.view(len(x), -1, self.head_size)
            x = x + layer.out(attend(number, q, k, v))
            gate, up = layer.gate_up(rms_norm(layer.module.post_attention_layernorm, x))
            x = x + layer.down(swiglu(gate, up))
        return rms_norm(self.inner.norm, x)


def _layer(module: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    return Layer(
        module,
        qkv=lambda x: [
            torch.cat([linear(attention.q_proj, x), linear(attention.k_proj, x)], dim=-1),
            linear(attention.v_proj, x),
        ],
        out=lambda x: linear(attention.o_proj, x),
        gate_up=lambda x: [linear(m, x) for m in (mlp.gate_proj, mlp.up_proj)],
        down=lambda x: linear(mlp.down_proj, x),
    )
