"""How far the synthetic set is from the statistics.

For class c with mean embedding f and mean scores z of its synthetic images, and
groups j with means F_j, Z_j and weights w_j (counts, scaled to sum 1),

    avg-loss   |f - sum_j w_j F_j|^2 + l(z, sum_j w_j Z_j)
    loss-avg   sum_j w_j ( |f - F_j|^2 + l(z, Z_j) )

summed over classes.  With p = softmax(z), q = softmax(Z), l is one of

| name | l(z, Z) |
|---|---|
| l2 | sum_k (z_k - Z_k)^2 |
| kl | KL(q || p) = sum_k q_k (log q_k - log p_k) |
| wasserstein | W1(p, q) for the ground metric d(a, b) = 1 where a != b: sum_k |p_k - q_k| / 2 |
| wasserstein_sorted | sum_k |P_k - Q_k|, P and Q cumulative sums of p and q each sorted ascending |
| none | 0 |

Classes have no order, so the 0/1 metric is the one that treats them alike; its
1-Wasserstein distance is the total variation.  `wasserstein_sorted` is what the
reference implementation calls Wasserstein: it compares how peaked two distributions
are and not where, so that certainty of class 0 and certainty of class 5 are at
distance 0.  It is kept for comparison.

For the squared terms both forms have the same gradient: they differ by the variance
of the groups, which no image can change.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from fedquilt import validate

LOGIT_LOSSES = ("l2", "kl", "wasserstein", "wasserstein_sorted", "none")
COMPUTATIONS = ("avg-loss", "loss-avg")


def logit_distance(kind: str, z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return l(z, Z) along the last axis; the leading axes broadcast."""
    validate.choice("logit_loss_type", kind, LOGIT_LOSSES)
    if kind == "none":
        return (0 * (z - target)).sum(dim=-1)
    if kind == "l2":
        return (z - target).square().sum(dim=-1)
    if kind == "kl":
        log_p, log_q = functional.log_softmax(z, dim=-1), functional.log_softmax(target, dim=-1)
        return (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    p, q = functional.softmax(z, dim=-1), functional.softmax(target, dim=-1)
    if kind == "wasserstein":
        return (p - q).abs().sum(dim=-1) / 2
    gap = p.sort(dim=-1).values.cumsum(dim=-1) - q.sort(dim=-1).values.cumsum(dim=-1)
    return gap.abs().sum(dim=-1)


def matching_loss(
    f: torch.Tensor,
    z: torch.Tensor,
    features: torch.Tensor,
    logits: torch.Tensor,
    weights: torch.Tensor,
    *,
    logit_loss_type: str = "none",
    loss_computation: str = "avg-loss",
) -> torch.Tensor:
    """Return the loss of each class, [P].

    Parameters
    ----------
    f, z : [P, D], [P, K]
        Means over the synthetic images of each class.
    features, logits : [P, S, D], [P, S, K]
        Means over groups of real images.
    weights : [P, S]
        Weight of each group; rows sum to 1, and a place without a group has 0.
    """
    validate.choice("loss_computation", loss_computation, COMPUTATIONS)
    if loss_computation == "avg-loss":
        features = (weights[..., None] * features).sum(dim=1, keepdim=True)
        logits = (weights[..., None] * logits).sum(dim=1, keepdim=True)
        weights = weights.new_ones(len(weights), 1)
    apart = (f[:, None] - features).square().sum(dim=-1)
    if logit_loss_type != "none":
        apart = apart + logit_distance(logit_loss_type, z[:, None], logits)
    return (weights * apart).sum(dim=1)
