"""Configuration: one frozen record, readable from TOML, keyed as on the command line.

The dictionaries of the QuAP-FL API document (`HYPERPARAMETERS`, `TARGET_ACCURACY`, ...)
are here too, under their own names.
"""

from fedquilt.config.condense import CondenseConfig, package_names
from fedquilt.config.documents import (
    EXPECTED_MILESTONES,
    HYPERPARAMETERS,
    OUTPUT_CONFIG,
    PRESETS,
    PRIVACY_CONFIG,
    TARGET_ACCURACY,
    VISUALIZATION_CONFIG,
)
from fedquilt.config.files import (
    build_config,
    check_keys,
    plain_config,
    read_config_file,
    write_config_file,
)
from fedquilt.config.modes import DEFAULT_MODE, MODE_TABLE, MODES, Claim, Mode
from fedquilt.config.run import RunConfig, option_fields

__all__ = [
    "DEFAULT_MODE",
    "EXPECTED_MILESTONES",
    "HYPERPARAMETERS",
    "MODES",
    "MODE_TABLE",
    "OUTPUT_CONFIG",
    "PRESETS",
    "PRIVACY_CONFIG",
    "TARGET_ACCURACY",
    "VISUALIZATION_CONFIG",
    "Claim",
    "CondenseConfig",
    "Mode",
    "RunConfig",
    "build_config",
    "check_keys",
    "option_fields",
    "package_names",
    "plain_config",
    "read_config_file",
    "write_config_file",
]
