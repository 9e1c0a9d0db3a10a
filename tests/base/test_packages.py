"""The line that installs what is missing."""

import shlex

import pytest
from packaging.requirements import Requirement

from noloco_node.base.packages import pip_line


@pytest.mark.parametrize(("extra", "names"), [("data", {"datasets", "pyarrow"}), ("plot", {"matplotlib"})])
def test_it_names_packages_that_an_index_has(extra, names):
    pip, install, *packages = shlex.split(pip_line(extra).strip("`"))
    assert (pip, install) == ("pip", "install")
    assert {Requirement(package).name for package in packages} == names


def test_an_extra_of_sources_that_are_not_installed(monkeypatch):
    def not_installed(_name):
        raise __import__("importlib.metadata").metadata.PackageNotFoundError

    monkeypatch.setattr("noloco_node.base.packages.requires", not_installed)
    assert pip_line("data") == "`pip install '.[data]'` in its source folder"
