# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The old `haliax` and `levanter` distributions share the import names: importing beside them fails, and says so."""

import subprocess
import sys

import pytest

from haliax_kernels import distributions


def test_what_is_installed_here_is_fine():
    distributions.refuse_old_distributions()


def test_an_old_distribution_stops_the_import(tmp_path):
    old = tmp_path / "haliax-1.3.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: haliax\nVersion: 1.3\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import haliax_kernels"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    for part in ("haliax 1.3", "marin-haliax", "pip uninstall -y haliax"):
        assert part in message


def test_the_message_names_both(monkeypatch):
    monkeypatch.setattr(distributions, "installed_version", {"haliax": "1.3", "levanter": "1.2"}.get)
    with pytest.raises(ImportError, match=r"haliax 1\.3, levanter 1\.2.*marin-haliax, marin-levanter"):
        distributions.refuse_old_distributions()
