# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

import json
import os
import re
import subprocess
import sys
import time

import pytest

from haliax_kernels.levanter.__main__ import levanter_mains
from haliax_kernels.levanter.tiny_corpus import make_tiny_corpus
from launching import EXAMPLES, launch, losses_of

pytestmark = pytest.mark.levanter


def test_mains_are_found_without_importing_levanter():
    names = levanter_mains()
    assert {"train_lm", "eval_lm", "train_dpo"} <= set(names)
    assert "__init__" not in names


def test_help(tmp_path):
    done = launch("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("train_lm", "--devices N", "kernels:", "tiny_corpus: DIR"):
        assert word in done.stdout


def test_an_unknown_main_lists_those_there_are(tmp_path):
    done = launch("train_ml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: Levanter has no main 'train_ml'; did you mean 'train_lm'?")
    assert "eval_lm" in done.stderr


def test_a_wrong_block_is_one_line_and_no_traceback(tmp_path):
    (tmp_path / "mine.yaml").write_text("kernels: {block_sise: 3}\n")
    done = launch("train_lm", "--config_path", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: mine.yaml: kernels.block_sise: unknown key;")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_unknown_backend_names_the_file_and_the_backends(tmp_path):
    (tmp_path / "mine.yaml").write_text("kernels: {}\nmodel: {type: llama, attn_backend: ring}\n")
    done = launch("train_lm", "--config_path", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: mine.yaml: `model.attn_backend`" in done.stderr
    assert "unknown attention backend 'ring'; there are: default," in done.stderr
    assert "pallas_flash" in done.stderr
    assert "Traceback" not in done.stderr


def test_devices_are_set_before_jax_starts(tmp_path):
    script = (
        "import haliax_kernels, jax; from haliax_kernels.levanter.__main__ import use_cpu_devices; "
        "use_cpu_devices(3); print(jax.devices(), __import__('os').environ['XLA_FLAGS'])"
    )
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": ""}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CpuDevice") == 3
    assert "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=3" in " ".join(done.stdout.split())


def test_tiny_corpus(tmp_path):
    root = make_tiny_corpus(tmp_path / "tiny")
    corpus = root / "train.jsonl"
    assert 2e6 < corpus.stat().st_size < 5e6
    assert all(json.loads(line)["text"] for line in corpus.read_text().splitlines())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(root / "tokenizer"))
    assert len(tokenizer) == 257
    text = "def f():\n    return 'né'"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 256
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    make_tiny_corpus(root)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.slow
def test_the_tiny_llama_learns_with_our_kernel(tmp_path):
    config = EXAMPLES / "llama_tiny_cpu.yaml"
    started = time.monotonic()
    done = launch("train_lm", "--config_path", str(config), "--devices", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    output = done.stdout + done.stderr
    logged = re.findall(r'"event": "log", "step": (\d+), "metrics": \{"train/loss": ([\d.]+)', output)
    losses = {int(step): float(loss) for step, loss in logged}
    print(f"{time.monotonic() - started:.0f} s, loss {losses[2]:.3f} to {losses[19]:.3f}")
    # Levanter 0.2.20 says nothing of the first two steps.
    assert sorted(losses)[-18:] == list(range(2, 20))
    assert losses[2] > 5.0
    assert losses[19] < 3.5
    # The shapes are global ones, and none but our dispatcher writes this.
    assert re.search(r"pallas_flash runs attention: query \{'batch': 16, 'kv_head': 2, .*'position': 256", output)
    assert "pallas_flash registered (hook: wrapper)" in output
    assert "falls back" not in output
    assert {path.name for path in tmp_path.iterdir()} == {"levanter_runs"}


@pytest.mark.slow
def test_a_sharded_sequence_trains_as_vanilla_does_on_a_whole_one(tmp_path):
    sharded = EXAMPLES / "llama_tiny_context_parallel.yaml"
    done = launch("train_lm", "--config_path", str(sharded), "--devices", "8", cwd=tmp_path)
    ours = losses_of(done)
    output = done.stdout + done.stderr
    assert "zigzag over context" in output and "pallas_flash runs attention" in output and "falls back" not in output
    whole = (EXAMPLES / "llama_tiny_cpu.yaml").read_text().replace("pallas_flash", "vanilla")
    (tmp_path / "vanilla.yaml").write_text(whole)
    theirs = losses_of(launch("train_lm", "--config_path", "vanilla.yaml", "--devices", "8", cwd=tmp_path))
    assert sorted(ours)[-18:] == list(range(2, 20)) and ours.keys() == theirs.keys()
    worst = max(abs(ours[step] / theirs[step] - 1) for step in ours)
    print(f"{len(ours)} steps, loss {ours[2]:.4f} to {ours[19]:.4f}, largest relative difference {worst:.1e}")
    assert worst <= 1e-4
