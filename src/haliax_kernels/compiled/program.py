# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The instructions of a compiled program, and how often each of them runs."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: its name.
        computation: the name of the computation that it stands in.
        shape: the text of its result's type.
        opcode: what it does.
        text: its whole line.
        root: whether its result is the computation's.
    """

    name: str
    computation: str
    shape: str
    opcode: str
    text: str
    root: bool

    @property
    def op_name(self) -> str:
        """The Python scopes and the primitive that it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""


class Program:
    """A compiled program, from `compiled.as_text()`."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self._entry, current = "", ""
        for line in _whole_lines(text):
            if head := _HEAD.match(line):
                current = head[2]
                self.computations[current] = []
                self._entry = current if head[1] else self._entry
            elif current and (found := _INSTRUCTION.match(line)):
                self.computations[current].append(
                    Instruction(found[2], current, found[3], found[4], line, bool(found[1]))
                )

    def __iter__(self) -> Iterator[Instruction]:
        return (i for instructions in self.computations.values() for i in instructions)

    @cached_property
    def runs(self) -> dict[str, int | None]:
        """How often each computation runs, as if every branch were taken; None where a loop's turns are not known."""
        callers: dict[str, list[tuple[str, int | None]]] = defaultdict(list)
        for i in self:
            for name in _called(i):
                callers[name].append((i.computation, self._turns(i) if i.opcode == "while" else 1))
        found: dict[str, int | None] = {self._entry: 1}

        def count(name: str) -> int | None:
            if name not in found:
                each = [(count(caller), turns) for caller, turns in callers[name]]
                known = [runs * turns for runs, turns in each if runs is not None and turns is not None]
                found[name] = sum(known) if len(known) == len(each) else None
            return found[name]

        return {name: count(name) for name in self.computations}

    def caller(self, computation: str) -> Instruction | None:
        """The fusion that a computation is the body of."""
        return self._fusions.get(computation)

    @cached_property
    def _fusions(self) -> dict[str, Instruction]:
        return {name: i for i in self if i.opcode == "fusion" for name in _called(i)}

    def _turns(self, loop: Instruction) -> int | None:
        """How often a loop that counts from zero turns."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(known[1])
        test = re.search(r"condition=%?([\w.\-]+)", loop.text)
        condition = self.computations.get(test[1] if test else "", [])
        root = next((i for i in condition if i.root and i.opcode == "compare" and "direction=LT" in i.text), None)
        if root is None:
            return None
        arguments = re.findall(r"%([\w.\-]+)", root.text.split("compare(", 1)[1].split(")", 1)[0])
        limit = next((i for i in condition if arguments and i.name == arguments[-1] and i.opcode == "constant"), None)
        number = re.search(r"constant\((\d+)\)", limit.text) if limit is not None else None
        return int(number[1]) if number else None


def _whole_lines(text: str) -> Iterator[str]:
    """The lines of a program, those that a kernel's metadata break put together again."""
    whole: list[str] = []
    for line in text.splitlines():
        if whole and (_HEAD.match(line) or _INSTRUCTION.match(line) or line == "}"):
            yield " ".join(whole)
            whole = []
        whole.append(line)
    yield " ".join(whole)


def _called(i: Instruction) -> list[str]:
    names = [n for one, several in _CALLED.findall(i.text) for n in ([one] if one else several.split(","))]
    return [n.strip().lstrip("%") for n in names if n.strip()]
