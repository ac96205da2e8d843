"""Checkout, wheel and editable install hold the same `vtp_plugin.patches`: the files of the top-level `patches/`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import packaging
import pytest

import vtp_plugin
from tests.rules.import_rules import ROOT
from tests.support.fake_trees import lay_megatron, lay_torch
from vtp_plugin.host.versions import HOSTS

WHERE = (
    "import sys, vtp_plugin.patches as p; print(p.__file__); print('torch' in sys.modules, 'megatron' in sys.modules)"
)


def python(code: str, cwd: Path, **env: str) -> list[str]:
    """Run code in an empty folder with nothing of this checkout on the path but what ``env`` puts there."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=cwd, env=inherited | env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SCRIPT = """\
from vtp_plugin.host.versions import find_host, find_torch
print(find_torch().version, find_host()[1].version, find_host()[1].folder)
"""


def done(command: Sequence[str | Path], cwd: Path) -> str:
    """Run a command to its end, without this checkout and without an index of packages; return what it prints."""
    hidden = ("PYTHONPATH", "PIP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment["PIP_CONFIG_FILE"] = os.devnull
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def lay_distribution(site: Path, name: str, version: str) -> None:
    """Let a folder of packages say that it holds a distribution."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").touch()


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def source_files() -> dict[str, bytes]:
    """Return what a wheel must hold: path in the wheel -> content."""
    files = {path: path.relative_to(ROOT) for path in (ROOT / "vtp_plugin").rglob("*.py")}
    files |= {path: Path("vtp_plugin") / path.relative_to(ROOT) for path in (ROOT / "patches").rglob("*.py")}
    files[ROOT / "vtp_plugin" / "py.typed"] = Path("vtp_plugin/py.typed")
    files |= {path: path.relative_to(ROOT) for path in (ROOT / "vtp_plugin/report/page").glob("page.*")}
    files |= {path: path.relative_to(ROOT) for path in (ROOT / "vtp_plugin").glob("host/**/*.json")}
    pins = (ROOT / "patches").rglob("pins.json")
    files |= {path: Path("vtp_plugin") / path.relative_to(ROOT) for path in pins}
    return {name.as_posix(): path.read_bytes() for path, name in files.items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline through the source archive, as a release is, from a copy of the sources."""
    pytest.importorskip("build", reason="needs the package build, part of the extra dev")
    copy = tmp_path_factory.mktemp("source") / "project"
    copy.mkdir()
    for name in ("vtp_plugin", "patches"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", str(copy)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = (copy / "dist").glob("*.whl")
    return built


def test_patches_is_a_relative_link_to_the_top_level_folder() -> None:
    assert os.readlink(ROOT / "vtp_plugin" / "patches") == "../patches"


def test_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    expected = source_files()
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(held) == sorted(expected)
    assert held == expected
    assert any(name.startswith("vtp_plugin/patches/core/") for name in held)


def test_wheel_states_name_version_and_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA"))).metadata
    [version] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "vtp_plugin/util/text.py").read_text(), re.MULTILINE)
    assert (message["Name"], message["Version"], message["Requires-Python"]) == ("vtp-plugin", version, "<3.14,>=3.10")
    assert (message["License-Expression"], message.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    lines = message.get_all("Requires-Dist") or []
    found = [line for line in lines if "extra" not in line]
    assert found == ["packaging>=21", 'tomli<3,>=2; python_version < "3.11"']
    for host in HOSTS:
        specifier, extra = ",".join(reversed(host.versions.split(","))), f"host-{host.name.replace('.', '-')}"
        wanted = f'megatron-core{specifier}; extra == "{extra}"'
        assert wanted in lines


def test_an_install_touches_neither_torch_nor_megatron(wheel: Path, tmp_path: Path) -> None:
    """As on a machine with a vendor's torch and numpy and a Megatron tree beside the script; no index is asked."""
    venv.create(tmp_path / "env", symlinks=True)
    interpreter = tmp_path / "env/bin/python"
    site = Path(done([interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    lay_torch(site, "2.7.1+vendor")
    for name, version in (("torch", "2.7.1+vendor"), ("torch_npu", "2.7.1"), ("numpy", "1.24.0")):
        lay_distribution(site, name, version)
    shutil.copytree(Path(packaging.__path__[0]), site / "packaging")
    lay_distribution(site, "packaging", metadata.version("packaging"))
    core = lay_megatron(tmp_path / "train", "0.19.1")
    (tmp_path / "train/train.py").write_text(SCRIPT)
    before = files_under(tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    install = [*pip, "install", "--no-index", "--no-compile", wheel]
    assert "Successfully installed vtp-plugin-" in done(install, tmp_path).splitlines()[-1]
    after = files_under(tmp_path)
    script = tmp_path / "env/bin/vtp"
    added = {path.relative_to(site).parts[0] for path in map(Path, after.keys() - before.keys()) if path != script}
    assert before.items() <= after.items()
    assert added == {"vtp_plugin", f"vtp_plugin-{vtp_plugin.__version__}.dist-info"}
    assert done([interpreter, "-B", tmp_path / "train/train.py"], tmp_path).split() == ["2.7.1", "0.19.1", str(core)]
    # The commands, by the name that their help advises once it is on the path.
    assert done([script, "--version"], tmp_path) == f"vtp_plugin {vtp_plugin.__version__}\n"
    for path, name in ((script.parent, "vtp"), (tmp_path, "python -m vtp_plugin")):
        shown = done(["/usr/bin/env", f"PATH={path}", interpreter, "-m", "vtp_plugin", "plan", "--help"], tmp_path)
        assert shown.startswith(f"usage: {name} plan [flags]")


def test_wheel_unpacked_elsewhere_imports_its_own_patches(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    where, loaded = python(WHERE, tmp_path, PYTHONPATH=str(site))
    assert Path(where) == site / "vtp_plugin/patches/__init__.py"
    assert loaded == "False False"


def test_checkout_on_pythonpath_imports_patches(tmp_path: Path) -> None:
    where, loaded = python(WHERE, tmp_path, PYTHONPATH=str(ROOT))
    assert Path(where).resolve() == ROOT / "patches/__init__.py"
    assert loaded == "False False"


def test_installed_project_imports_the_same_files(tmp_path: Path) -> None:
    try:
        metadata.distribution("vtp-plugin")
    except metadata.PackageNotFoundError:
        pytest.skip("the project is not installed in this environment (make env does that)")
    where, _ = python(WHERE, tmp_path)
    assert Path(where).read_bytes() == (ROOT / "patches/__init__.py").read_bytes()
    names = "import pkgutil, vtp_plugin.patches as p; print(*(m.name for m in pkgutil.walk_packages(p.__path__)))"
    [found] = python(names, tmp_path)
    top_level = {path.name.removesuffix(".py") for path in (ROOT / "patches").iterdir()} - {
        "__init__",
        "__pycache__",
        "pins.json",
    }
    assert {name for name in found.split() if "." not in name} == top_level
