"""Problems are found by name, also by the names other packages give them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.errors import EXTRAS, InputError, missing_extra
from pointsman.evaluation import problem
from pointsman.evaluation.problem import complete, find_problem, problem_names

ROOT = Path(__file__).parents[2]
THEIRS = """\
from pointsman.evaluation.problem import Problem
from pointsman.spec import Spec

class TheirSpec(Spec):
    size: int = 3

PROBLEM = Problem(TheirSpec, print, print)
"""


@pytest.fixture
def their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package as pip installs it, with an entry point."""
    (tmp_path / "theirs_for_test.py").write_text(THEIRS)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pointsman.problems]\npuzzle = theirs_for_test:PROBLEM\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    problem._registered.cache_clear()
    yield
    problem._registered.cache_clear()
    find_problem.cache_clear()


@pytest.mark.usefixtures("their_package")
def test_other_packages_register_as_ours_do() -> None:
    assert set(problem_names()) == {"jobs", "live", "puzzle", "routing", "vidur"}
    assert complete("puzzle") == {"kind": "puzzle", "size": 3}
    assert complete({"kind": "jobs"})["num_gpus"] == 8


@pytest.mark.usefixtures("their_package")
def test_an_installed_package_does_not_need_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "_CHECKOUT", Path("nowhere"))
    assert "puzzle" in problem_names()


def test_a_module_without_a_problem_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be imported .*no attribute 'PROBLEM'"):
        find_problem("os.path")


@pytest.mark.parametrize("name", ["routing", "jobs", "live"])
def test_ours_have_presets(name: str) -> None:
    preset = find_problem(name).preset
    assert (ROOT / "pointsman" / "training" / "presets" / f"{preset}.yaml").is_file()


def test_a_problem_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; from pointsman.evaluation.problem import find_problem, problem_names; problem_names();"
        "print([name for name in sys.modules if name.startswith('pointsman.problems')]);"
        "find_problem('jobs'); print('pointsman.problems.live' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["[]", "False False"]


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imported_as = {"protobuf": "google"}
    for extra, packages in EXTRAS.items():
        wanted = [one.partition(">")[0] for one in project["optional-dependencies"][extra]]
        names = {imported_as.get(one, one.replace("-", "_")) for one in wanted if "[" not in one}
        assert names == set(packages)


def test_only_packages_of_extras_are_explained() -> None:
    found = missing_extra(ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"))
    assert str(found) == "package = 'torch': is not installed; pip install 'pointsman[train]'"
    assert missing_extra(ModuleNotFoundError("No module named 'pointsmen'", name="pointsmen")) is None
    assert missing_extra(AttributeError("no torch")) is None
