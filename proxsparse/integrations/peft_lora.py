"""LoRA adapters of peft on packed layers: y = x W^T + b + (alpha / r) (x A^T) B^T with a packed W.

W is frozen and stays packed; A [r, in_features] and B [out_features, r] are trained. Their product is dense, so it
cannot be merged into W. `proxsparse finetune` trains the kept weights instead.
Source of the adapters: Hu et al. 2021, arXiv 2106.09685.
"""

import functools
from pathlib import Path

from torch import nn

from proxsparse.errors import InputError
from proxsparse.inference.linear import SparseLinear

SUPPORTED_INIT = (True, False, "gaussian", "orthogonal")  # the others compute A and B from a dense W


def extend_peft() -> None:
    """Lets LoRA of peft put adapters around packed layers (`SparseLinear`); "all-linear" includes them.

    What needs the dense weight raises ValueError: variants such as DoRA, initializations such as PiSSA, and merging
    (`merge_and_unload`, `merge_adapter`).
    """
    from peft.tuners import tuners_utils
    from peft.tuners.lora.config import LoraConfig
    from peft.tuners.lora.model import LoraModel

    create, include = LoraModel._create_new_module, tuners_utils._maybe_include_all_linear_layers

    @functools.wraps(create)
    def create_also_packed(config: LoraConfig, adapter_name: str, target: nn.Module, **keywords) -> nn.Module:
        layer = target.get_base_layer() if isinstance(target, tuners_utils.BaseTunerLayer) else target
        if isinstance(layer, SparseLinear):
            return lora_sparse_linear()(target, adapter_name, config=config, **keywords)
        return create(config, adapter_name, target, **keywords)

    @functools.wraps(include)
    def include_packed(config, model: nn.Module):
        asked = getattr(config, "target_modules", None)
        config = include(config, model)
        if isinstance(config, LoraConfig) and isinstance(asked, str) and asked.lower() == "all-linear":
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            inside = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, tuners_utils.BaseTunerLayer))
            config.target_modules |= {
                name
                for name, layer in model.named_modules()
                if isinstance(layer, SparseLinear) and layer is not head and not name.startswith(inside)
            }
        return config

    LoraModel._create_new_module = staticmethod(create_also_packed)
    tuners_utils._maybe_include_all_linear_layers = include_packed


def add_adapter_(model: nn.Module, folder: Path) -> None:
    """Puts the LoRA adapter of a folder that peft has saved around the layers of a packed model.

    Raises InputError, with the folder, if it cannot be loaded or does not fit the model.
    """
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, peft.LoraConfig):
            raise ValueError(f"{config.peft_type.value} is not LoRA")
        peft.PeftModel.from_pretrained(model, str(folder), config=config)
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        raise InputError(f"adapter {str(folder)!r}: {error}; give a LoRA adapter of this model") from error


@functools.cache
def lora_sparse_linear() -> type[nn.Module]:
    """The class of the adapters. It is created here because importing peft takes seconds."""
    from peft.tuners.lora import Linear

    class LoraSparseLinear(Linear):
        """peft's adapter of a linear layer, around a packed one."""

        def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:  # peft warns about unknown layers
            return module.in_features, module.out_features

        def update_layer(self, adapter_name: str, *args, config, **kwargs) -> None:
            """Adds an adapter to the layer. Raises ValueError if it needs the dense weight."""
            init, variant = config.init_lora_weights, self.resolve_lora_variant(config=config)
            if init not in SUPPORTED_INIT or variant is not None:
                what = f"init_lora_weights={init!r}" if variant is None else type(variant).__name__
                raise ValueError(
                    f"adapter {adapter_name!r}: {what} needs the dense weight, but the layer is packed; use plain LoRA"
                )
            super().update_layer(adapter_name, *args, config=config, **kwargs)

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            """Raises ValueError: the sum of a pruned weight and a dense update is dense."""
            raise ValueError(
                "an adapter cannot be merged into a packed weight; use the adapter unmerged, or make the model dense "
                "(proxsparse.inference.convert.unsparsify_) and load the adapter again, or train the kept weights "
                "(hold_masks_)"
            )

    return LoraSparseLinear
