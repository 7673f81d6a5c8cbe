# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Bind core axes to array axes: by name, or as `axes=` says; and find the loop axes."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from haliax import Axis, AxisSelector

from haliax_kernels.arguments import ArrayInfo
from haliax_kernels.errors import ArgumentError, AxisSizeError, BindingError
from haliax_kernels.signature import KernelSignature

AxisBinding = AxisSelector | Sequence[AxisSelector]
FrozenAxes = tuple[tuple[str, tuple[tuple[str, int | None], ...]], ...]


def freeze_axes(axes: Mapping[str, AxisBinding], signature: KernelSignature, kernel: str) -> FrozenAxes:
    """`axes=` in a hashable form: per core axis, (name, expected size or None) of each array axis.

    Raises:
        BindingError: for a key that is no core axis, or one array axis twice in one core axis.
    """
    frozen = []
    for core, selection in axes.items():
        if core not in signature.core_axes:
            near = difflib.get_close_matches(core, signature.core_axes, 1)
            raise BindingError(
                f"kernel {kernel!r}: axes= binds {core!r}, which is not one of its core axes "
                f"({', '.join(signature.core_axes) or 'none'})" + (f"; did you mean {near[0]!r}?" if near else ".")
            )
        parts = (selection,) if isinstance(selection, str | Axis) else tuple(selection)
        entries = tuple((p, None) if isinstance(p, str) else (p.name, p.size) for p in parts)
        names = [n for n, _ in entries]
        if len(set(names)) < len(names):
            raise BindingError(f"kernel {kernel!r}: axes= binds {core!r} to {names}, which holds an array axis twice.")
        frozen.append((core, entries))
    return tuple(frozen)


@dataclass(frozen=True)
class Bound:
    """The bindings of one call.

    Attributes:
        names: the array axes of each core axis.
        loop_axes: the loop axes in order of first appearance, with their sizes.
        roles: per array and dimension, (array axis name, core axis or None, is a loop axis).
        given: the sizes that `axes=` gave, by (core axis, array axis).
    """

    names: dict[str, tuple[str, ...]]
    loop_axes: dict[str, int]
    roles: tuple[tuple[tuple[str, str | None, bool], ...], ...]
    given: dict[tuple[str, str], int]


def bind(signature: KernelSignature, axes: FrozenAxes, infos: Sequence[ArrayInfo], kernel: str) -> Bound:
    """Bind the axes of every array of a call.

    Raises:
        BindingError: an axis missing or doubled.
        AxisSizeError: an axis of two sizes.
        ArgumentError: a plain array of another rank than its spec.
    """
    given = dict(axes)
    names = {c: tuple(n for n, _ in given[c]) if c in given else (c,) for c in signature.core_axes}
    sizes = _Sizes(kernel)
    for core, entries in axes:
        for name, size in entries:
            if size is not None:
                sizes.add((core, name), size, f"axes={{{core!r}: {name}({size})}}")
    loop_axes: dict[str, int] = {}
    roles: list[tuple[tuple[str, str | None, bool], ...]] = []
    placed_core: dict[str, str] = {}
    for info in infos:
        if info.place is None:
            roles.append(())
            continue
        spec = signature.inputs[info.place]
        own = _named_roles if info.named else _positional_roles
        found = own(info, spec.axes, names, kernel)
        for (name, core, loop), (_, size) in zip(found, info.axes, strict=True):
            sizes.add((core, name), size, f"argument {info.label!r}")
            if loop:
                loop_axes.setdefault(name, size)
            else:
                placed_core.setdefault(name, f"{core!r} in argument {info.label!r}")
        roles.append(found)
    clash = next((name for name in loop_axes if name in placed_core), None)
    if clash is not None:
        holder = next(i.label for i, r in zip(infos, roles, strict=True) if any(n == clash and lo for n, _, lo in r))
        raise BindingError(
            f"kernel {kernel!r}: axis {clash!r} is bound to {placed_core[clash]}, but it is a loop axis of argument "
            f"{holder!r}, whose place in the signature does not have it. Rename it in one of them, such as "
            f'{holder}.rename({{"{clash}": "{clash}_2"}}).'
        )
    _check_outputs(signature, names, loop_axes, kernel)
    cores = {name: core for core, parts in names.items() for name in parts}
    for i, info in enumerate(infos):
        if info.place is None and info.named:
            roles[i] = tuple(_free_role(name, loop_axes, cores) for name, _ in info.axes)
            for (name, core, loop), (_, size) in zip(roles[i], info.axes, strict=True):
                if loop or core is not None:
                    sizes.add((core, name), size, f"argument {info.label!r}")
    sized = {(core, name): size for core, entries in axes for name, size in entries if size is not None}
    return Bound(names, loop_axes, tuple(roles), sized)


