"""The version of fedquilt, read by the build and by `fedquilt --version`."""

__version__ = "0.1.0"
