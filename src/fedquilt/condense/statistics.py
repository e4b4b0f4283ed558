"""Looking at images through a feature model: means over groups."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from fedquilt.condense.augment import Transform
from fedquilt.condense.embeds import Embeds, embed_and_forward

BATCH = 512


@torch.no_grad()
def group_means(
    model: nn.Module,
    images: torch.Tensor,
    order: torch.Tensor,
    counts: torch.Tensor,
    *,
    transform: Transform | None = None,
    rows: torch.Tensor | None = None,
    with_logits: bool = True,
    batch_size: int = BATCH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean embedding [G, D] and the mean scores [G, K] of each group.

    Parameters
    ----------
    images
        All images; `order` picks from them.
    order : int64 [M]
        Samples, group after group; `counts` [G] says how many each has.
    transform, rows
        Augmentation, and for each sample of `order` the row of its parameters.
    with_logits
        Without them K is 0, and the scores are not computed.

    Samples go through the model in batches of `batch_size`, whatever groups they
    belong to; within a batch the sums are one matrix product with the 0/1 matrix of
    membership, which gives the same bits in every run, unlike atomic additions.
    """
    device = images.device
    groups = len(counts)
    counts = counts.to(device)
    members = torch.repeat_interleave(torch.arange(groups, device=device), counts)
    ends = members.cpu()
    features = logits = torch.zeros(groups, 0, device=device)
    for start in range(0, len(order), batch_size):
        part = slice(start, min(start + batch_size, len(order)))
        batch = images[order[part].to(device)]
        if transform is not None:
            batch = transform.apply(batch, None if rows is None else rows[part].to(device))
        if with_logits:
            embedded, scores = embed_and_forward(model, batch)
        else:
            embedded, scores = cast(Embeds, model).embed(batch), batch.new_zeros(len(batch), 0)
        if start == 0:
            features = embedded.new_zeros(groups, embedded.shape[1])
            logits = scores.new_zeros(groups, scores.shape[1])
        first, last = int(ends[part.start]), int(ends[part.stop - 1]) + 1
        here = torch.arange(first, last, device=device)[:, None] == members[part][None, :]
        features[first:last] += here.to(embedded) @ embedded
        logits[first:last] += here.to(scores) @ scores
    size = counts.to(features)[:, None]
    return features / size, logits / size
