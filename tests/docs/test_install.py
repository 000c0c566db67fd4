"""The package installs as README, docs/install.md and the notebooks say, from a clone and from the repository."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from lowmem_grpo.engines.vllm.installed import HIGHEST, LOWEST

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINKS = runpy.run_path(str(ROOT / "docs" / "make_links.py"))
ROWS = re.findall(r"^\| ([\d.]+)(?: to ([\d.]+))? \| ([\d.]+) \|$", PAGE, re.MULTILINE)
WHERE = "import lowmem_grpo; print(lowmem_grpo.__file__, lowmem_grpo.GRPOConfig.__name__)"
CELL = "from IPython.core.interactiveshell import InteractiveShell as Shell; import sys; " \
       "Shell.instance().run_cell(sys.argv[1]).raise_error(); " + WHERE


def run(*words: str, cwd: Path, **more: str) -> str:
    """What a command prints; its error fails the test. It never asks the network, and installs no dependencies."""
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1",
               "GIT_CONFIG_GLOBAL": os.devnull}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")}
    done = subprocess.run(words, cwd=cwd, env=kept | offline | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def fresh_python(folder: Path) -> str:
    """The Python of a new environment that has all that the package needs, without the package."""
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    (Path(paths["purelib"]) / "needed.pth").write_text(sysconfig.get_paths()["purelib"])
    return str(folder / "bin" / "python")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the default name, as it is now."""
    place = tmp_path / "around" / "lowmem_grpo"
    place.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "lowmem_grpo", place / "lowmem_grpo", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "notebooks").mkdir()
    return place


@pytest.mark.slow
def test_a_clone_in_the_working_folder_does_not_hide_its_editable_install(clone: Path, tmp_path: Path) -> None:
    python = fresh_python(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--editable", str(clone), cwd=tmp_path)
    for folder in (clone.parent, clone, tmp_path):
        assert run(python, "-c", WHERE, cwd=folder) == f"{clone / 'lowmem_grpo' / '__init__.py'} GRPOConfig\n"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["around/lowmem_grpo/notebooks", "around"])
def test_a_notebook_installs_the_clone_around_or_below_it(folder: str, clone: Path, tmp_path: Path) -> None:
    python = fresh_python(tmp_path / "venv")
    said = run(python, "-c", CELL, first_cell(NOTEBOOKS[0]), cwd=tmp_path / folder)
    assert f"lowmem_grpo comes from {clone.as_uri()}\n" in said
    assert f"{tmp_path / 'venv'}" in said.splitlines()[-1]
    again = run(python, "-c", CELL, first_cell(NOTEBOOKS[0]), cwd=tmp_path / folder)
    assert f"lowmem_grpo comes from {tmp_path / 'venv'}" in again  # and the second time nothing is installed


