"""The lines that say how to install what is missing."""

import shlex
import sys

from noloco_node.base.extras import pip_install


def test_an_extra_is_installed_by_its_packages_into_this_python():
    line = shlex.split(pip_install("data"))
    assert line[:4] == [sys.executable, "-m", "pip", "install"]
    assert sorted(package.split(">")[0] for package in line[4:]) == ["datasets", "pyarrow"]


def test_a_package_is_installed_in_the_version_that_this_one_needs():
    assert shlex.split(pip_install("hivemind"))[4:] == ["hivemind==1.1.12"]


def test_a_name_that_is_not_required_stays_as_it_is():
    assert shlex.split(pip_install("zstandard"))[4:] == ["zstandard"]
