"""Trees of tensors: what a sample is made of, whatever its form.

A tree is a tensor, a tuple of trees, or a dictionary of trees under names; all tensors of
a tree have one leading dimension, the samples.  A model is called with a tensor as it is,
with a tuple as its arguments and with a dictionary as its keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Tree = torch.Tensor | tuple["Tree", ...] | dict[str, "Tree"]
"""A tensor, a tuple of trees, or a dictionary of trees."""


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree with their names, `outer.inner`; a bare tensor's is empty."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, part in items:
        yield from named_leaves(part, f"{name}.{key}" if name else str(key))


def leaves(tree: Tree) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for _, leaf in named_leaves(tree)]


def mapped(tree: Tree, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the tree of what `function` makes of each tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: mapped(part, function) for key, part in tree.items()}
    return tuple(mapped(part, function) for part in tree)


def mapped_by_name(
    tree: Tree, function: Callable[[str, torch.Tensor], torch.Tensor], name: str = ""
) -> Any:
    """Return the tree of what `function` makes of each tensor and its name."""
    if isinstance(tree, torch.Tensor):
        return function(name, tree)

    def below(key: object, part: Tree) -> Any:
        return mapped_by_name(part, function, f"{name}.{key}" if name else str(key))

    if isinstance(tree, dict):
        return {key: below(key, part) for key, part in tree.items()}
    return tuple(below(key, part) for key, part in enumerate(tree))


def take(tree: Tree, index: torch.Tensor | slice) -> Any:
    """Return the samples of an index."""
    if isinstance(tree, torch.Tensor):
        return tree[index]
    return mapped(tree, lambda tensor: tensor[index])


def length(tree: Tree) -> int:
    """Return the number of samples."""
    return len(tree) if isinstance(tree, torch.Tensor) else len(leaves(tree)[0])


def device_of(tree: Tree) -> torch.device:
    """Return the device that the samples lie on."""
    return tree.device if isinstance(tree, torch.Tensor) else leaves(tree)[0].device


def split(tree: Tree, size: int) -> Iterator[Any]:
    """Yield the samples in their order, `size` at a time."""
    for first in range(0, length(tree), size):
        yield take(tree, slice(first, first + size))


def concatenated(trees: Sequence[Tree]) -> Any:
    """Return the samples of trees of one structure, one after the other."""
    first = trees[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([tree for tree in trees if isinstance(tree, torch.Tensor)])
    if isinstance(first, dict):
        return {key: concatenated([tree[key] for tree in trees]) for key in first}  # type: ignore[call-overload,index]
    return tuple(concatenated([tree[place] for tree in trees]) for place in range(len(first)))  # type: ignore[index]


def structure(tree: Tree) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of one sample's tensors, by name."""
    return {name: (leaf.dtype, tuple(leaf.shape[1:])) for name, leaf in named_leaves(tree)}


def described(tree: Tree, *, typed: bool = False) -> str:
    """Return the shapes of one sample in words: `(20,)`, or `input_ids (20,), mask (20,)`."""
    kind = " of {}" if typed else ""
    leaves = ((name, tuple(x.shape[1:]), kind.format(x.dtype)) for name, x in named_leaves(tree))
    return ", ".join(f"{name} {shape}{of}".strip() for name, shape, of in leaves)


def call_with(function: Callable[..., Any], tree: Tree, **more: Any) -> Any:
    """Call a function with a tensor, with a tuple as its arguments or a dict as keywords."""
    if isinstance(tree, torch.Tensor):
        return function(tree, **more)
    if isinstance(tree, Mapping):
        return function(**tree, **more)
    return function(*tree, **more)


def arguments_of(tree: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a tree as positional arguments and keywords of a call."""
    if isinstance(tree, torch.Tensor):
        return (tree,), {}
    return ((), dict(tree)) if isinstance(tree, Mapping) else (tuple(tree), {})
