"""Float32 weights and Adam's state out of a DeepSpeed engine and back into one, whole, whatever the stage and the ranks.

DeepSpeed's own checkpoints are not used: they are pickle, fit one number of ranks alone, and load a flipped bit silently.
"""

from typing import Any

import torch
from torch import Tensor

from splitgrpo.adapters import adapter_parameters


def lora_state(model: Any) -> dict[str, Tensor]:
    """The float32 masters of all LoRA parameters on the CPU, by PEFT's key. A collective: every rank calls it."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for key, parameter in adapter_parameters(model).items():
        master = safe_get_full_fp32_param(parameter)
        found[key] = cpu_copy(parameter if master is None else master)  # stage 0 keeps no other
    return found


def optimizer_state(engine: Any) -> dict[str, Tensor]:
    """Adam's moments of all LoRA parameters on the CPU, "<PEFT key>|exp_avg". A collective: every rank calls it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {}
    for key, parameter in adapter_parameters(engine.module.model).items():
        for name in ("exp_avg", "exp_avg_sq"):
            if engine.zero_optimization_stage() == 0:
                moment = engine.optimizer.state[parameter][name]
            else:
                moment = safe_get_full_optimizer_state(parameter, name)
            found[f"{key}|{name}"] = cpu_copy(moment)
    return found


def cpu_copy(tensor: Tensor) -> Tensor:
    """A contiguous float32 copy that shares no memory with DeepSpeed's buffers."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def masters(engine: Any) -> list[Tensor]:
    """The float32 tensors that Adam updates: of this rank's part of the parameters, flat, from ZeRO stage 1 on."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    if stage > 0:
        return list(optimizer.single_partition_of_fp32_groups)
    return list(adapter_parameters(engine.module.model).values())


def adam_of(engine: Any) -> Any:
    """The optimizer inside of ZeRO's."""
    return engine.optimizer if engine.zero_optimization_stage() == 0 else engine.optimizer.optimizer


def adam_step(engine: Any) -> int:
    """Updates that Adam has made; 0 before the first, when it has no moments yet."""
    states = adam_of(engine).state
    return max((int(states[m]["step"]) for m in masters(engine) if m in states), default=0)


def load_state(engine: Any, lora: dict[str, Tensor], moments: dict[str, Tensor], step: int) -> None:
    """Put back what `lora_state` and `optimizer_state` gave, with Adam at `step`; the weights to compute with follow.

    A collective. Raises KeyError or RuntimeError for tensors of another adapter.
    """
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    stage, parameters = engine.zero_optimization_stage(), adapter_parameters(engine.module.model)
    adam = adam_of(engine)
    if step > 0:
        for master in masters(engine):
            # torch's own Adam counts in a tensor, DeepSpeed's fused ones in a number.
            own = type(adam).__module__.startswith("torch.")
            adam.state[master] = {
                "step": torch.tensor(float(step)) if own else step,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        if stage in (1, 2):
            engine.optimizer._lazy_init_hp_params_optimizer_state()
    for key, parameter in parameters.items():
        if stage > 0:
            safe_set_full_fp32_param(parameter, lora[key].to(engine.device))
        if step > 0:
            for name in ("exp_avg", "exp_avg_sq"):
                moment = moments[f"{key}|{name}"].to(engine.device)
                if stage == 0:
                    adam.state[parameter][name].copy_(moment)
                else:
                    safe_set_full_optimizer_state(parameter, moment, name)
    with (
        torch.no_grad(),
        deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0),
    ):
        for key, parameter in parameters.items():
            parameter.data.copy_(lora[key])
