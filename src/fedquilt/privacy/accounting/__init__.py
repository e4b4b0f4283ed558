"""What Gaussian noise costs a client: exact figures, composition, calibration."""

from fedquilt.privacy.accounting.composition import METHODS, calibrate, epsilon
from fedquilt.privacy.accounting.gaussian import (
    classic_sigma,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_epsilon_many,
    gaussian_mu,
)
from fedquilt.privacy.accounting.release import Adjacency, PrivacyBound, Release

__all__ = [
    "METHODS",
    "Adjacency",
    "PrivacyBound",
    "Release",
    "calibrate",
    "classic_sigma",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_epsilon_many",
    "gaussian_mu",
]
