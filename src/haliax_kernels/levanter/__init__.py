# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter: `model.attn_backend: pallas_flash`, the `kernels:` block of a config, and the launcher.

Importing this package imports neither Levanter nor Draccus, so that the launcher can set the platform first.
"""

from haliax_kernels.levanter.config import KernelsConfig as KernelsConfig
from haliax_kernels.levanter.config import KernelsConfigError as KernelsConfigError
from haliax_kernels.levanter.config import current_options as current_options
from haliax_kernels.levanter.config import set_options as set_options
from haliax_kernels.levanter.config import use_options as use_options


def register() -> str:
    """Makes `pallas_flash` an attention backend of Levanter; see `haliax_kernels.levanter.backend.register`."""
    from haliax_kernels.levanter import backend

    return backend.register()
