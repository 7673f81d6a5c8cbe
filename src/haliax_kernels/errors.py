# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One exception class per kind of mistake. Every message says what was found, where it came from, and the ways out."""

from collections.abc import Sequence


class NamedKernelError(ValueError):
    """Base of all refusals of this package."""


class SignatureError(NamedKernelError):
    """The signature of a kernel cannot be read. Raised when the decorator runs."""


class PolicyError(NamedKernelError):
    """A policy that cannot be, such as `Parallel` on an axis that an output lacks. Raised when the decorator runs."""


class ArgumentError(NamedKernelError):
    """An argument of a kind that the kernel's signature does not allow."""


class BindingError(NamedKernelError):
    """A core axis that cannot be bound to an array axis: missing, doubled or unknown."""


class AxisSizeError(NamedKernelError):
    """One axis with two sizes."""


class ShardedAxisError(NamedKernelError):
    """An axis that the kernel needs whole on every device is sharded."""


class ManualAxisError(ShardedAxisError):
    """An axis that the kernel needs whole is mapped to a mesh axis that an enclosing `shard_map` made manual."""


class UnevenShardingError(NamedKernelError):
    """The size of an axis is no multiple of the number of shards."""


class MeshAxisConflictError(NamedKernelError):
    """One mesh axis is asked to shard two axes."""


class UnknownMeshAxisError(NamedKernelError):
    """An axis is mapped to a mesh axis that the mesh does not have."""


class InconsistentShardingError(NamedKernelError):
    """Two arguments have the same axis sharded in different ways."""


class MultipleOfError(NamedKernelError):
    """The local size of an axis breaks the kernel's `multiple_of`."""


class MissingShardingError(NamedKernelError):
    """Under `jit`, with a mesh of several devices, nothing says how the arguments are sharded."""


class OutputError(NamedKernelError):
    """What the kernel returned is not what its signature says."""


class TransformError(NamedKernelError):
    """A JAX transformation that a named kernel does not support, or a tracer that the kernel closed over."""


class UnsupportedOptionError(NamedKernelError, NotImplementedError):
    """An option that the chosen implementation cannot honour."""


class NoImplementationError(ExceptionGroup, UnsupportedOptionError):
    """No implementation can run the call; holds one exception per implementation, each with its reasons."""

    def __str__(self) -> str:
        return self.message + "".join(f"\n  - {e}" for e in self.exceptions)


def mesh_axes_text(mesh_axes: Sequence[str], sizes: dict[str, int]) -> str:
    """`mesh axis 'context' (4 devices)` or `mesh axes 'data' and 'model' (2 x 4 devices)`."""
    names = " and ".join(repr(m) for m in mesh_axes)
    count = " x ".join(str(sizes.get(m, "?")) for m in mesh_axes)
    plural = "es" if len(mesh_axes) > 1 else "is"
    return f"mesh ax{plural} {names} ({count} devices)"


def axis_text(array_axis: str, core: str | None) -> str:
    """`axis 'position' (its 'k_pos')`, or `axis 'position'` where both names agree or the axis is a loop axis."""
    return f"axis {array_axis!r}" + (f" (its {core!r})" if core is not None and core != array_axis else "")


def ways_out(*ways: tuple[str, str] | None) -> str:
    """The remedies, one a line, each `- what it does:    code`."""
    given = [w for w in ways if w is not None]
    width = max(len(what) for what, _ in given) + 1
    return "".join(f"\n  - {what + ':':<{width}}  {code}" for what, code in given)


def bytes_text(n: int) -> str:
    """`512 B`, `33.6 MB`, `1.1 GB` (powers of ten)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
