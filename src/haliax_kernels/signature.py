# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What a kernel's arguments and outputs are, by axis name: parsed from a string or from jaxtyping annotations."""

import functools
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from haliax_kernels.errors import SignatureError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_HINTS = {
    "#": "broadcasting dimensions are not supported: an argument that lacks an axis is shared along it anyway",
    "?": "'?' dimensions are not supported: give the axis one name",
    "_": "anonymous dimensions are not supported: every axis needs a name",
    "...": "'...' is not supported: leave loop axes out (they are vmapped), or write '*batch' at the front",
    "*": "'*name' may stand only once and only at the front of an argument",
}


@dataclass(frozen=True)
class ArraySpec:
    """The core axes of one argument or output, in the order in which the kernel sees them.

    Attributes:
        axes: the names of the core axes.
        batch: the name in a leading `*name`, or None. With it the kernel takes leading loop dimensions itself.
    """

    axes: tuple[str, ...]
    batch: str | None = None

    def __str__(self) -> str:
        return " ".join(([f"*{self.batch}"] if self.batch else []) + list(self.axes)) or "()"


@dataclass(frozen=True)
class KernelSignature:
    """The arguments and outputs of a kernel, in NumPy's gufunc vocabulary.

    Attributes:
        inputs: one spec per array argument.
        outputs: one spec per output.
        params: the parameter names that the inputs belong to, or None where they are the leading positional ones.
        several: whether the kernel returns a tuple (it may be a tuple of one).
    """

    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    params: tuple[str, ...] | None = None
    several: bool = False
    core_axes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = dict.fromkeys(a for s in self.inputs + self.outputs for a in s.axes)
        object.__setattr__(self, "core_axes", tuple(names))

    @property
    def batched(self) -> bool:
        """Whether the kernel takes leading loop dimensions itself (`*batch`)."""
        return any(s.batch for s in self.inputs)

    @property
    def input_axes(self) -> frozenset[str]:
        return frozenset(a for s in self.inputs for a in s.axes)

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs)) + " -> " + ", ".join(map(str, self.outputs))


