# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Every Python block of the documentation runs, page by page, in order and in one namespace."""

import dataclasses
import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEXT_AFTER = re.compile(r"\s*```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """(line, text, what the page shows as its output or None) of each block of `language`."""
    source = page.read_text()
    for found in BLOCK.finditer(source):
        if found[1] == language:
            shown = TEXT_AFTER.match(source, found.end())
            yield source.count("\n", 0, found.start()) + 1, found[2], shown and shown[1]


def name(page):
    return str(page.relative_to(ROOT / "docs" if page in PAGES else ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.levanter] if "levanter" in name(page) else [])
        for page in [README, *PAGES]
        if any(blocks(page, "python"))
    ],
)
def test_python_blocks_run(page, capsys, monkeypatch, tmp_path):
    if "levanter" in name(page):
        pytest.importorskip("levanter")
    if jax.device_count() < 8:
        pytest.skip("the pages use eight devices")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    for line, text, shown in blocks(page, "python"):
        # The padding makes a traceback point at the line of the page.
        exec(compile("\n" * line + text, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
        if shown is not None:
            assert printed.split() == shown.split(), f"{name(page)}:{line} printed\n{printed}"


def commands():
    """Each command line of this package that a page shows."""
    found: set[str] = set()
    for page in [README, *PAGES]:
        for _, text, _ in blocks(page, "bash"):
            for line in text.replace("\\\n", "").splitlines():
                if line.startswith("haliax-kernels "):
                    found.add(shlex.join(shlex.split(line, comments=True)))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.levanter
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, id="-".join(c.split()[1:3]), marks=[pytest.mark.tpu_compile] if " preflight " in c else [])
        for c in commands()
    ],
)
def test_commands_run(command, tmp_path):
    needed = {" plan ": ["levanter"], " preflight ": ["levanter", "libtpu"], "--svg": ["matplotlib"]}
    for words, packages in needed.items():
        for package in packages if words in command else []:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"needs {package}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "docs").mkdir()  # where a picture goes
    line = [sys.executable, "-m", "haliax_kernels", *shlex.split(command)[1:]]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == [name(page) for page in PAGES]


def test_fences_are_of_a_known_kind():
    """A block that is meant to run and is not labelled python would go untested."""
    for page in PAGES:
        opened = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
        assert set(opened) <= {"python", "text", "yaml", "bash"}, (name(page), opened)


@pytest.mark.levanter
def test_kernels_blocks_are_valid():
    yaml = pytest.importorskip("yaml")
    from haliax_kernels.levanter import KernelsConfig

    shown = [yaml.safe_load(text) for page in PAGES for _, text, _ in blocks(page, "yaml")]
    kernels = [config["kernels"] for config in shown if "kernels" in config]
    assert kernels
    for block in kernels:
        KernelsConfig.from_mapping(block)


def test_refused_lists_every_error():
    from haliax_kernels import errors

    page = (ROOT / "docs/how_to/refused.md").read_text()
    classes = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
    missing = [c for c in classes if f"| [`{c}`](#" not in page and c != "NamedKernelError"]
    assert len(classes) > 10 and not missing


@pytest.mark.levanter
def test_levanter_yaml_lists_every_key():
    pytest.importorskip("levanter")
    from haliax_kernels.levanter import KernelsConfig
    from haliax_kernels.levanter.linear_config import LinearAttentionConfig
    from haliax_kernels.levanter.linear_llama import LinearLlamaConfig

    page = (ROOT / "docs/levanter_yaml.md").read_text()
    sections = dict(re.findall(r"^##+ `([\w.: ]+?):?`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    for section, config in (
        ("kernels", KernelsConfig),
        ("model.linear", LinearAttentionConfig),
        ("model.type: linear_llama", LinearLlamaConfig),
    ):
        missing = [f.name for f in dataclasses.fields(config) if f"| `{f.name}` |" not in sections[section]]
        assert not missing, (section, missing)