@pytest.mark.slow
def test_a_notebook_without_a_clone_installs_from_the_repository(clone: Path, tmp_path: Path) -> None:
    for words in (["init", "-q"], ["add", "."],
                  ["-c", "user.name=me", "-c", "user.email=me@here", "commit", "-qm", "all"]):
        run("git", *words, cwd=clone)
    address = PROJECT["urls"]["Repository"]
    cell = first_cell(NOTEBOOKS[0])
    assert cell.count(f"git+{address}") == 1
    here = f"file://localhost{quote(str(clone))}"
    said = run(fresh_python(tmp_path / "venv"), "-c", CELL, cell.replace(address, here), cwd=tmp_path)
    assert f"lowmem_grpo comes from git+{here}\n" in said and str(tmp_path / "venv") in said.splitlines()[-1]


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(clone: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--wheel-dir", str(tmp_path), str(clone), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {path.relative_to(clone).as_posix() for path in (clone / "lowmem_grpo").rglob("*") if path.is_file()}
    assert {name for name in ours if not name.endswith(".md") or "/assets/" in name} == packed


def first_cell(path: Path) -> str:
    """The source of a notebook's first code cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])


def test_one_address_stands_everywhere() -> None:
    address = PROJECT["urls"]["Repository"]
    assert f'pip install "lowmem-grpo @ git+{address}"' in README and f"git+{address}" in PAGE
    for path in NOTEBOOKS:
        assert first_cell(path) == first_cell(NOTEBOOKS[0])
        badge = f"colab.research.google.com/github/{LINKS['named'](ROOT)}/blob/main/notebooks/{path.name})"
        assert path.read_text(encoding="utf-8").count(badge) == 1
    for path in LINKS["places"](ROOT):
        found = re.findall(r"github\.com/([\w-]+/lowmem_grpo)", path.read_text(encoding="utf-8"))
        assert {*found} == {LINKS["named"](ROOT)}, path


def test_a_release_is_refused_where_the_tag_is_of_another_version() -> None:
    done = subprocess.run([ROOT / ".ci" / "release", "v0.0.0"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"pyproject.toml says version {PROJECT['version']}" in done.stderr


def test_the_release_workflow_publishes_what_the_release_script_built() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert '.ci/release "$GITHUB_REF_NAME"' in [step.get("run") for step in jobs["build"]["steps"]]
    publish = jobs["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert not [step for job in jobs.values() for step in job["steps"] if "password" in step.get("with", {})]


def test_a_new_address_reaches_every_place(tmp_path: Path) -> None:
    for path in LINKS["places"](ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    LINKS["rename"](tmp_path, "somebody/something")
    assert LINKS["named"](tmp_path) == "somebody/something"
    for path in LINKS["places"](tmp_path):
        text = path.read_text(encoding="utf-8")
        assert "somebody/something" in text and "NOT_PUBLISHED_YET/" not in text


def test_the_page_lists_every_extra_and_all_takes_them_all() -> None:
    rows = [line.split(" | ")[0] for line in PAGE.partition("## Extras")[2].splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {*EXTRAS} - {"dev"}
    (everything,) = EXTRAS["all"]
    assert {*re.findall(r"\w+", everything.partition("[")[2])} == {*EXTRAS} - {"dev", "all"}


def test_the_table_of_vllm_has_the_versions_that_the_package_takes() -> None:
    lowest, highest = (".".join(map(str, numbers)) for numbers in (LOWEST, HIGHEST))
    assert EXTRAS["vllm"] == [f"vllm>={lowest},<{HIGHEST[0]}.{HIGHEST[1] + 1}; platform_system == 'Linux'"]
    assert (ROWS[0][0], ROWS[-1][1] or ROWS[-1][0]) == (lowest, highest)
    minors = [minor for first, last, _ in ROWS for minor in range(int(first[2:]), int((last or first)[2:]) + 1)]
    assert minors == list(range(LOWEST[1], HIGHEST[1] + 1))
    (oldest_torch,) = [re.split(">=|,", line)[1] for line in PROJECT["dependencies"] if line.startswith("torch")]
    assert ROWS[0][2].startswith(oldest_torch)


def resolved(folder: Path, *wanted: str) -> dict[str, str]:
    """The versions that pip would install in a fresh environment; the test is skipped where pip reaches no index."""
    report = folder / "report.json"
    venv.create(folder / "venv")
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv" / "bin" / "python"]
    words = [*pip, "install", "--dry-run", "--quiet", "--report", report, *wanted]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0 and re.search("(?i)connection|resolve host|network|timed out", done.stderr):
        pytest.skip("pip reaches no package index")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "does not provide the extra" not in done.stderr
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {metadata["name"].lower(): metadata["version"] for metadata in found}


@pytest.mark.slow
def test_every_extra_resolves_together_in_a_fresh_environment(tmp_path: Path) -> None:
    torch = f"torch=={version('torch').partition('+')[0]}"  # a torch that is not on the index for CPUs is gigabytes
    found = resolved(tmp_path, torch, f"{ROOT}[all]")
    lines = [line for name in EXTRAS if name not in ("all", "dev") for line in EXTRAS[name]]
    wanted = {re.split(r"[<>=; \[]", line)[0].lower() for line in lines}
    assert wanted <= {*found}, wanted - {*found}
    minor = int(found["vllm"].split(".")[1])
    (row,) = [row for row in ROWS if int(row[0][2:]) <= minor <= int((row[1] or row[0])[2:])]
    assert found["torch"].startswith(row[2])
