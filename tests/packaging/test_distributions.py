"""What is built and installed is what is in the tree; the wheel alone does what the README shows."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

LOAD_ALL = """
import sys
from importlib.metadata import distribution
from pathlib import Path

import kvtier

assert Path(kvtier.__file__).is_relative_to(sys.prefix), kvtier.__file__
assert Path(kvtier.__file__).with_name("py.typed").is_file()
found = distribution("kvtier")
assert Path(str(found.locate_file("kvtier"))).is_relative_to(sys.prefix)
for entry in found.entry_points:
    print(entry.group, entry.name, entry.value, bool(entry.load()))
"""


def build(source, folder, *kinds):
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *kinds]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "-t", "sdist", "-t", "wheel")
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with this wheel in it; what the wheel needs comes from the environment that runs this test."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    Path(paths["purelib"], "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--ignore-installed", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def run(command, folder):
    """Run a command in an empty folder, with nothing of the tree on the path."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "KVTIER_CONFIG")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**kept, "KVTIER_CACHE_DIR": str(folder / "cache"), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )


def names_in(path):
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name for name in archive.namelist() if not name.endswith("RECORD")}
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_wheel_has_every_file_of_the_package(wheel):
    tree = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("kvtier/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = names_in(wheel)
    assert {name for name in found if name.startswith("kvtier/")} == tree
    assert "kvtier/py.typed" in found
    assert any(name.endswith("licenses/LICENSE") for name in found)
    assert not [name for name in found if not name.startswith(("kvtier/", "kvtier-"))]  # no tests, no docs


def test_the_source_distribution_builds_the_same_wheel(built, wheel, tmp_path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build(source, tmp_path / "again", "-t", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes()
    assert {"Makefile", "constraints.txt", "mkdocs.yml", "README.md", "LICENSE"} <= names_in(archive)


def test_the_version_has_one_source(wheel, installed, tmp_path):
    version = PROJECT["version"]
    assert wheel.name == f"kvtier-{version}-py3-none-any.whl"
    said = run([installed / "python", "-c", "import kvtier; print(kvtier.__version__)"], tmp_path)
    assert said.stdout.strip() == version, said.stderr
    said = run([installed / "kvtier", "--version"], tmp_path)
    assert said.stdout.strip() == f"kvtier {version}", said.stderr
    elsewhere = [path for path in ROOT.glob("kvtier/**/*.py") if version in path.read_text(encoding="utf-8")]
    assert elsewhere == []


def test_every_entry_point_loads_from_the_wheel(installed, tmp_path):
    done = run([installed / "python", "-c", LOAD_ALL], tmp_path)
    assert done.returncode == 0, done.stderr
    declared = {
        f"{group} {name} {value} True"
        for group, entries in (*PROJECT["entry-points"].items(), ("console_scripts", PROJECT["scripts"]))
        for name, value in entries.items()
    }
    assert set(done.stdout.splitlines()) == declared


@pytest.mark.parametrize("program", [["kvtier"], ["python", "-m", "kvtier"]], ids=" ".join)
def test_the_program_starts(installed, tmp_path, program):
    done = run([installed / program[0], *program[1:], "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    done = run([installed / program[0], *program[1:], "no-such-command"], tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_readme_runs_from_the_wheel(installed, tmp_path):
    blocks = PYTHON_BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    done = run([installed / "python", "-W", "error", program], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not os.environ.get("KVTIER_LONG"), reason="asks the package index; KVTIER_LONG=1 runs it")
@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_each_extra_resolves_with_the_torch_that_is_here(wheel, extra):
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", "-", "-c", str(ROOT / "constraints.txt"), f"{wheel}[{extra}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]}
    assert "torch" in names
    assert not [name for name in names if name.startswith(("nvidia", "cuda"))]  # none behind one's back