def _free_role(name: str | None, loop_axes: dict[str, int], cores: dict[str, str]) -> tuple[str, str | None, bool]:
    assert name is not None
    return name, None if name in loop_axes else cores.get(name), name in loop_axes


def _named_roles(
    info: ArrayInfo, spec: tuple[str, ...], names: dict[str, tuple[str, ...]], kernel: str
) -> tuple[tuple[str, str | None, bool], ...]:
    own = [n for n, _ in info.axes]
    core_of: dict[str, str] = {}
    for core in spec:
        for name in names[core]:
            if name in core_of:
                raise BindingError(
                    f"kernel {kernel!r}: core axes {core_of[name]!r} and {core!r} of argument {info.label!r} are both "
                    f"bound to array axis {name!r}. Bind them to two axes with axes=, and rename one where they are "
                    "the same."
                )
            core_of[name] = core
            if name not in own:
                near = difflib.get_close_matches(name, [n for n in own if n], 1)
                raise BindingError(
                    f"kernel {kernel!r}: argument {info.label!r} has no axis {name!r} for core axis {core!r}; its "
                    f"axes are ({', '.join(f'{n} {s}' for n, s in info.axes)}). Say which one it is: "
                    f'axes={{"{core}": "{near[0] if near else "..."}"}}.'
                )
    return tuple((n or "", core_of.get(n or ""), n not in core_of) for n in own)


def _positional_roles(
    info: ArrayInfo, spec: tuple[str, ...], names: dict[str, tuple[str, ...]], kernel: str
) -> tuple[tuple[str, str | None, bool], ...]:
    if len(info.axes) != len(spec):
        raise ArgumentError(
            f"kernel {kernel!r}: argument {info.label!r} is a plain array of shape {tuple(n for _, n in info.axes)}, "
            f"but its place in the signature has {len(spec)} core axes ({' '.join(spec) or 'none'}). A plain array is "
            "taken positionally and has no loop axes: name them with haliax.named(array, (...))."
        )
    for core in spec:
        if len(names[core]) != 1:
            raise ArgumentError(
                f"kernel {kernel!r}: core axis {core!r} is bound to several array axes {names[core]}, but argument "
                f"{info.label!r} is a plain array. Make it a NamedArray with haliax.named(array, (...))."
            )
    return tuple((names[core][0], core, False) for core in spec)


def _check_outputs(
    signature: KernelSignature, names: dict[str, tuple[str, ...]], loop_axes: dict[str, int], kernel: str
) -> None:
    for i, out in enumerate(signature.outputs):
        seen = dict.fromkeys(loop_axes, "a loop axis")
        for core in out.axes:
            for name in names[core]:
                if name in seen:
                    raise BindingError(
                        f"kernel {kernel!r}: output {i} would have axis {name!r} twice: as {core!r} and as "
                        f"{seen[name]}. Rename one of the arguments' axes, or bind {core!r} to another name: "
                        f'axes={{"{core}": "..."}}.'
                    )
                seen[name] = f"{core!r}"


class _Sizes:
    """The one size of each axis, and who said so."""

    def __init__(self, kernel: str):
        self._kernel = kernel
        self._known: dict[tuple[str | None, str], tuple[int, str]] = {}

    def add(self, axis: tuple[str | None, str], size: int, who: str) -> None:
        known, said = self._known.setdefault(axis, (size, who))
        if known != size:
            core, name = axis
            what = f"axis {name!r}" + (f" (its {core!r})" if core is not None and core != name else "")
            raise AxisSizeError(
                f"kernel {self._kernel!r}: {what} has size {known} in {said}, but {size} in {who}. Both must agree; "
                "rename one of the axes where they are different things."
            )
