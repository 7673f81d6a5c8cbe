# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import draccus
import pytest

from haliax_kernels.levanter.config_files import read_launcher_config

pytestmark = pytest.mark.levanter

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "levanter_configs").glob("*.yaml"))


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {
        "llama_tiny_cpu",
        "llama_tiny_context_parallel",
        "llama_7b_v5p",
        "llama_7b_128k_v5p",
        "gpt2_small_v5e",
        "linear_llama_tiny_cpu",
        "linear_llama_7b_128k_v5p",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_config_of_levanters(registered, tmp_path, path):
    from levanter.main.train_lm import TrainLmConfig

    read = read_launcher_config(["--config_path", str(path)], tmp_path)
    config = draccus.parse(TrainLmConfig, config_path=read.args[1], args=[])
    if path.stem.startswith("linear_"):
        assert type(config.model).__name__ == "LinearLlamaConfig"
    else:
        assert config.model.attn_backend is registered.PALLAS_FLASH
    mapping = config.trainer.mesh.resolved_compute_mapping
    assert mapping["kv_head"] == mapping["heads"] == mapping["mlp"] == "model"
    assert ("position" in mapping) == any(word in path.stem for word in ("context_parallel", "128k", "linear"))
