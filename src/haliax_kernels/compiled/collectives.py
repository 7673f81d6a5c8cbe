# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The collectives of a compiled program, by the mesh axes that they run over."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from haliax_kernels.compiled.program import Instruction, Program

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTH = {"pred": 1, "c64": 8, "c128": 16}


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program.

    Attributes:
        kind: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all` or `collective-permute`.
        mesh_axes: the mesh axes it runs over, in the mesh's order.
        bytes_per_device: bytes of its result on one device, each time it runs.
        runs: how often it runs, as if every branch were taken; None where a loop's turns are not known.
        op_name: the Python scopes and the primitive that it comes from.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    bytes_per_device: int
    runs: int | None
    op_name: str

    @property
    def total_bytes(self) -> int:
        """Of all runs, those in a loop of unknown length counted once."""
        return self.bytes_per_device * (self.runs or 1)


def compiled_collectives(program: Program, mesh: Mapping[str, int]) -> tuple[CompiledCollective, ...]:
    """The collectives of a program that is compiled for a mesh of these sizes.

    A transfer that the TPU compiler spreads over several fusions, to compute in the meantime, is one. Where every
    device only sends to itself, the mesh axes are empty.
    """
    return tuple(_found(program, mesh))


def transfers(program: Program) -> Iterator[list[Instruction]]:
    """Of each transfer of a scheduled TPU program that has a start and an end, the instructions between them."""
    for instructions in program.computations.values():
        under_way: dict[str, list[Instruction]] = {}
        for i in instructions:
            if i.opcode == "collective-permute-start":
                under_way[i.name] = []
            elif i.opcode == "collective-permute-done" and (start := re.search(r"-done\(%([\w.\-]+)\)", i.text)):
                yield under_way.pop(start[1])
            else:
                for between in under_way.values():
                    between.append(i)


def _found(program: Program, mesh: Mapping[str, int]) -> Iterator[CompiledCollective]:
    chains: set[str] = set()
    for i in program:
        kind = i.opcode.removesuffix("-start")
        if kind not in _KINDS:
            continue
        # The same transfer begins in one fusion, goes on in others, and ends in a last one.
        chain = re.search(r'chain_id="(\d+)"', i.text)
        if chain is not None and chain[1] in chains:
            continue
        chains |= {chain[1]} if chain is not None else set()
        axes = _mesh_axes(i, mesh)
        shapes = _shapes(i.shape)
        if i.opcode.endswith("-start"):  # operands, results, and on TPU the semaphores of a permute
            shapes = [s for s in shapes if s != ("u32", "")]
            shapes = shapes[len(shapes) // 2 :]
        if i.computation.startswith("all-reduce-scatter"):  # so the compiler names the fusion that cuts the sum
            kind, shapes = "reduce-scatter", _shapes(_result(program, i.computation))
        size = sum(_width(dtype) * math.prod(int(d) for d in dims.split(",") if d) for dtype, dims in shapes)
        yield CompiledCollective(kind, axes, size, program.runs[i.computation], _op_name(program, i))


def _result(program: Program, computation: str) -> str:
    return next(i.shape for i in program.computations[computation] if i.root)


def _op_name(program: Program, i: Instruction) -> str:
    caller = program.caller(i.computation)
    return i.op_name or (caller.op_name if caller is not None else "")


def _shapes(text: str) -> list[tuple[str, str]]:
    return re.findall(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]", text)


def _width(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return _WIDTH.get(dtype) or max(1, int(bits[0]) // 8 if bits else 1)


def _mesh_axes(i: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of a group differ."""
    shape, count = tuple(mesh.values()), math.prod(mesh.values())
    varying = np.zeros(len(shape), bool)
    for group in _groups(i.text, count):
        places = np.stack(np.unravel_index(np.asarray(group, int), shape))
        varying |= (places != places[:, :1]).any(1)
    return tuple(name for name, differs in zip(mesh, varying, strict=True) if differs)


def _groups(text: str, count: int) -> np.ndarray | list[list[int]]:
    """The groups of devices that talk to each other, as numbers of devices in the mesh's order."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        return [[int(x) for x in pair.strip("{}").split(",")] for pair in pairs[1].split("},{")]
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        return [[int(x) for x in group.strip("{}").split(",")] for group in listed[1].split("},{")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, dims = _ints(iota[1]), _ints(iota[2])
        devices = np.arange(count).reshape(dims).transpose(_ints(iota[3]) if iota[3] else range(len(dims)))
        return devices.reshape(groups)
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        over = re.findall(r"'([^']+)'", named[2])
        devices = np.arange(count).reshape(tuple(sizes.values()))
        last = [list(sizes).index(name) for name in over]
        return np.moveaxis(devices, last, range(-len(last), 0)).reshape(-1, math.prod(sizes[name] for name in over))
    return [list(range(count))]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))