def parse_signature(text: str, kernel: str = "kernel") -> KernelSignature:
    """Parse `"q_pos key, k_pos key -> q_pos"`.

    Args:
        text: arguments separated by commas, axes by spaces, `->`, outputs likewise. `()` has no core axis. `*name` at
            the front of every argument and output says that the kernel takes leading dimensions itself.
        kernel: the kernel's name, for messages.

    Raises:
        SignatureError: naming the offending token.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise SignatureError(
            f"kernel {kernel!r}: the signature {text!r} has no '->'. Write arguments, '->', outputs: "
            '"q_pos key, k_pos key -> q_pos".'
        )
    if "->" in right:
        raise SignatureError(f"kernel {kernel!r}: the signature {text!r} has more than one '->'.")
    inputs = tuple(_parse_array(part, text, kernel) for part in left.split(","))
    outputs = tuple(_parse_array(part, text, kernel) for part in right.split(","))
    return _checked(KernelSignature(inputs, outputs, several=len(outputs) > 1), text, kernel)


def _parse_array(part: str, text: str, kernel: str) -> ArraySpec:
    tokens = part.split()
    if not tokens:
        raise SignatureError(
            f"kernel {kernel!r}: an argument or output of {text!r} is empty. Write '()' for an array without core "
            "axes."
        )
    if tokens == ["()"]:
        return ArraySpec(())
    return parse_tokens(tokens, text, kernel)


def parse_tokens(tokens: list[str], text: str, kernel: str) -> ArraySpec:
    """Turn the dimension tokens of one array into an `ArraySpec`; refuses what is not an axis name."""
    batch = None
    if tokens and tokens[0].startswith("*") and _NAME.match(tokens[0][1:]):
        batch, tokens = tokens[0][1:], tokens[1:]
        if tokens == ["()"]:
            tokens = []
    for token in tokens:
        if not _NAME.match(token):
            hint = next((h for sign, h in _HINTS.items() if token.startswith(sign)), None)
            if hint is None and re.match(r"\d+\Z", token):
                hint = "sizes are not supported: name the axis, and use multiple_of= for a constraint on its size"
            raise SignatureError(
                f"kernel {kernel!r}: token {token!r} in {text!r} is not an axis name"
                + (f" ({hint})." if hint else " (expressions and sizes are not supported: every axis needs a name).")
            )
    doubled = sorted({t for t in tokens if tokens.count(t) > 1})
    if doubled:
        raise SignatureError(
            f"kernel {kernel!r}: axis {doubled[0]!r} stands twice in one array of {text!r}. Give the two dimensions "
            "two names, and bind both with axes= where they are the same array axis."
        )
    return ArraySpec(tuple(tokens), batch)


def _checked(signature: KernelSignature, text: str, kernel: str) -> KernelSignature:
    specs = signature.inputs + signature.outputs
    batches = {s.batch for s in specs}
    if len(batches) > 1:
        raise SignatureError(
            f"kernel {kernel!r}: '*name' must stand at the front of every argument and output of {text!r}, with one "
            f"name, or of none; found {sorted(f'*{b}' if b else 'none' for b in batches)}."
        )
    if batches and next(iter(batches)) in signature.core_axes:
        raise SignatureError(f"kernel {kernel!r}: {next(iter(batches))!r} is both '*name' and an axis in {text!r}.")
    return signature


def signature_from_annotations(fn: Callable[..., Any], kernel: str) -> KernelSignature:
    """Read the signature from jaxtyping annotations: `q: Float[Array, "q_pos key"]`, and the return annotation.

    Looks through `jax.jit`, `jax.custom_vjp` and `functools.partial`.

    Raises:
        SignatureError: where the annotations are missing, unreadable or hold what a signature does not allow.
    """
    target = _innermost(fn)
    try:
        hints = typing.get_type_hints(target)
    except NameError as e:
        raise SignatureError(
            f"kernel {kernel!r}: its annotations cannot be read ({e}). Under 'from __future__ import annotations' "
            "they must use names of the module's global scope; or give the signature as a string."
        ) from e
    params, inputs = [], []
    for name in inspect.signature(target).parameters:
        spec = _spec_of(hints.get(name), f"the annotation of {name!r}", kernel)
        if spec is not None:
            params.append(name)
            inputs.append(spec)
    if not inputs:
        raise SignatureError(
            f"kernel {kernel!r} has no signature: give one as a string, "
            '@named_kernel("q_pos key, k_pos key -> q_pos"), or annotate its array arguments with jaxtyping, '
            'q: Float[Array, "q_pos key"].'
        )
    returned = hints.get("return")
    several = typing.get_origin(returned) is tuple
    parts = typing.get_args(returned) if several else (returned,)
    outputs = [_spec_of(part, "the return annotation", kernel) for part in parts]
    if not outputs or any(o is None for o in outputs):
        raise SignatureError(
            f"kernel {kernel!r}: its return annotation {returned!r} is not a jaxtyping array or a tuple of them. "
            "Annotate it, or give the signature as a string."
        )
    out_specs = tuple(o for o in outputs if o is not None)
    signature = KernelSignature(tuple(inputs), out_specs, tuple(params), several)
    return _checked(signature, str(signature), kernel)


def _innermost(fn: Any) -> Any:
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif not inspect.isfunction(fn) and hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return fn


def _spec_of(hint: Any, what: str, kernel: str) -> ArraySpec | None:
    # An optional argument: `Float[Array, "pos"] | None`.
    for option in typing.get_args(hint) if typing.get_args(hint) and not hasattr(hint, "dim_str") else (hint,):
        dims = getattr(option, "dim_str", None)
        if isinstance(dims, str):
            return parse_tokens(dims.split(), f"{what}, {dims!r}", kernel)
    return None


def call_signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The Python signature of `fn`, or None for callables that have none (some wrapped kernels)."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None
