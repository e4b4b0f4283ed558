"""The exceptions a user can catch."""

from fedquilt.common.errors import (
    DataError,
    DataNotFoundError,
    FedquiltError,
    InvalidValueError,
    MissingPackageError,
    NotReadyError,
    RunFolderError,
    RunInterrupted,
    StorageError,
)

__all__ = [
    "DataError",
    "DataNotFoundError",
    "FedquiltError",
    "InvalidValueError",
    "MissingPackageError",
    "NotReadyError",
    "RunFolderError",
    "RunInterrupted",
    "StorageError",
]
