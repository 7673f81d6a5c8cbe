# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The table of what is checked with what, which is a page of the documentation, is that of the suites."""

import importlib
import pathlib

from attention import test_contract as contract
from context import test_attention as sharded

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "attention_conformance.md"


def table() -> str:
    """Options by implementation and by sharding, from the suites' own cases."""
    columns = [*contract.IMPLEMENTATIONS, "ring", "zigzag", "allgather", "ulysses"]
    rows = []
    for option in contract.OPTIONS:
        dtypes = "float32, bfloat16" if option in contract.BFLOAT16 else "float32"
        rows.append([option, *([dtypes] * len(contract.IMPLEMENTATIONS)), "", "", "", ""])
    for feature in sharded.FEATURES:
        refused = feature in ("mask", "bias")
        cells = ["float32"] * 3 + ["refused" if refused else "float32"]
        rows.append([f"{feature}, sequence sharded", *[""] * len(contract.IMPLEMENTATIONS), *cells])
    lines = [f"| option | {' | '.join(f'`{c}`' for c in columns)} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(), f"write this into {PAGE.name}:\n{table()}"


def test_every_implementation_is_in_the_suite():
    backends = importlib.import_module("haliax_kernels.attention.backends")
    names = {i.name for i in backends.IMPLEMENTATIONS if "bias" in i.honours}
    assert names == set(contract.IMPLEMENTATIONS)
