"""Graders: each runs an answer to an exercise on real ranks and explains what is wrong with it.

`kit.check.exercise_4_1(reduce_scatter)` prints one line if the answer is right. Otherwise it raises
NotImplementedError for a stub, or ExerciseError for an answer that is not right yet. It returns
which parts of the exercise hold, as a float from 0 to 1, which is 1 if it does not raise.
`kit.check.credit(kit.check.exercise_4_1, reduce_scatter)` tries all parts, and does not raise.
With DDP_KIT_PROGRESS, each check adds a line to that file; see ddp_kit/progress_file.py.
"""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules

from ddp_kit.check.grader import EXERCISES, Credit, credit, only_message
from ddp_kit.pool.wire import messages
from ddp_kit.progress_file import in_order


def _register() -> None:
    """Import all modules here: each registers its exercises."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    # The module project_1 has the same name as the check in it, which is what learners call.
    globals().update({name: check for name, check in EXERCISES.items() if name in globals()})


if not messages.serving:  # a rank mostly needs those of the lesson that is checked
    _register()
_in_order = sorted(EXERCISES, key=lambda name: in_order(EXERCISES[name].exercise.number))
__all__ = ["credit", *_in_order]


def __getattr__(name: str) -> Callable[..., Credit]:
    if messages.serving and name.startswith("exercise_"):
        _register()
    if name in EXERCISES:
        return EXERCISES[name]
    near = ", ".join(sorted(get_close_matches(name, _in_order, 5)))
    raise only_message(AttributeError(f"kit.check has no {name}; similar names: {near or 'none'}"))


def __dir__() -> list[str]:
    return __all__  # without the modules that define them
