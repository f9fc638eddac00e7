"""Integrations with transformers: Trainer, and the loader of packed checkpoints; with FlopCounterMode and peft."""

from proxsparse_autoload import after_import, register


def register_flops() -> None:
    """Lets FlopCounterMode count packed layers."""
    import torch
    from torch.utils.flop_counter import register_flop_formula

    from proxsparse.ops.sparse_linear import flops

    register_flop_formula(torch.ops.proxsparse.sparse_linear)(flops)


def register_adapters() -> None:
    """Lets peft say what packed layers need."""
    from proxsparse.integrations.peft_lora import extend_peft

    extend_peft()


register()
after_import("torch.utils.flop_counter", register_flops)  # importing it takes 0.4 s
after_import("peft.tuners.lora.model", register_adapters)
