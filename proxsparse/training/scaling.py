"""Scaling of the weights by their input activations, so that their size measures their effect on the output."""

from contextlib import ExitStack
from itertools import islice

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import single_samples
from proxsparse.models.checks import check_finite, evaluating
from proxsparse.models.feature_norms import FeatureNorms, make_hook
from proxsparse.runtime.distributed import all_reduce_sum_, shard_items, world_size
from proxsparse.runtime.progress import phase
from proxsparse.runtime.sharding import local, mean_of_shards

# Lower bound of a feature's norm, as a share of the mean norm; it bounds the step lr / c of a dead feature.
DEAD_FEATURE = 1e-4


@torch.no_grad()
def activation_scaling(
    model: nn.Module, layers: dict[str, nn.Linear], batches: list[dict[str, Tensor]], samples: int
) -> dict[str, Tensor]:
    """c_j = ||X_j||_2 / mean_{i,k}(|W0_ik| ||X_k||_2) for every input feature j of every layer; mean |c * W0| is 1.

    X are the layer's inputs over the first `samples` calibration samples in the dense model. v = c * w is Wanda's score
    with the sign, normalized. AdamW and the prox on v select weights by their effect on the output instead of their
    magnitude, and lambda_1 and the learning rate are dimensionless.

    Returns:
        layer name -> c, fp32 [in_features], positive, on the layer's device.
    Raises:
        InputError: inputs of a layer are not finite; names the layer.
    """
    found = {name: FeatureNorms(layer, local(layer.weight).device) for name, layer in layers.items()}
    inputs = list(islice(single_samples(batches), samples))
    with evaluating(model), phase("measuring the input activations", len(inputs), "sample") as current:
        for ids, counted in shard_items(inputs):
            with ExitStack() as hooks:
                for name, layer in layers.items() if counted else ():  # another process counts the other samples
                    hooks.enter_context(layer.register_forward_pre_hook(make_hook(found[name])))
                model(input_ids=ids.to(model.device), use_cache=False)
            current.step(world_size())
    for name, norms in found.items():
        check_finite(name, all_reduce_sum_(norms.sums))
    return {name: normalized_scale(layers[name].weight, norms.norms().float()) for name, norms in found.items()}


def normalized_scale(weight: Tensor, norms: Tensor) -> Tensor:
    """norms / mean(|W| * norms), with norms of at least DEAD_FEATURE * mean(norms); [in_features]."""
    norms, sizes = norms.clamp_min(DEAD_FEATURE * norms.mean()), local(weight).float().abs()
    scale = norms / mean_of_shards(sizes * norms, weight)
    if bool((scale.isfinite() & (scale > 0)).all()):
        return scale
    # No token reached the layer (an unused expert), or its weights are zero: all features get the same scale.
    return torch.full_like(norms, 1.0) / mean_of_shards(sizes, weight).clamp_min(torch.finfo(torch.float32).tiny)
