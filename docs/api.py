"""Write docs/api.txt: every public name with its signature, so that a change of the public API is seen.

    python docs/api.py            write the page
    python docs/api.py --check    exit 1 where the page is not the code's

Public is what a public package lists in its ``__all__``, and the public members of the classes among it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "api.txt"
LONGEST = 90  # characters of a signature on one line
PACKAGES = (
    "penstock",
    "penstock.schedule",
    "penstock.pipeline",
    "penstock.checkpoint",
    "penstock.launch",
    "penstock.errors",
)


def lines() -> Iterator[str]:
    """The page, line by line."""
    for package in PACKAGES:
        module = import_module(package)
        yield package
        for name in sorted(module.__all__):
            yield from described(name, getattr(module, name))
        yield ""


def described(name: str, thing: object) -> Iterator[str]:
    """A name with its signature, and a class with its public members."""
    if inspect.isclass(thing):
        bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
        yield f"    class {name}({bases}){_signature(thing) if not issubclass(thing, BaseException) else ''}"
        for member, found in members(thing):
            yield f"        {member}{_kind(found)}"
    elif callable(thing):
        yield f"    {name}{_signature(thing)}"
    else:
        yield f"    {name}" + (f" = {thing!r}" if isinstance(thing, int | float) else "")


def members(cls: type) -> Iterator[tuple[str, object]]:
    """The public members that penstock defines on a class or on a base of it, by name."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("penstock"):
            found |= {name: each for name, each in vars(base).items() if not name.startswith("_")}
    fields = getattr(cls, "__dataclass_fields__", {})
    for name in sorted(found.keys() - fields.keys()):
        yield name, found[name]


def _kind(member: object) -> str:
    if isinstance(member, classmethod | staticmethod):
        return _signature(member.__func__)
    if inspect.isfunction(member):
        return _signature(member)
    return ""


def _signature(thing: object) -> str:
    """Parameters as they are written in the code, one a line where they are many."""
    try:
        signature = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    parameters = [_parameter(each) for each in signature.parameters.values()]
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returns = signature.return_annotation
    end = "" if returns in (inspect.Signature.empty, None, "None") else f" -> {_annotation(returns)}"
    line = f"({', '.join(parameters)}){end}"
    if len(line) <= LONGEST:
        return line
    return "(" + "".join(f"\n                {each}," for each in parameters) + f"\n            ){end}"


def _parameter(each: inspect.Parameter) -> str:
    stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
    text = f"{stars}{each.name}"
    if each.annotation is not each.empty:
        text += f": {_annotation(each.annotation)}"
    if each.default is each.empty:
        return text
    shown = repr(each.default)
    return f"{text} = {'...' if ' at 0x' in shown or shown.startswith('<') else shown}"


def _annotation(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    return str(getattr(annotation, "__forward_arg__", None) or inspect.formatannotation(annotation))


def stale() -> bool:
    """Whether the page on disk is not the code's."""
    return not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != "\n".join(lines())


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if stale():
            sys.exit("docs/api.txt is not the code's: run python docs/api.py, and read the difference")
    else:
        PAGE.write_text("\n".join(lines()), encoding="utf-8")
