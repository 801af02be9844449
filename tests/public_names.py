"""What other people's programs may rely on: names, signatures and options, one a line.

    python -m tests.public_names > tests/public_names.txt

The names are those of the API reference in ``docs/api``. Everything is read from the source, so that neither
torch nor a framework is needed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

import packer
from cli.main import cli

ROOT = Path(__file__).resolve().parents[1]
Definition = ast.ClassDef | ast.FunctionDef


def main() -> None:
    print("\n".join(lines()))  # noqa: T201


def lines() -> list[str]:
    """Return the lines of the file."""
    return [*_names(), *_options(cli, "packer")]


def _names() -> Iterator[str]:
    """Yield every name of the reference with its signature; of classes, their public members, too."""
    definitions = _definitions()
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^::: (packer\.[\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            path, _, last = name.rpartition(".")
            found = definitions.get(last, {})
            if not found:  # a module: all that it defines
                yield name
                continue
            home = next((module for module in found if module.startswith(path)), min(found))
            yield from _of(found[home], _shortest(name))


def _shortest(name: str) -> str:
    """Return the shortest name that the package exports it under: ``packer.PlanLoader``."""
    parts = name.split(".")
    if parts[-1] in packer.__all__:
        return f"packer.{parts[-1]}"
    for depth in range(2, len(parts)):
        file = ROOT.joinpath(*parts[:depth], "__init__.py")
        if file.is_file() and f'"{parts[-1]}"' in file.read_text(encoding="utf-8"):
            return ".".join([*parts[:depth], parts[-1]])
    return name


def _definitions() -> dict[str, dict[str, Definition]]:
    """Return the classes and functions of the package by name, then by module."""
    found: dict[str, dict[str, Definition]] = {}
    for file in sorted((ROOT / "packer").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                found.setdefault(node.name, {})[module] = node
    return found


def _of(node: Definition, name: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield f"{name}{_signature(node)}"
        return
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"class {name}({bases})"
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and (member.name == "__init__" or member.name[0] != "_"):
            kinds = {ast.unparse(decorator) for decorator in member.decorator_list}
            is_value = bool(kinds & {"property", "cached_property"})
            returned = f" -> {ast.unparse(member.returns)}" if member.returns else ""
            yield f"{name}.{member.name}{returned if is_value else _signature(member)}"
        elif isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            yield f"{name}.{ast.unparse(member)}"


def _signature(node: ast.FunctionDef) -> str:
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returned}"


def _options(command: click.Command, name: str) -> Iterator[str]:
    """Yield every command with its arguments and options."""
    if isinstance(command, click.Group):
        for sub in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), sub)
            assert found is not None
            yield from _options(found, f"{name} {sub}")
        return
    for parameter in command.params:
        names = "/".join([*parameter.opts, *parameter.secondary_opts])
        choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
        kind = "|".join(map(str, choices)) or parameter.type.name
        required = " (required)" if parameter.required else ""
        several = " (repeatable)" if getattr(parameter, "multiple", False) or parameter.nargs == -1 else ""
        is_flag = getattr(parameter, "is_flag", False)
        yield f"{name} {names}{'' if is_flag else ' ' + kind}{required}{several}"


if __name__ == "__main__":
    main()
