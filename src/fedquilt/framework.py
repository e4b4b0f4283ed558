"""The classes of the QuAP-FL documents, under the name of their module."""

from fedquilt.quapfl.server import (
    AdaptivePrivacyAllocator,
    ParticipationTracker,
    QuantileClipper,
    QuAPFLServer,
)

__all__ = ["AdaptivePrivacyAllocator", "ParticipationTracker", "QuAPFLServer", "QuantileClipper"]
