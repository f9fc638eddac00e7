"""The loss of a window in parts."""

import torch
from torch.nn.functional import cross_entropy

from proxsparse.evaluation.perplexity import CHUNK, mean_loss


def test_the_loss_in_parts_is_that_of_all_logits_in_float32():
    for tokens in (1, CHUNK, 2 * CHUNK + 3):
        logits, targets = 5 * torch.randn(tokens, 11).bfloat16(), torch.randint(11, (tokens,))
        torch.testing.assert_close(mean_loss(logits, targets), cross_entropy(logits.float(), targets))
