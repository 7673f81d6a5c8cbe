# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What a fuzz case is, as plain data, and how hypothesis draws one."""

import math
from dataclasses import dataclass

from hypothesis import strategies as st

POLICIES = ("Local", "Parallel", "Gather", "Sum", "Halo", "Manual", "Aligned")
MESHES = ({"x": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 4, "y": 1}, {"x": 2, "y": 2, "z": 2}, {})
TRANSFORMS = ("jit", "grad", "vmap", "scan", "remat")


@dataclass(frozen=True)
class Core:
    """A core axis: the array axes (name, size) it is bound to, its policy, and what the kernel does along it."""

    name: str
    parts: tuple[tuple[str, int], ...]
    policy: str
    operation: str = "none"
    halo: tuple[int, int, float] = (0, 0, 0.0)
    leader: str | None = None

    @property
    def size(self) -> int:
        return math.prod(n for _, n in self.parts)


@dataclass(frozen=True)
class Input:
    """An argument: its core axes in the kernel's order, its axes in its own, its dtype and what is done first."""

    cores: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: str
    function: str


@dataclass(frozen=True)
class Case:
    """One call. `transforms` stand from the inside to the outside; `mapped` says which arguments a vmap maps.

    Unless it is `eager`, one more jit is around all: most of the time goes into compiling, and that is once then.
    """

    cores: tuple[Core, ...]
    loops: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, ...], ...]
    loop_mode: str
    custom_backward: bool
    positions: bool
    mesh: tuple[tuple[str, int], ...]
    explicit: tuple[str, ...]
    mapping: tuple[tuple[str, tuple[str, ...]], ...]
    source: str
    placed: bool
    eager: bool
    transforms: tuple[str, ...]
    mapped: int
    seed: int

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.loops) | {n: s for c in self.cores for n, s in c.parts}

    def core(self, name: str) -> Core:
        return next(c for c in self.cores if c.name == name)


@st.composite
def cores(draw: st.DrawFn) -> tuple[Core, ...]:
    """One to three core axes; an aligned one directly follows its leader."""
    found: list[Core] = []
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        leads = bool(found) and found[-1].policy in ("Parallel", "Manual", "Sum")
        policy = draw(st.sampled_from(POLICIES if leads and len(found[-1].parts) == 1 else POLICIES[:-1]))
        array = draw(st.sampled_from((name, f"{name}_named")))
        size = draw(st.sampled_from((4, 12, 6, 8, 12, 12, 5)))
        operation, halo, leader, parts = "none", (0, 0, 0.0), None, ((array, size),)
        if policy in ("Local", "Gather"):
            operation = draw(st.sampled_from(("cumsum", "flip", "center", "none")))
        if policy == "Manual":
            operation = "cumsum"
        if policy in ("Halo", "Aligned"):
            halo = (draw(st.integers(0, 5)), draw(st.integers(0, 3)), draw(st.sampled_from((0.0, 0.5))))
        if policy == "Aligned":
            leader = found[-1].name
            parts = ((array, found[-1].size),)
        if policy in ("Local", "Parallel", "Gather", "Sum") and draw(st.integers(0, 5)) == 0:
            parts = ((f"{name}_1", draw(st.sampled_from((2, 4)))), (f"{name}_2", draw(st.sampled_from((2, 3)))))
        found.append(Core(name, parts, policy, operation, halo, leader))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    drawn = draw(cores())
    loops = draw(st.sampled_from(((), (("p", 4),), (("p", 4), ("q", 2)), (("q", 6),))))
    count = draw(st.integers(1, 3))
    owners = [draw(st.integers(0, count - 1)) for _ in drawn]
    inputs = []
    for i in range(count):
        own = [c for c, owner in zip(drawn, owners, strict=True) if owner == i or draw(st.integers(0, 2)) == 0]
        order = draw(st.permutations(own))
        has = [n for n, _ in loops if i == 0 or draw(st.booleans())]
        axes = draw(st.permutations(has + [n for c in own for n, _ in c.parts]))
        dtype = draw(st.sampled_from(("float32", "float32", "float32", "bfloat16", "int32") if i else ("float32",)))
        function = draw(st.sampled_from(("tanh", "sin", "square", "id")))
        inputs.append(Input(tuple(c.name for c in order), tuple(axes), dtype, function))
    used = {n for x in inputs for n in x.axes}
    loops = tuple((n, s) for n, s in loops if n in used)
    outputs = []
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        kept = []
        for c in drawn:
            must = c.policy in ("Parallel", "Halo")
            may = c.policy != "Aligned" and (c.policy != "Sum" or outputs)
            if must or (may and draw(st.booleans())):
                kept.append(c.name)
        outputs.append(tuple(draw(st.permutations(kept))))
    mesh = draw(st.sampled_from(MESHES))
    names = list(mesh)
    mapping = {}
    arrays = [*(n for n, _ in loops), *(n for c in drawn for n, _ in c.parts)]
    free = list(draw(st.permutations(names)))
    whole = {n for c in drawn for n, _ in c.parts if c.policy == "Local"}
    sizes = dict(loops) | {n: s for c in drawn for n, s in c.parts}
    for array in draw(st.permutations(arrays))[:3]:
        if not free:
            break
        taken = free[: draw(st.sampled_from((1, 1, 2)))]
        fits = array not in whole and sizes[array] % math.prod(mesh[m] for m in taken) == 0
        if not fits and draw(st.integers(0, 5)):  # most refusals are alike
            continue
        mapping[array] = tuple(taken)
        if draw(st.integers(0, 7)):  # else the next axis is asked to share the mesh axis
            free = free[len(taken) :]
    for c in drawn:  # what is aligned is usually mapped so
        if c.leader is not None and draw(st.integers(0, 3)):
            leader = next(k for k in drawn if k.name == c.leader)
            mapping.pop(c.parts[0][0], None)
            if leader.parts[0][0] in mapping and draw(st.booleans()):
                mapping[c.parts[0][0]] = mapping[leader.parts[0][0]]
    source = draw(st.sampled_from(("context", "argument", "context", "argument", "arrays")))
    return Case(
        cores=drawn,
        loops=loops,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        loop_mode=draw(st.sampled_from(("vmap", "vmap", "batch", "collapse"))),
        custom_backward=draw(st.booleans()),
        positions=draw(st.booleans()),
        mesh=tuple(mesh.items()),
        explicit=draw(st.sampled_from(((), (), tuple(names), tuple(names[:1])))),
        mapping=tuple(mapping.items()),
        source=source,
        placed=draw(st.booleans()),
        eager=source == "arrays" or draw(st.integers(0, 4)) == 0,
        transforms=tuple(draw(st.lists(st.sampled_from(TRANSFORMS), max_size=2))),
        mapped=draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 3)),
    )
