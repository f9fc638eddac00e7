"""What the masks do while they are learned, measured on a fixed sample of blocks so that it costs next to nothing."""

import torch
from torch import Tensor, nn

from proxsparse.masked import learned_weight, pretrained_weight, ranking
from proxsparse.patterns import NMPattern
from proxsparse.reference import nm_mask

BLOCKS_PER_LAYER = 1024
SNAPSHOTS = 20


class MaskMonitor:
    """Follows evenly spaced blocks of the learned weights: are they N:M, does their mask change, how far from W0?

    `signed`: they are ranked by c * w * sign(W0), as under `masked.MaskedWeight`, instead of by |c * w|.
    """

    def __init__(
        self,
        layers: dict[str, nn.Linear],
        pattern: NMPattern,
        metric: dict[str, Tensor],
        steps: int,
        signed: bool = False,
    ):
        weights = {name: learned_weight(layer) for name, layer in layers.items()}
        self.weights, self.pattern, self.signed = list(weights.values()), pattern, signed
        self.stride = [max(1, weight.numel() // pattern.m // BLOCKS_PER_LAYER) for weight in self.weights]
        ones = {name: weight.new_ones(weight.shape[-1]) for name, weight in weights.items()}
        self.scale = self._sample([(metric or ones)[name].expand_as(weight) for name, weight in weights.items()])
        self.pretrained = self._sample([pretrained_weight(layer).detach() for layer in layers.values()])
        self.mask = self._current_mask(self._weights())
        self.every = max(1, steps // SNAPSHOTS)
        self.snapshots: list[tuple[int, Tensor]] = [(0, self.mask)]

    def _sample(self, weights: list[Tensor]) -> Tensor:
        """One tensor [sampled blocks, m] of all layers, fp32 on the CPU."""
        sampled = []
        for weight, stride in zip(weights, self.stride, strict=True):
            blocks_per_row = weight.shape[-1] // self.pattern.m
            index = torch.arange(0, weight.shape[0] * blocks_per_row, stride, device=weight.device)
            sampled.append(self.pattern.blocks(weight)[index // blocks_per_row, index % blocks_per_row].float().cpu())
        return torch.cat(sampled)

    def _weights(self) -> Tensor:
        return self._sample([weight.detach() for weight in self.weights])

    def _current_mask(self, weights: Tensor) -> Tensor:
        return nm_mask(ranking(weights, self.scale, self.pretrained if self.signed else None), self.pattern)

    def observe(self, step: int) -> dict[str, float]:
        """feasible_share, mask_change since the last call, norm_gap of the kept weights; remembers some masks."""
        weights = self._weights()
        mask = self._current_mask(weights)
        kept = mask & (self.pretrained != 0)
        row = {
            "feasible_share": self.pattern.feasible_blocks(weights).float().mean().item(),
            "mask_change": (mask != self.mask).float().mean().item(),
            "norm_gap": ((weights - self.pretrained)[kept].norm() / self.pretrained[kept].norm()).item(),
        }
        self.mask = mask
        if step % self.every == 0:
            self.snapshots.append((step, mask))
        return row

    def similarity(self) -> list[dict[str, float]]:
        """Share of mask bits equal to the last mask, at every remembered step."""
        return [{"step": step, "to_final": (mask == self.mask).float().mean().item()} for step, mask in self.snapshots]


def feasible_share(layers: dict[str, nn.Linear], pattern: NMPattern) -> float:
    """Share of the learned weights' blocks that are N:M by themselves, over all layers, exact."""
    weights = [learned_weight(layer).detach() for layer in layers.values()]
    shares = [(pattern.feasible_blocks(weight).sum().item(), weight.numel() // pattern.m) for weight in weights]
    return sum(feasible for feasible, _ in shares) / sum(blocks for _, blocks in shares)


def agreement(masks: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Share of mask bits that are equal in two sets of masks of the same layers."""
    equal = sum((mask == others[name]).sum().item() for name, mask in masks.items())
    return equal / sum(mask.numel() for mask in masks.values())
