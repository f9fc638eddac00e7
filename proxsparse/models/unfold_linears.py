"""Replaces linear layers that transformers stores in another form by nn.Linear.

GPT-2's Conv1D stores W^T, [in_features, out_features]; a mixture of experts stores the weights of all experts in one
tensor [experts, out_features, in_features]. `unfold_linears_` replaces both by nn.Linear layers, so that hooks, masks
and optimizers handle only nn.Linear. The results of the model do not change.

The new weights are views of the old tensors, not copies. `state_dict`, `save_pretrained` and `load_state_dict` use the
original names and shapes.
"""

import torch
from torch import Tensor, nn


def unfold_linears_(model: nn.Module) -> nn.Module:
    """Replaces every Conv1D and all fused experts by nn.Linear layers, in place; returns the model."""
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        fused = {"has_gate", "has_bias", "is_transposed"} <= vars(module).keys()  # transformers marks them so
        if fused or isinstance(module, Conv1D):
            unfolded = SplitExperts(module) if fused else TransposedLinear(module)
            model.set_submodule(name, unfolded.train(module.training))
    return model


def unfolded_layers(model: nn.Module) -> set[nn.Linear]:
    """The layers that `unfold_linears_` has made: they are saved in the form in which transformers stores them."""
    modules = [module for module in model.modules() if isinstance(module, TransposedLinear | SplitExperts)]
    return {layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)}


class TransposedLinear(nn.Linear):
    """A Conv1D as nn.Linear; its weight in a state_dict is W^T, [in_features, out_features]."""

    def __init__(self, conv1d: nn.Module):
        super().__init__(*conv1d.weight.shape, device="meta")
        self.weight, self.bias = nn.Parameter(conv1d.weight.detach().T, conv1d.weight.requires_grad), conv1d.bias
        self.register_state_dict_post_hook(TransposedLinear.transpose)
        self.register_load_state_dict_pre_hook(TransposedLinear.transpose)

    def transpose(self, state: dict[str, Tensor], prefix: str, *_arguments_of_a_hook) -> None:
        """W <-> W^T in a state_dict."""
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T


class SplitExperts(nn.Module):
    """Fused experts as nn.Linear layers `<expert>.gate_up_proj` (without a gate: up_proj) and `<expert>.down_proj`.

    y_t = sum_k p_tk down_k(act(up_k(x_t))) over the experts k that the router chose for token t with weights p_tk.
    In a state_dict the weights of all experts are one tensor, and so are the biases.
    """

    def __init__(self, fused: nn.Module):
        super().__init__()
        names = ("gate_up_proj" if fused.has_gate else "up_proj", "down_proj")
        self.parts = [(name, kind, name + end) for name in names for kind, end in (("weight", ""), ("bias", "_bias"))]
        self.experts, self.transposed = len(fused.down_proj), fused.is_transposed
        self.normalizes = getattr(fused, "has_post_expert_norm", False)  # transformers 5.17 has no such attribute
        learns = any(weight.requires_grad for weight in fused.parameters(recurse=False))
        state = {name: fused._parameters.pop(name).detach() for name in list(fused._parameters)}
        self.fused_shapes = {name: tensor.shape for name, tensor in state.items()}
        self.split(state, "")
        for expert in range(self.experts):
            layers = {
                name: linear(state[f"{expert}.{name}.weight"], state.get(f"{expert}.{name}.bias")) for name in names
            }
            self.add_module(str(expert), nn.ModuleDict(layers).requires_grad_(learns))
        for name, child in fused.named_children():
            self.add_module(name, child)
        self.__dict__["fused"] = fused  # for its activation and gate; not a submodule, because it has no weights left
        self.register_state_dict_post_hook(SplitExperts.join)
        self.register_load_state_dict_pre_hook(SplitExperts.split)

    def __getattr__(self, name: str):
        """Also a fused parameter, without data: transformers asks for its shape when it saves some models."""
        if shape := self.__dict__.get("fused_shapes", {}).get(name):
            return nn.Parameter(torch.empty(shape, dtype=next(self.parameters()).dtype, device="meta"), False)
        return super().__getattr__(name)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden_size], top_k_* [tokens, k] -> [tokens, hidden_size]"""
        output = torch.zeros_like(hidden_states)
        # During training all experts are evaluated, so that unused ones have gradient 0 instead of none: several
        # processes must reduce the same gradients, and the prox must act on all weights.
        for expert in range(self.experts) if torch.is_grad_enabled() else top_k_index.unique().tolist():
            # rows in the order of transformers' loop: the rounding of a product depends on the position of a row
            choices, tokens = (top_k_index == expert).T.nonzero(as_tuple=True)
            expert_output = self.expert_output(expert, hidden_states[tokens]) * top_k_weights[tokens, choices, None]
            output.index_add_(0, tokens, expert_output.to(output.dtype))
        return output

    def expert_output(self, expert: int, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden_size] -> [tokens, hidden_size]"""
        up, down = self.get_submodule(str(expert)).values()
        activate = self.fused._apply_gate if self.fused.has_gate else self.fused.act_fn
        output = down(activate(up(hidden_states)))
        return self.fused.post_expert_norm(output) if self.normalizes else output

    def split(self, state: dict[str, Tensor], prefix: str, *_arguments_of_a_hook) -> None:
        """In a state_dict: replaces the tensors of all experts by views, one per expert."""
        for name, kind, fused_name in self.parts:
            if (tensor := state.pop(f"{prefix}{fused_name}", None)) is not None:
                weights = tensor.mT if kind == "weight" and self.transposed else tensor
                state.update({f"{prefix}{expert}.{name}.{kind}": part for expert, part in enumerate(weights)})

    def join(self, state: dict[str, Tensor], prefix: str, *_arguments_of_a_hook) -> None:
        """The inverse of `split`. The experts' parameters become views of the joined tensor, to save memory."""
        for name, kind, fused_name in self.parts:
            names = [f"{expert}.{name}.{kind}" for expert in range(self.experts)]
            if f"{prefix}{names[0]}" in state:
                for each in names:
                    del state[f"{prefix}{each}"]
                parameters = list(map(self.get_parameter, names))
                state[f"{prefix}{fused_name}"] = joined_(parameters, kind == "weight" and self.transposed)


@torch.no_grad()
def joined_(parameters: list[nn.Parameter], transposed: bool) -> Tensor:
    """Stacks the parameters into one tensor and makes them views of it; `transposed` swaps its last two dimensions."""
    tensor = torch.stack([parameter.data.mT if transposed else parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, tensor.mT if transposed else tensor, strict=True):
        parameter.data = part
    return tensor


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear with the given weight [out_features, in_features] and bias [out_features] or None."""
    out_features, in_features = weight.shape
    layer = nn.Linear(in_features, out_features, bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    layer.bias = None if bias is None else nn.Parameter(bias)
    return layer
