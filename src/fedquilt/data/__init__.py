"""Data sets and how they are divided among clients.

>>> from fedquilt.data import load_dataset, split_clients
>>> import numpy as np
>>> train, test = load_dataset("digits")
>>> len(train), len(test), tuple(train.images.shape[1:])
(1442, 355, (1, 8, 8))
>>> clients = split_clients("iid", train.targets, 20, np.random.default_rng(0))
>>> sum(len(indices) for indices in clients)
1442
"""

from __future__ import annotations

from fedquilt.data.condensed import condensed_info, load_condensed, save_condensed
from fedquilt.data.files import (
    DatasetStatus,
    FileStatus,
    check_data_dir,
    data_folders,
    dataset_status,
)
from fedquilt.data.load import load_dataset
from fedquilt.data.samples import ImageDataset, Samples, as_dataset, as_samples, clients_data
from fedquilt.data.specs import DATASETS, ArchiveSpec, DatasetSpec, FileSpec, register_dataset
from fedquilt.data.split import (
    SPLITS,
    analyze_data_distribution,
    create_client_dataloaders,
    dirichlet_split,
    prepare_non_iid_data,
    read_split_file,
    split_clients,
)

__all__ = [
    "DATASETS",
    "SPLITS",
    "ArchiveSpec",
    "DatasetSpec",
    "DatasetStatus",
    "FileSpec",
    "FileStatus",
    "ImageDataset",
    "Samples",
    "analyze_data_distribution",
    "as_dataset",
    "as_samples",
    "check_data_dir",
    "clients_data",
    "condensed_info",
    "create_client_dataloaders",
    "data_folders",
    "dataset_status",
    "dirichlet_split",
    "load_condensed",
    "load_dataset",
    "prepare_non_iid_data",
    "read_split_file",
    "register_dataset",
    "save_condensed",
    "split_clients",
]
