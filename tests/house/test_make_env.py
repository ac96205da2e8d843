"""``make env``: which interpreter it takes for a host, and what it says where none fits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rules.import_rules import ROOT
from vtp_plugin.host.versions import HOSTS, MegatronFamily

SCRIPT = ROOT / "scripts/make_env.sh"
# A Python that has a version and a venv module, which writes down that it was asked, and fails there.
FAKE = """\
#!/bin/bash
case $* in
*version_info*) shift 2; for minor; do [[ {minor} == "$minor" ]] && exit 0; done; exit 1 ;;
*'import ensurepip'*) exit 0 ;;
*platform*) echo "is Python 3.{minor}.9" ;;
*) echo "asked $0: $*"; exit 3 ;;
esac
"""


def make_env(folder: Path, host: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where there are no interpreters but those of ``folder``."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "sort", "printf", "du", "cut"):
        found = shutil.which(name)
        if found is not None and not (tools / name).exists():
            (tools / name).symlink_to(found)
    command = [str(tools / "bash"), str(SCRIPT), host, str(folder / "env"), str(folder / "stamp")]
    paths = {"PATH": f"{folder}:{tools}", "HOME": str(folder), "PYENV_ROOT": str(folder / "pyenv")}
    return subprocess.run(
        command, cwd=folder, env=paths | environment, capture_output=True, text=True, timeout=600, check=False
    )


def lay_python(path: Path, minor: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE.format(minor=minor))
    path.chmod(0o755)


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_without_a_python_that_fits_it_says_what_is_needed(tmp_path: Path, host: MegatronFamily) -> None:
    lay_python(tmp_path / "python3", 9)
    done = make_env(tmp_path, host.name)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    first, *looked, last = done.stderr.splitlines()
    wanted = " or ".join(f"Python {host.pythons[0]}" if i == 0 else text for i, text in enumerate(host.pythons))
    assert first == (
        f"make env: no usable Python found; HOST={host.name} (megatron-core {host.name}) needs {wanted}, with venv. "
        "Looked for:"
    )
    assert "  python3: is Python 3.9.9" in looked and f"  python{host.pythons[0]}: not found" in looked
    assert any(line.startswith(f"  {tmp_path}/pyenv/versions/{host.pythons[0]}.*/bin/python") for line in looked)
    assert last.endswith(f"make env HOST={host.name} PYTHON=/path/to/python{host.pythons[0]}")


def test_a_named_python_of_another_version_is_refused(tmp_path: Path) -> None:
    lay_python(tmp_path / "mine", 12)
    lay_python(tmp_path / "python3.10", 10)
    done = make_env(tmp_path, "0.12", PYTHON=str(tmp_path / "mine"))
    assert done.returncode == 1 and f"  {tmp_path}/mine: is Python 3.12.9" in done.stderr.splitlines()


def test_the_newest_of_pyenv_is_taken_before_another_version_on_the_path(tmp_path: Path) -> None:
    lay_python(tmp_path / "python3.11", 11)
    for patch in (9, 13):
        lay_python(tmp_path / f"pyenv/versions/3.10.{patch}/bin/python3.10", 10)
    assert f"asked {tmp_path}/pyenv/versions/3.10.13/bin/python3.10: -m venv" in make_env(tmp_path, "0.12").stdout


def test_an_unknown_host_is_refused(tmp_path: Path) -> None:
    done = make_env(tmp_path, "0.13")
    assert done.returncode == 1
    *others, newest = [host.name for host in HOSTS]
    assert done.stderr == f"make env: HOST=0.13 is unknown; use HOST={', '.join(others)} or {newest}, or swift\n"


def test_the_script_has_the_exact_megatron_that_it_installs_alone() -> None:
    assert f"'megatron-core{HOSTS[0].versions}'" in SCRIPT.read_text()


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_make_has_the_hosts_of_the_table(host: MegatronFamily) -> None:
    """The newest is the default, and its environment has no number."""
    make = shutil.which("make") or pytest.skip("there is no make")
    is_newest = host is HOSTS[-1]
    command = [make, "--dry-run", "--always-make", "env", *([] if is_newest else [f"HOST={host.name}"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    venv = ".venv" if is_newest else f".venv-{host.name}"
    assert f"make_env.sh {host.name} {venv} {venv}/.env-ready" in done.stdout
