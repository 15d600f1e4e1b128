"""Lessons, one after the other: `torchrun every_lesson.py FOLDER NAME...`.

Each writes its trace into a folder of its own in FOLDER. A name may have options behind it, as in
"partitioned_sgd --epochs 0".
"""

import sys
from importlib import import_module
from pathlib import Path

folder, *lessons = sys.argv[1:]
for lesson in lessons:
    name, *options = lesson.split()
    options += ["--trace", str(Path(folder, name))]
    import_module(f"ddp_kit.lessons.{name}").main(options)
