"""The release: the distributions, the workflows that build them, and the citation."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import pergrad
from tests.test_import import EXTRAS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def wheel_of(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def own_files() -> set[str]:
    source = ROOT / "src"
    paths = (p for p in (source / "pergrad").rglob("*") if p.is_file() and p.suffix != ".pyc")
    return {str(path.relative_to(source)) for path in paths}


@pytest.mark.slow
def test_wheel_has_every_file_of_the_package_and_no_other(dist: Path) -> None:
    names = set(zipfile.ZipFile(wheel_of(dist)).namelist())
    packaged = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packaged == own_files()
    assert "pergrad/py.typed" in packaged


@pytest.mark.slow
def test_wheel_needs_torch_and_nothing_else(dist: Path) -> None:
    wheel = zipfile.ZipFile(wheel_of(dist))
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_string(wheel.read(path).decode())
    assert metadata["Version"] == pergrad.__version__
    always = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert [re.match(r"[\w-]+", r)[0] for r in always] == ["torch"]  # type: ignore[index]
    assert {"audit", "bench", "dev", "docs"} <= {*metadata.get_all("Provides-Extra", [])}


@pytest.mark.slow
def test_installed_wheel_imports_without_extras_and_knows_its_version(
    dist: Path, tmp_path: Path
) -> None:
    home = tmp_path / "fresh"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel_of(dist))], check=True
    )
    # torch is large: this environment's own is lent, after the fresh one's packages.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    code = "import sys, torch; had = {*sys.modules}; import pergrad; "
    code += "print(pergrad.__file__, *({*sys.modules} - had))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    path, *modules = done.stdout.split()
    assert Path(path).is_relative_to(site)
    assert {name.partition(".")[0] for name in modules}.isdisjoint(EXTRAS)
    command = [home / "bin" / "pergrad", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pergrad", pergrad.__version__]


@pytest.mark.slow
def test_sdist_has_what_it_takes_to_test_and_document(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "pyproject.toml LICENSE README.md CITATION.cff Makefile constraints.txt mkdocs.yml conftest.py"
    wanted += " constraints-floor.txt constraints-outside.txt"
    assert {*wanted.split(), "docs/index.md", "tests/support.py", "src/pergrad/py.typed"} <= names
    assert not [name for name in names if name.startswith((".github", "site/", ".venv"))]


def test_citation_has_what_its_format_requires_and_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == pergrad.__version__
    assert all("name" in author or "family-names" in author for author in citation["authors"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_targets_that_the_makefile_has(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for step in steps:
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
            assert target in targets


def test_tests_docs_and_release_have_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "id-token: write" in text  # no password is stored anywhere
    assert "twine check --strict" in text


def test_changelog_has_a_section_for_this_version_or_for_what_is_to_come() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert "Unreleased" in headings or pergrad.__version__ in headings
