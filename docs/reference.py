"""The reference's entries: signatures and docstrings of public names, as MyST directives.

A block `{api}` of a page in docs/api lists names, each with its package: `ddp_kit.plot.timeline`.
Source files are read and not imported, because the site is built without PyTorch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```\{api\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# "rank: whose pass", also after a sentence in the same paragraph; "rtol, atol: allow".
ITEM = re.compile(r"(?:^|(?<=[.;] ))([a-z_]+(?:, [a-z_]+)*): ")
SETTINGS = runpy.run_path(str(ROOT / "ddp_kit/settings.py"))  # it imports nothing
ERROR = re.compile(r"(?<![\w.`])([A-Z]\w+Error)\b")

Node = ast.FunctionDef | ast.ClassDef | ast.Assign


@functools.cache
def parsed(file: Path) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(file.read_text("utf-8"))


def find(name: str) -> Node:
    """Return what defines a public name, through the imports of its package."""
    package, _, last = name.rpartition(".")
    file = ROOT / package.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
            return node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == last:
            return node
        if isinstance(node, ast.ImportFrom) and last in [alias.name for alias in node.names]:
            return find(f"{node.module}.{last}")
    raise LookupError(f"docs/api names {name}, which does not exist")


def is_a(node: ast.FunctionDef | ast.ClassDef, *decorators: str) -> bool:
    """Return whether a definition has one of these decorators."""
    return any(ast.unparse(one).startswith(decorators) for one in node.decorator_list)


def signature(node: Node) -> str:
    """Return how it is called: "(n: int = 1) -> float"; "" for what nobody calls."""
    if isinstance(node, ast.FunctionDef):
        own = node.args.args[:1] and node.args.args[0].arg == "self"
        text = ast.unparse(node.args)
        text = re.sub(r"^self(, )?", "", text) if own else text
        text = re.sub(r"\bsettings\.([A-Z_]+)", lambda name: repr(SETTINGS[name[1]]), text)
        return f"({text})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    if isinstance(node, ast.ClassDef):
        if is_a(node, "dataclass"):
            fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
            fields = [re.sub(r" = field\(.*", "", one) for one in fields]
            return f"({', '.join(fields)})"
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                return signature(one).removesuffix(" -> None")
    return ""


def described(docstring: str) -> str:
    """Return a docstring as Markdown: what it says of an argument becomes an item of a list."""
    found = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        if paragraph.startswith("    "):
            found.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
            continue
        parts = ITEM.split(" ".join(line.strip() for line in paragraph.split("\n")))
        items = [
            f"* **{n}**: {text.strip()}" for n, text in zip(parts[1::2], parts[2::2], strict=True)
        ]
        found.append("\n".join([parts[0].strip(), "", *items]).strip())
    return ERROR.sub(link_to_error, "\n\n".join(found))


def link_to_error(match: re.Match[str]) -> str:
    """Return an exception of the kit as a link to its entry."""
    names = {
        node.name
        for node in ast.walk(parsed(ROOT / "ddp_kit/errors.py"))
        if isinstance(node, ast.ClassDef)
    }
    return f"{{py:exc}}`~ddp_kit.{match[1]}`" if match[1] in names - {"RunError"} else match[1]


@functools.cache
def lessons() -> dict[str, str]:
    """Return the code of each lesson, with what it imports, by the name of its notebook."""
    found = {}
    for path in sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        module = ROOT / f"ddp_kit/lessons/_{path.stem.partition('_')[2]}.py"
        found[path.name] = "\n".join([*code, module.read_text("utf-8") if module.exists() else ""])
    return found


def used_in(name: str) -> str:
    """Return the first lessons in which a name is used, as links; "" if there is none."""
    package, _, last = name.rpartition(".")
    alias = package.rpartition(".")[2].replace("ddp_kit", "kit")
    use = re.compile(rf"\b{alias}\.{last}\b|from {package} import \(?[^)]*?\b{last}\b")
    links = [f"[{n[:2]}](../../notebooks/{n})" for n, code in lessons().items() if use.search(code)]
    more = f" and {len(links) - 5} more" if len(links) > 5 else ""
    return f"Used in lesson {', '.join(links[:5])}{more}." if links else ""


def directive(kind: str, argument: str, text: str, fence: int) -> str:
    """Return a directive of Sphinx's domain for Python."""
    ticks = "`" * fence
    return f"{ticks}{{py:{kind}}} {argument}\n{text}\n{ticks}"


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the entries of a class's public methods and properties."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name[0] != "_" and ast.get_docstring(one):
            kind = "property" if is_a(one, "property", "cached_property") else "method"
            argument = one.name + (signature(one) if kind == "method" else "")
            yield directive(kind, argument, described(ast.get_docstring(one)), 4)


def entry(name: str) -> str:
    """Return the entry of a public name."""
    node = find(name)
    if isinstance(node, ast.Assign):
        return directive("data", name, f"```text\n{ast.unparse(node)}\n```\n\n{used_in(name)}", 5)
    text = [described(ast.get_docstring(node) or ""), used_in(name)]
    if isinstance(node, ast.FunctionDef):
        return directive("function", f"{name}{signature(node)}", "\n\n".join(text), 5)
    kind = "exception" if name.endswith("Error") else "class"
    argument = name if kind == "exception" else f"{name}{signature(node)}"
    return directive(kind, argument, "\n\n".join([*text, *members(node)]), 5)


def expanded(page: str) -> str:
    """Return a page of docs/api with the entries of the names that its blocks list."""
    return BLOCK.sub(lambda block: "\n\n".join(map(entry, block[1].split())), page)
