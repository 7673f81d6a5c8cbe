# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Refuse the old `haliax` and `levanter` distributions, which overwrite the import names of the maintained ones."""

from __future__ import annotations

from importlib import metadata

_MAINTAINED = {"haliax": "marin-haliax", "levanter": "marin-levanter"}


class DistributionError(ImportError):
    """A distribution is missing, or one that is no longer maintained is installed."""


def refuse_old_distributions() -> None:
    """Checks that `levanter` and `haliax` can only come from the maintained distributions.

    Raises:
        DistributionError: If an old distribution is installed.
    """
    old = {name: version for name in _MAINTAINED if (version := installed_version(name)) is not None}
    if old:
        found = ", ".join(f"{name} {version}" for name, version in old.items())
        wanted = ", ".join(_MAINTAINED[name] for name in old)
        raise DistributionError(
            f"found the old distribution {found}, which shares its import name with {wanted}: which of the two is "
            f"imported is chance. Repair it with: pip uninstall -y {' '.join(old)} && pip install --force-reinstall "
            f"--no-deps {' '.join(_MAINTAINED[name] for name in old)}"
        )


def require_levanter() -> None:
    """Checks that Levanter is there.

    Raises:
        DistributionError: If `marin-levanter` is not installed.
    """
    if installed_version("marin-levanter") is None:
        raise DistributionError("Levanter is not installed. Install it with: pip install 'haliax-kernels[levanter]'")


def require_matplotlib() -> None:
    """Checks that matplotlib is there.

    Raises:
        DistributionError: If `matplotlib` is not installed.
    """
    if installed_version("matplotlib") is None:
        raise DistributionError(
            "Pictures need matplotlib, which is not installed. Install it with: pip install 'haliax-kernels[pictures]'"
        )


def installed_version(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
