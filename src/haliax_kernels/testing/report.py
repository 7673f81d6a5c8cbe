# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What a check says: the error where a kernel is wrong, the report where it is not."""

from dataclasses import dataclass

from haliax_kernels.mesh import MeshAxes

Sharding = tuple[tuple[str, MeshAxes], ...]


class KernelCheckError(AssertionError):
    """A kernel is not what its policies, its backward or its reference say. The message says where, and what to do."""


@dataclass(frozen=True)
class Refused:
    """A sharding of one array axis that the kernel's plan refuses.

    Attributes:
        axis: the array axis.
        mesh_axes: the mesh axes that would shard it.
        kind: the exception class.
    """

    axis: str
    mesh_axes: MeshAxes
    kind: str


@dataclass(frozen=True)
class CheckReport:
    """What `check_kernel` did; `print` it to see.

    Attributes:
        kernel: the kernel's name.
        mesh: the mesh axes and their sizes.
        checked: the shardings that were run, as (array axis, mesh axes) pairs, those of one axis first.
        gradients: whether gradients were compared too.
        refused: the shardings of one axis that the plan refuses.
        unchecked: per array axis that may be sharded but was not, since no sharding of it was possible: why.
        notes: what else was checked, and what could not be compared.
    """

    kernel: str
    mesh: tuple[tuple[str, int], ...]
    checked: tuple[Sharding, ...]
    gradients: bool
    refused: tuple[Refused, ...]
    unchecked: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        what = "values and gradients" if self.gradients else "values (gradients were not asked for)"
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh)
        alone = sum(len(sharding) == 1 for sharding in self.checked)
        lines = [
            f"kernel {self.kernel!r} on mesh {mesh}: {counted(len(self.checked))} ({alone} of one axis alone) "
            f"and the unsharded call agree in {what}",
            f"sharded: {', '.join(dict.fromkeys(axis for s in self.checked for axis, _ in s))}",
        ]
        lines += [f"refused: {text}" for text in self._refused_texts()]
        lines += [f"UNCHECKED: axis {axis!r}: {why}" for axis, why in self.unchecked]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _refused_texts(self) -> list[str]:
        found: dict[tuple[str, str], int] = {}
        for r in self.refused:
            found[r.axis, r.kind] = found.get((r.axis, r.kind), 0) + 1
        return [f"{axis}: {count} x {kind}" for (axis, kind), count in found.items()]


def counted(shardings: int) -> str:
    """`1 sharding`, `2 shardings`."""
    return f"{shardings} sharding{'' if shardings == 1 else 's'}"


def sharding_text(sharding: Sharding) -> str:
    """`axis_mapping={'batch': 'a', 'pos': ('a', 'b')}`, as it would be passed."""
    return f"axis_mapping={as_mapping(sharding)}"


def as_mapping(sharding: Sharding) -> dict[str, str | MeshAxes]:
    """The sharding as an axis mapping."""
    return {axis: mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes for axis, mesh_axes in sharding}
