"""The classes of the QuAP-FL API document, section Framework, under its module's name."""

from fedquilt.papers.quapfl import (
    AdaptivePrivacyAllocator,
    ParticipationTracker,
    QuantileClipper,
    QuAPFLServer,
)

__all__ = ["AdaptivePrivacyAllocator", "ParticipationTracker", "QuAPFLServer", "QuantileClipper"]
