# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import pytest

from haliax_kernels.levanter import KernelsConfig, KernelsConfigError, current_options, set_options, use_options
from haliax_kernels.levanter.config_files import read_launcher_config

pytestmark = pytest.mark.levanter


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"blok_q": 3},
            "kernels.blok_q: unknown key; did you mean 'block_q'? allowed: context_parallel, implementation, block_q, "
            "block_k, on_unsupported, default_backend, linear_feature_map, linear_normalize.",
        ),
        (
            {"implementation": "Splosh"},
            "kernels.implementation: unknown value 'Splosh'; did you mean 'splash'? allowed: null, pallas_tpu, "
            "splash, pallas_gpu, xla.",
        ),
        (
            {"context_parallel": "rings"},
            "kernels.context_parallel: unknown value 'rings'; did you mean 'ring'? allowed: auto, ring, zigzag, "
            "allgather, ulysses, error.",
        ),
        (
            {"context_parallel": {"node": "auto"}},
            "kernels.context_parallel.node: unknown value 'auto'; allowed: ring, zigzag, allgather, ulysses.",
        ),
        (
            {"on_unsupported": "fall_back"},
            "kernels.on_unsupported: unknown value 'fall_back'; did you mean 'fallback'? allowed: error, fallback.",
        ),
        (
            {"context_parallel": 3},
            "kernels.context_parallel: unknown value 3; allowed: auto, ring, zigzag, allgather, ulysses, error.",
        ),
        ({"block_q": 0}, "kernels.block_q: 0 is not a positive integer or null."),
        ({"block_k": True}, "kernels.block_k: True is not a positive integer or null."),
        ({"default_backend": "yes"}, "kernels.default_backend: 'yes' is not true or false."),
        (
            ["auto"],
            "kernels: expected a mapping with keys context_parallel, implementation, block_q, block_k, "
            "on_unsupported, default_backend, linear_feature_map, linear_normalize; got ['auto'].",
        ),
    ],
)
def test_mistakes_are_named(block, message):
    with pytest.raises(KernelsConfigError) as error:
        KernelsConfig.from_mapping(block)
    assert str(error.value) == message


def test_empty_block_means_the_defaults():
    assert KernelsConfig.from_mapping(None) == KernelsConfig.from_mapping({}) == KernelsConfig()


def test_options_in_force():
    before = current_options()
    assert before == KernelsConfig()
    with use_options(KernelsConfig(block_q=16)) as options:
        assert current_options() is options
        set_options(KernelsConfig(block_q=32))
    assert current_options() is before


def test_the_block_is_taken_out_of_the_file(tmp_path: Path):
    (tmp_path / "model.yaml").write_text("type: llama\n")
    config = tmp_path / "mine.yaml"
    config.write_text("kernels: {block_q: 16, block_k: 32}\ntiny_corpus: here\nmodel: !include model.yaml\n")
    args = [
        f"--config_path={config}",
        "--kernels.block_q",
        "64",
        "--trainer.seed",
        "3",
        "--kernels.implementation=xla",
    ]
    copies = tmp_path / "copies"
    copies.mkdir()
    read = read_launcher_config(args, copies)
    assert read.kernels == KernelsConfig(block_q=64, block_k=32, implementation="xla")
    assert read.tiny_corpus == "here"
    assert read.files == [str(config)]
    flag, copy, *rest = read.args
    assert (flag, rest) == ("--config_path", ["--trainer.seed", "3"])
    assert Path(copy).read_text() == "model:\n  type: llama\n"


def test_a_file_without_our_keys_is_handed_on(tmp_path: Path):
    config = tmp_path / "mine.yaml"
    config.write_text("model: {type: llama}\n")
    read = read_launcher_config(["--config", str(config)], tmp_path)
    assert read.args == ["--config", str(config)]
    assert read.kernels == KernelsConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernels: {on_unsuported: error}", "mine.yaml: kernels.on_unsuported: unknown key; did you mean"),
        ("kernels: splash", "mine.yaml: kernels: expected a mapping"),
        ("tiny_corpus: 3", "mine.yaml: tiny_corpus: expected the path of a folder; got 3."),
        ("kernels: {", "mine.yaml: while parsing a flow"),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path: Path, text: str, message: str):
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    with pytest.raises(KernelsConfigError) as error:
        read_launcher_config(["--config_path", str(config)], tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_on_the_command_line():
    with pytest.raises(
        KernelsConfigError, match=r"^command line: kernels\.blockq: unknown key; did you mean 'block_q'"
    ):
        read_launcher_config(["--kernels.blockq", "3"], Path())
    with pytest.raises(KernelsConfigError, match=r"--kernels\.block_q needs a value"):
        read_launcher_config(["--kernels.block_q"], Path())
