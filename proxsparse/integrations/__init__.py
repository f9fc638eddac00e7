"""Integrations with transformers: Trainer, and the loader of packed checkpoints; with peft."""

from proxsparse_autoload import after_import, register


def register_adapters() -> None:
    from proxsparse.integrations.peft_lora import extend_peft

    extend_peft()


register()
after_import("peft.tuners.lora.model", register_adapters)
