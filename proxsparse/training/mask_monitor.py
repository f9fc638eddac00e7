"""Statistics of the masks during training, measured on a fixed sample of blocks to keep the cost low."""

from collections.abc import Iterable

import torch
from torch import Tensor

from proxsparse.reference import mask_score, nm_mask
from proxsparse.runtime.sharding import first_row, local, sum_of_shards
from proxsparse.training.learnable_layer import LearnableLayer

BLOCKS_PER_LAYER = 1024
SNAPSHOTS = 20


class MaskMonitor:
    """Observes evenly spaced blocks of the learned weights: share of N:M blocks, mask changes, distance from W0.

    The mask is that of `learnable_layer.mask_score`. Every process of a sharded model holds the whole sample.
    """

    def __init__(self, learned: Iterable[LearnableLayer], steps: int):
        self.learned = list(learned)
        self.places = [sampled_places(each) for each in self.learned]
        ones = [torch.ones(1, device=local(each.weight).device) for each in self.learned]
        scales = [one if each.scale is None else each.scale for each, one in zip(self.learned, ones, strict=True)]
        self.scale = self._sample(c.expand(each.pretrained.shape) for c, each in zip(scales, self.learned, strict=True))
        self.pretrained = self._sample(each.own_pretrained() for each in self.learned)
        self.mask = self._current_mask(self._weights())
        self.every = max(1, steps // SNAPSHOTS)
        self.snapshots: list[tuple[int, Tensor]] = [(0, self.mask)]

    def _sample(self, rows: Iterable[Tensor]) -> list[Tensor]:
        """The sampled blocks of every layer, [blocks, m], fp32 on the CPU. `rows`: the local rows of each layer.

        All samples are copied together, so the host waits for the GPU only once.
        """
        sampled = []
        for each, (count, here, row, column), held in zip(self.learned, self.places, rows, strict=True):
            of_row = each.pattern.blocks(held).flatten(1, -2)  # [rows, blocks of a row, m], also for stacked weights
            values = torch.zeros(count, each.pattern.m, dtype=torch.float32, device=held.device)
            values[here] = of_row[row, column].float()
            sampled.append(sum_of_shards(values, each.weight))
        flat = torch.cat([values.flatten().to(sampled[0].device) for values in sampled]).cpu()
        parts = flat.split([values.numel() for values in sampled])
        return [part.view(values.shape) for part, values in zip(parts, sampled, strict=True)]

    def _weights(self) -> list[Tensor]:
        return self._sample(local(each.weight).detach() for each in self.learned)

    def _current_mask(self, weights: list[Tensor]) -> Tensor:
        """The current mask of the sample, all layers concatenated."""
        sample = zip(self.learned, weights, self.scale, self.pretrained, strict=True)
        return concatenate(
            nm_mask(mask_score(w, c, w0 if each.masked else None), each.pattern) for each, w, c, w0 in sample
        )

    def measures(self, step: int) -> bool:
        """Whether the mask after this step is stored."""
        return step % self.every == 0

    def observe(self, step: int) -> dict[str, float]:
        """feasible_share, mask_change since the last call, norm_gap of the kept weights; also stores some masks."""
        weights = self._weights()
        mask, pretrained = self._current_mask(weights), concatenate(self.pretrained)
        feasible = concatenate(each.pattern.feasible_blocks(w) for each, w in zip(self.learned, weights, strict=True))
        kept = mask & (pretrained != 0)
        gap = (concatenate(weights) - pretrained)[kept].norm() / pretrained[kept].norm()
        row = {
            "feasible_share": feasible.float().mean().item(),
            "mask_change": (mask != self.mask).float().mean().item(),
            "norm_gap": gap.item() if kept.any() else 0.0,
        }
        self.mask = mask
        if self.measures(step):
            self.snapshots.append((step, mask))
        return row

    def tensors(self) -> dict[str, Tensor]:
        """Name in a checkpoint -> tensor."""
        return {"monitor.mask": self.mask, "monitor.snapshots": torch.stack([mask for _, mask in self.snapshots])}

    def facts(self) -> dict:
        """What else a checkpoint saves, as JSON."""
        return {"snapshots": [step for step, _ in self.snapshots]}

    def restore_(self, tensors: dict[str, Tensor], facts: dict) -> None:
        """Takes over what a checkpoint has saved."""
        self.mask = tensors["monitor.mask"]
        self.snapshots = list(zip(facts["snapshots"], tensors["monitor.snapshots"], strict=True))

    def similarity(self) -> list[dict[str, float]]:
        """Share of mask bits equal to those of the last logged step, for every stored mask."""
        return [{"step": step, "to_final": (mask == self.mask).float().mean().item()} for step, mask in self.snapshots]


def sampled_places(each: LearnableLayer) -> tuple[int, Tensor, Tensor, Tensor]:
    """Number of sampled blocks of a layer; index in the sample, local row and column of those in this process.

    int64 on the device of the weight; computed on the CPU, because a boolean index on a GPU makes the host wait.
    """
    rows, of_row = len(local(each.weight)), each.pattern.count(each.weight.shape[1:])
    blocks = len(each.weight) * of_row
    index = torch.arange(0, blocks, max(1, blocks // BLOCKS_PER_LAYER))
    row, column = index // of_row - first_row(each.weight), index % of_row
    here = ((row >= 0) & (row < rows)).nonzero().flatten()
    places = (tensor.to(local(each.weight).device) for tensor in (here, row[here], column[here]))
    return (len(index), *places)


def concatenate(tensors: Iterable[Tensor]) -> Tensor:
    """The concatenation of the flattened tensors."""
    return torch.cat([tensor.flatten() for tensor in tensors])


@torch.no_grad()
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
