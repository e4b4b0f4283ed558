"""What the settings of a public front were chosen on, and how a statement says so.

A front is a fixed function of one image, but somebody set the size of its cells by
looking at how well labelled images could be told apart.  For clients who hold those very
images the choice is a release that no noise covers; for everybody else it is public.
"""

from __future__ import annotations

CHOSEN_ON: dict[str, tuple[str, ...]] = {
    # cells, orientations, block norm, power and shrink of the whitening
    "hog-linear": ("mnist",),
    # scale, projection to 256, and the same power and shrink
    "scatter-linear": ("mnist",),
    # steps, penalties and schedule of a certified condensation (held-out training images)
    "condensation": ("mnist", "cifar10"),
}
"""The data sets whose labels decided on defaults, by what they are defaults of."""

_SAME_IMAGES = {"mnist": ("mnist", "mnist-writers"), "cifar10": ("cifar10",)}
_TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
# Whoever passes data instead of a name may hold anything.
_UNKNOWN = "custom"


def choice_note(what: str, chosen_on: tuple[str, ...], dataset: str) -> str | None:
    """Return the note of a statement about settings chosen on data; None: on no data.

    >>> choice_note("settings", ("mnist",), "mnist-writers")
    'settings were chosen on MNIST, which these clients hold: that choice is not covered'
    >>> choice_note("settings", ("mnist",), "digits")
    'settings were chosen on MNIST; none of it is data of a client here'
    """
    if not chosen_on:
        return None
    titles = " and ".join(_TITLES[name] for name in chosen_on)
    held = " and ".join(_TITLES[name] for name in chosen_on if dataset in _SAME_IMAGES[name])
    if held:
        which = "which these clients hold" if held == titles else f"and these clients hold {held}"
        return f"{what} were chosen on {titles}, {which}: that choice is not covered"
    if dataset == _UNKNOWN:
        return (
            f"{what} were chosen on {titles}: if clients hold any of it, that choice is not covered"
        )
    return f"{what} were chosen on {titles}; none of it is data of a client here"
