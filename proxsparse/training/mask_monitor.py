"""Statistics of the masks during training, measured on a fixed sample of blocks to keep the cost low."""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from proxsparse.reference import mask_score, nm_mask
from proxsparse.runtime.sharding import first_row, local, sum_of_shards
from proxsparse.training.learnable_layer import LearnableLayer

BLOCKS_PER_LAYER = 1024
SNAPSHOTS = 20


class LayersSample:
    """Evenly spaced blocks of layers of one kind (pattern, scaled, masked), [blocks, m], all on one device.

    Every process of a sharded model holds the whole sample.
    """

    def __init__(self, layers: list[LearnableLayer]):
        self.layers, self.pattern, self.first = layers, layers[0].pattern, layers[0].weight
        self.device = local(self.first).device
        sizes, indices, self.places = zip(*map(sampled_weights, layers), strict=True)
        starts, self.size = itertools.accumulate(sizes, initial=0), sum(sizes)
        self.index = torch.cat([start + own for start, own in zip(starts, indices, strict=False)]).to(self.device)
        scaled = layers[0].scale is not None
        self.scale = self.sample(each.scale.expand(each.pretrained.shape) for each in layers) if scaled else None
        self.pretrained = self.sample(each.own_pretrained() for each in layers)

    def sample(self, weights: Iterable[Tensor]) -> Tensor:
        """The sampled blocks, fp32; `weights`: the local rows of each layer."""
        parts = [weight.take(places).to(self.device) for weight, places in zip(weights, self.places, strict=True)]
        sample = torch.zeros(self.size, self.pattern.m, dtype=torch.float32, device=self.device)
        sample.index_copy_(0, self.index, torch.cat(parts).float())  # the other processes have the other blocks
        return sum_of_shards(sample, self.first)

    def learned(self) -> Tensor:
        """The learned weights."""
        return self.sample(local(each.weight).detach() for each in self.layers)

    def mask_of(self, weights: Tensor) -> Tensor:
        """The mask of the learned weights."""
        signs = self.pretrained if self.layers[0].masked else None
        return nm_mask(mask_score(weights, self.scale, signs), self.pattern)


class MaskMonitor:
    """Observes a sample of the learned weights: share of N:M blocks, mask changes, distance from W0.

    Everything is computed on the device of the weights, for all layers of a kind at once, because a small operation
    costs a GPU's host more time than the GPU.
    """

    def __init__(self, learned: Iterable[LearnableLayer], steps: int):
        kinds: dict[tuple, list[LearnableLayer]] = {}
        for each in learned:
            kinds.setdefault((each.pattern, each.scale is None, each.masked), []).append(each)
        self.samples = list(map(LayersSample, kinds.values()))
        self.pretrained = self._joined([sample.pretrained for sample in self.samples])
        self.mask = self._joined([sample.mask_of(sample.learned()) for sample in self.samples])
        self.every = max(1, steps // SNAPSHOTS)
        self.snapshots: list[tuple[int, Tensor]] = [(0, self.mask)]

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        """The concatenation of the flattened tensors, one for each kind."""
        return torch.cat([tensor.flatten().to(self.samples[0].device) for tensor in tensors])

    def measures(self, step: int) -> bool:
        """Whether the mask after this step is stored."""
        return step % self.every == 0

    def observe(self, step: int) -> dict[str, float]:
        """feasible_share, mask_change since the last call, norm_gap of the kept weights; also stores some masks.

        The host waits once for the device.
        """
        learned, masks, feasible = [], [], []
        for sample in self.samples:
            learned.append(sample.learned())
            masks.append(sample.mask_of(learned[-1]))
            feasible.append(sample.pattern.feasible_blocks(learned[-1]))
        mask = self._joined(masks)
        kept = mask & (self.pretrained != 0)
        norms = [each.where(kept, 0).norm() for each in (self._joined(learned) - self.pretrained, self.pretrained)]
        shares = [each.float().mean() for each in (self._joined(feasible), mask != self.mask)]
        feasible_share, mask_change, gap, size = torch.stack([*shares, *norms]).tolist()
        self.mask = mask
        if self.measures(step):
            self.snapshots.append((step, mask))
        norm_gap = gap / size if size else 0.0
        return {"feasible_share": feasible_share, "mask_change": mask_change, "norm_gap": norm_gap}

    def tensors(self) -> dict[str, Tensor]:
        """Name in a checkpoint -> tensor."""
        return {"monitor.mask": self.mask, "monitor.snapshots": torch.stack([mask for _, mask in self.snapshots])}

    def facts(self) -> dict:
        """What else a checkpoint saves, as JSON."""
        return {"snapshots": [step for step, _ in self.snapshots]}

    def restore_(self, tensors: dict[str, Tensor], facts: dict) -> None:
        """Takes over what a checkpoint has saved."""
        device = self.samples[0].device
        self.mask = tensors["monitor.mask"].to(device)
        self.snapshots = list(zip(facts["snapshots"], tensors["monitor.snapshots"].to(device), strict=True))

    def similarity(self) -> list[dict[str, float]]:
        """Share of mask bits equal to those of the last logged step, for every stored mask."""
        steps, masks = zip(*self.snapshots, strict=True)
        shares = torch.stack([(mask == self.mask).float().mean() for mask in masks]).tolist()
        return [{"step": step, "to_final": share} for step, share in zip(steps, shares, strict=True)]


def sampled_weights(each: LearnableLayer) -> tuple[int, Tensor, Tensor]:
    """Number of sampled blocks of a layer; of those in this process the index in the sample [b], and where their
    weights are in the local rows, counted along the rows, [b, m] on their device.

    Computed on the CPU, because a boolean index on a GPU makes the host wait.
    """
    weight, shape, m = local(each.weight), each.weight.shape, each.pattern.m
    blocks, of_row = each.pattern.count(shape), shape[-1] // m
    index = torch.arange(0, blocks, max(1, blocks // BLOCKS_PER_LAYER))
    start = index // of_row * shape[-1] + index % of_row * m - first_row(each.weight) * shape[1:].numel()
    own = ((start >= 0) & (start < weight.numel())).nonzero().flatten()
    return len(index), own, (start[own, None] + torch.arange(m)).to(weight.device)


def feasible_share(learned: Iterable[LearnableLayer]) -> float:
    """Exact share of N:M blocks in all learned weights, sharded or not."""
    learned = list(learned)
    counts = [
        sum_of_shards(layer.pattern.feasible_blocks(local(layer.weight)).sum(), layer.weight) for layer in learned
    ]
    return sum(count.item() for count in counts) / sum(layer.pattern.count(layer.weight.shape) for layer in learned)


def agreement(masks: dict[str, Tensor], others: dict[str, Tensor], learned: dict[str, LearnableLayer]) -> float:
    """Share of equal bits in two sets of masks of the learned layers: the rows of this process, if they are sharded."""
    equal = [sum_of_shards((masks[name] == others[name]).sum(), layer.weight) for name, layer in learned.items()]
    return sum(count.item() for count in equal) / sum(layer.weight.numel() for layer in learned.values())
