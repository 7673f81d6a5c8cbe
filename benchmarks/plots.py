# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The plots that the README shows, drawn from the figures of the benchmarks."""

import json
import pathlib
from typing import Any

KERNELS = {
    "haliax-kernels": "ours",
    "JAX splash, 1024, fused backward": "JAX splash, fused",
    "JAX splash, 512": "JAX splash",
    "JAX flash_attention, 512": "JAX flash",
}


def draw(figures: dict[str, pathlib.Path], folder: pathlib.Path) -> None:
    """Draw what the figures, JSON files by the name of their benchmark, are enough for."""
    try:
        import matplotlib
    except ImportError:
        print("No plots: matplotlib is missing; pip install 'haliax-kernels[bench]'")
        return
    matplotlib.use("agg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "haliax-kernels"
    found = {name: json.loads(path.read_text()) for name, path in figures.items()}
    chips = ("v5e", "v5p", "v6e")
    if all(f"tpu_static_{chip}" in found for chip in chips):
        attention_tpu({chip: found[f"tpu_static_{chip}"] for chip in chips}, folder / "attention_tpu.svg")
    if "cpu" in found:
        attention_cpu(found["cpu"]["rows"], folder / "attention_cpu.svg")
    if "ring" in found:
        rings(found["ring"]["blocks"], folder / "rings.svg")


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(f"Plot: {path.name}")


def attention_tpu(chips: dict[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """Bars of estimated cycles, forward and with the backward, a panel for each chip."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(chips), figsize=(4.2 * len(chips), 3.2), sharey=True, squeeze=False)
    for panel, (chip, rows) in zip(panels[0], chips.items(), strict=True):
        by_kernel = {r["kernel"]: r for r in rows if r["positions"] == 4096 and r["size"] == 128}
        shown = [kernel for kernel in reversed(KERNELS) if kernel in by_kernel]
        names = [KERNELS[kernel] for kernel in shown]
        panel.barh(names, [by_kernel[k]["both"] / 1e3 for k in shown], color="C0", label="forward + backward")
        panel.barh(names, [by_kernel[k]["forward"] / 1e3 for k in shown], color="C1", height=0.4, label="forward")
        panel.set(xlabel="thousand cycles", title=f"TPU {chip}")
        panel.grid(axis="x", alpha=0.3)
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, fontsize="small", loc="upper right")
    figure.suptitle("Causal attention, 4,096 positions, 2 heads of 128, bfloat16, estimated", fontsize="medium")
    _save(figure, path)


def attention_cpu(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """How many times as fast as the others ours is, against the length."""
    from matplotlib import pyplot

    rows = [r for r in rows if r["what"] == "forward + backward"]
    figure, panel = pyplot.subplots(figsize=(5.6, 3.6))
    for name in rows[0]["times_as_fast"]:
        panel.plot([r["length"] for r in rows], [r["times_as_fast"][name] for r in rows], "o-", label=name)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks([r["length"] for r in rows], [f"{r['length']:,}" for r in rows])
    panel.set(xlabel="positions", ylabel="seconds of it / seconds of ours", ylim=(0, None))
    panel.set_title("Causal attention on the CPU, forward + backward, float32", fontsize="medium")
    panel.grid(alpha=0.3)
    panel.legend()
    _save(figure, path)


def rings(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """The slowest device's blocks of each step, added up, for a causal mask."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(5.6, 3.6))
    layouts = ("contiguous", "zigzag")
    shards = sorted({r["shards"] for r in rows})
    for n, layout in enumerate(layouts):
        path_of = {r["shards"]: r["critical_path"] for r in rows if r["layout"] == layout}
        at = [i + 0.36 * (n - 0.5) for i in range(len(shards))]
        bars = panel.bar(at, [path_of[s] for s in shards], width=0.34, label=layout)
        panel.bar_label(bars, fmt="%.3g")
    panel.set_xticks(range(len(shards)), [f"{s} devices" for s in shards])
    panel.set_ylabel("blocks that the ring waits for")
    panel.set_title("Causal ring attention, forward: critical path", fontsize="medium")
    panel.legend()
    _save(figure, path)
