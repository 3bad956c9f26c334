"""The source itself: a class name means one thing.

Cycles and layers of imports are import-linter's (`make lint-imports`).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("services", "router", "engine", "kvstore", "shared", "bench", "zoo")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def lines_of_classes(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield the name and line of each class at module level or in a class.

    Classes within functions are local helpers, and do not count.
    """
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
        if isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With):
            yield from lines_of_classes(node.body)
        if isinstance(node, ast.If | ast.Try):
            yield from lines_of_classes(node.orelse)
        if isinstance(node, ast.Try):
            yield from lines_of_classes([one for each in node.handlers for one in each.body])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_class_name_stands_for_one_thing() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for name, line in lines_of_classes(tree.body):
            places[name].append(f"{relative(path)}:{line}")
    twice = [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]
    assert not twice, f"{len(twice)} class names are used twice:\n" + "\n".join(twice)


def test_classes_are_found_wherever_they_stand_but_for_functions() -> None:
    source = """
class A:
    class B: ...
if x:
    class C: ...
else:
    class D: ...
try:
    class E: ...
except ValueError:
    class F: ...
def function():
    class Local: ...
"""
    assert [name for name, _ in lines_of_classes(ast.parse(source).body)] == list("ABCDEF")
