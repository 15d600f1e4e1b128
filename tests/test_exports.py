"""The public names, and the directions in which modules import each other."""

from __future__ import annotations

import subprocess
import sys

import ddp_kit as kit


def test_public_names_are_sorted_and_exist():
    assert kit.__all__ == sorted(kit.__all__)
    for name in kit.__all__:
        assert getattr(kit, name) is not None


def test_every_error_is_a_kit_error():
    errors = [getattr(kit, name) for name in kit.__all__ if name.endswith("Error")]
    assert len(errors) == 18
    assert all(issubclass(error, kit.KitError) for error in errors)


def test_completion_offers_pictures_and_no_modules():
    assert dir(kit.plot) == sorted(kit.plot.__all__)


def test_completion_offers_graders_and_no_modules():
    assert dir(kit.check) == sorted(kit.check.__all__)
    graders = [name for name in kit.check.__all__ if name != "credit"]
    assert all(name.startswith(("exercise_", "project_")) for name in graders)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(kit, "no_such_name")


def test_importing_the_kit_loads_no_heavy_library():
    code = (
        "import sys, ddp_kit; "
        "print(sorted({'matplotlib', 'IPython', 'torchvision', 'ipywidgets'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
