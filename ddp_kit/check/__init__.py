"""Graders: each runs an answer to an exercise on real ranks and explains what is wrong with it.

`kit.check.exercise_4_1(reduce_scatter)` prints one line if the answer is right. Otherwise it raises
NotImplementedError for a stub, or ExerciseError for an answer that is not right yet. It returns
which parts of the exercise hold, as a float from 0 to 1, which is 1 if it does not raise.
`kit.check.credit(kit.check.exercise_4_1, reduce_scatter)` tries all parts, and does not raise.
With DDP_KIT_PROGRESS, each check adds a line to that file; see ddp_kit/progress_file.py.
"""

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules
from typing import Any

from ddp_kit.check import hints
from ddp_kit.check.grader import EXERCISES, only_message
from ddp_kit.check.grader import credit as credit
from ddp_kit.progress_file import in_order


def __getattr__(name: str) -> Any:
    if name.startswith("exercise_"):  # those of one lesson load in a moment, all of them do not
        import_module(f"{__name__}.estimate")
        if module := _modules().get(name.split("_")[1]):
            import_module(f"{__name__}.{module}")
    if name == "__all__" or (name not in EXERCISES and not name.startswith("_")):
        _register()
    if name == "__all__":
        return ["credit", *_in_order()]
    if name in EXERCISES:
        return EXERCISES[name]
    near = ", ".join(sorted(get_close_matches(name, _in_order(), 5)))
    raise only_message(AttributeError(f"kit.check has no {name}; similar names: {near or 'none'}"))


def __dir__() -> list[str]:
    return __getattr__("__all__")  # without the modules that define them


@cache
def _modules() -> dict[str, str]:
    """Return the module of each lesson, by the lesson's number."""
    names = {file.name for file in files(__package__).iterdir() if file.name.endswith(".ini")}
    return {
        section.partition(".")[0]: name.removesuffix(".ini")
        for name in names - {hints.ESTIMATES}
        for section in hints.read(name)
    }


def _register() -> None:
    """Import all modules here: each registers its exercises."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def _in_order() -> list[str]:
    return sorted(EXERCISES, key=lambda name: in_order(EXERCISES[name].exercise.number))
