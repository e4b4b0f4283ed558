"""The Dirichlet split: clients whose class mixtures differ, more so the smaller alpha."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from fedquilt import validate
from fedquilt.data.labels import (
    IndexArray,
    as_labels,
    check_num_clients,
    group_by_owner,
    samples_by_class,
)
from fedquilt.errors import InvalidValueError


def dirichlet_split(
    labels: object,
    num_clients: int,
    num_classes: int,
    alpha: float,
    rng: np.random.Generator | int | None = None,
) -> list[IndexArray]:
    """Divide samples among clients with class mixtures drawn from a Dirichlet distribution.

    Each client i draws a mixture p_i ~ Dirichlet(alpha * 1_K) over the K classes.  The
    n_k samples of class k are shuffled and cut at

        floor(n_k * sum_{j <= i} p_jk / sum_j p_jk),

    so that client i receives the share p_ik / sum_j p_jk of the class.  Every sample has
    one owner and each client's list is in random order.  Sizes are unequal, and a client
    can end with nothing: `fill_empty_clients` then gives it one sample of the largest
    client.

    Parameters
    ----------
    labels
        Class of each sample: tensor, array or list.
    num_clients
        Number of clients, at most the number of samples.
    num_classes
        K; labels are below it.
    alpha
        Concentration, > 0.  Large: all clients alike; small: few classes each.
    rng
        A generator, a seed, or None for fresh randomness.
    """
    targets = as_labels(labels)
    clients = check_num_clients(num_clients, len(targets))
    classes = validate.integer("num_classes", num_classes, at_least=1)
    concentration = validate.number("alpha", alpha, above=0)
    if targets.max() >= classes:
        raise InvalidValueError(f"labels must be < num_classes={classes}, got {targets.max()}")
    generator = _as_generator(rng)
    log_mixtures = log_dirichlet(concentration, (clients, classes), generator)
    owner = np.empty(len(targets), dtype=np.int64)
    for k, members in samples_by_class(targets, generator):
        owner[members] = np.repeat(
            np.arange(clients), _share_sizes(log_mixtures[:, k], len(members))
        )
    return fill_empty_clients(group_by_owner(owner, clients, generator))


def log_dirichlet(
    alpha: float, shape: tuple[int, int], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return the logarithm of rows drawn from Dirichlet(alpha * 1_K), shape [rows, K].

    A row is g / sum(g) with g_k ~ Gamma(alpha).  For small alpha all of g underflows to 0
    and the row becomes NaN, so g is drawn in logarithms: if g' ~ Gamma(alpha + 1) and
    E ~ Exp(1), then g' * exp(-E / alpha) ~ Gamma(alpha) (Marsaglia and Tsang 2000,
    section 6, with U = exp(-E)).
    """
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, size=shape))
    with np.errstate(over="ignore"):
        log_gamma -= rng.standard_exponential(size=shape) / alpha
    log_gamma = np.maximum(log_gamma, -1e308)  # keeps differences finite at any alpha
    log_gamma -= log_gamma.max(axis=1, keepdims=True)
    return np.asarray(log_gamma - np.log(np.exp(log_gamma).sum(axis=1, keepdims=True)))


def fill_empty_clients(clients: list[IndexArray]) -> list[IndexArray]:
    """Give each empty client, in order, the last sample of the client that is largest then.

    Of equally large clients the first gives.  There must be as many samples as clients.
    """
    filled = list(clients)
    empty = [i for i, samples in enumerate(clients) if len(samples) == 0]
    if not empty:
        return filled
    largest = [(-len(samples), i) for i, samples in enumerate(clients)]
    heapq.heapify(largest)
    for i in empty:
        size, donor = largest[0]
        filled[i], filled[donor] = filled[donor][-1:], filled[donor][:-1]
        heapq.heapreplace(largest, (size + 1, donor))
    return filled


def _as_generator(rng: np.random.Generator | int | None) -> np.random.Generator:
    if isinstance(rng, np.random.Generator):
        return rng
    return np.random.default_rng(None if rng is None else validate.integer("rng", rng, at_least=0))


def _share_sizes(log_shares: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Return how many of `count` samples each client gets for its unnormalised log share."""
    cumulative = np.cumsum(np.exp(log_shares - log_shares.max()))
    # Divided by its own last element it ends at exactly 1, and so does every element
    # after which nothing is left to give: no sample is lost to rounding.
    cuts = np.floor(cumulative / cumulative[-1] * count).astype(np.int64)
    sizes: npt.NDArray[np.int64] = np.diff(cuts, prepend=0)
    return sizes
