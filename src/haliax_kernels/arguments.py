# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Take the arguments of a call apart: arrays, with what planning must know of each, and static values."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.tree_util import PyTreeDef

from haliax_kernels.errors import ArgumentError
from haliax_kernels.mesh import Placement, placement_of
from haliax_kernels.signature import KernelSignature


@dataclass(frozen=True)
class ArrayInfo:
    """One array of a call, as planning sees it. Hashable: equal infos give equal plans.

    Attributes:
        label: how messages name it: the parameter, and the path where it sits in a PyTree.
        place: the index of its spec in the signature's inputs, or None.
        named: whether it is a NamedArray.
        axes: (name, global size) per dimension; the names of a plain array are None.
        dtype: its dtype.
        placement: what the array itself says of its sharding.
    """

    label: str
    place: int | None
    named: bool
    axes: tuple[tuple[str | None, int], ...]
    dtype: Any
    placement: Placement

    @property
    def is_key(self) -> bool:
        """A typed PRNG key, or an array of them."""
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    @property
    def looks_like_raw_key(self) -> bool:
        """A plain uint32 array of a raw key's shape, without a place in the signature."""
        shape = tuple(n for _, n in self.axes)
        return self.place is None and not self.named and self.dtype == np.uint32 and shape in ((2,), (4,))


@dataclass(frozen=True)
class Static:
    """A value that is part of the plan; 1, 1.0 and True are three different ones."""

    kind: type
    value: Any


@dataclass(frozen=True)
class CallShape:
    """The form of a call without its arrays: rebuilds the kernel's arguments from local arrays."""

    infos: tuple[ArrayInfo, ...]
    statics: tuple[Static | None, ...]
    trees: tuple[tuple[str | None, PyTreeDef | None], ...]

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) for the kernel, with `arrays` in the places of the call's arrays."""
        rest = iter(arrays)
        leaves = iter([next(rest) if s is None else s.value for s in self.statics])
        args, kwargs = [], {}
        for keyword, tree in self.trees:
            if tree is None:
                value = next(leaves)
            else:
                value = tree.unflatten([next(leaves) for _ in range(tree.num_leaves)])
            if keyword is None:
                args.append(value)
            else:
                kwargs[keyword] = value
        return tuple(args), kwargs


class ArgumentReader:
    """Reads calls of one kernel: which parameter has which place in the signature."""

    def __init__(self, kernel: str, signature: KernelSignature, python: inspect.Signature | None):
        self._kernel = kernel
        self._python = python
        self._positional: list[str] = []
        self._variadic = "args"
        self._places: dict[str, int] = {}
        self._count = len(signature.inputs)
        self._by_position = signature.params is None
        if python is not None:
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            self._positional = [p.name for p in python.parameters.values() if p.kind in kinds]
            rest = [p.name for p in python.parameters.values() if p.kind == inspect.Parameter.VAR_POSITIONAL]
            self._variadic = rest[0] if rest else self._variadic
            if self._by_position and len(self._positional) < self._count and not rest:
                raise ArgumentError(
                    f'kernel {kernel!r}: its signature "{signature}" has {self._count} arguments, but the function '
                    f"{python} takes only {len(self._positional)} positional ones."
                )
        names = signature.params if signature.params is not None else self._positional[: self._count]
        self._places = {name: i for i, name in enumerate(names)}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallShape, list[Any]]:
        """(the call's form, its arrays).

        Raises:
            TypeError: as Python does, where the arguments do not fit the function.
            ArgumentError: for a static argument that cannot be hashed.
        """
        if self._python is not None:
            bound = self._python.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        infos: list[ArrayInfo] = []
        statics: list[Static | None] = []
        trees: list[tuple[str | None, PyTreeDef | None]] = []
        arrays: list[Any] = []
        named = [(None, self._name(i), self._place(i), v) for i, v in enumerate(args)]
        named += [(k, k, self._places.get(k), v) for k, v in kwargs.items()]
        for keyword, label, place, value in named:
            if isinstance(value, NamedArray) or _is_array(value) or not _is_container(value):
                leaves, tree = [("", value)], None
            else:
                paths, tree = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: isinstance(x, NamedArray))
                leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
            trees.append((keyword, tree))
            for path, leaf in leaves:
                info, array = self._leaf(label + path, place, leaf)
                if info is None:
                    statics.append(self._static(label + path, leaf))
                else:
                    statics.append(None)
                    infos.append(info)
                    arrays.append(array)
        return CallShape(tuple(infos), tuple(statics), tuple(trees)), arrays

    def _name(self, index: int) -> str:
        return (
            self._positional[index]
            if index < len(self._positional)
            else f"{self._variadic}[{index - len(self._positional)}]"
        )

    def _place(self, index: int) -> int | None:
        if self._by_position:
            return index if index < self._count else None
        return self._places.get(self._name(index))

    @staticmethod
    def _leaf(label: str, place: int | None, leaf: Any) -> tuple[ArrayInfo | None, Any]:
        if isinstance(leaf, NamedArray):
            array = leaf.array
            if isinstance(array, np.ndarray):
                array = jnp.asarray(array)
            axes = tuple((a.name, a.size) for a in leaf.axes)
            return ArrayInfo(label, place, True, axes, array.dtype, placement_of(array)), array
        if not _is_array(leaf):
            return None, None
        array = jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
        axes = tuple((None, n) for n in array.shape)
        return ArrayInfo(label, place, False, axes, array.dtype, placement_of(array)), array

    def _static(self, label: str, value: Any) -> Static:
        try:
            hash(value)
        except TypeError as e:
            raise ArgumentError(
                f"kernel {self._kernel!r}: argument {label!r} is a {type(value).__name__}, which is neither an array "
                "nor hashable. What is no array is static and becomes part of the compiled kernel: pass a hashable "
                "value (a tuple, a frozen dataclass), or an array."
            ) from e
        return Static(type(value), value)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _is_container(x: Any) -> bool:
    return not (x is None or isinstance(x, bool | int | float | complex | str | bytes))
