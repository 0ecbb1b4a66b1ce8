"""Write docs/reference/names.md: every name of the reference with its signature and first sentence."""

import importlib
import inspect
import re
from pathlib import Path

import lightning_gnnscale

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
PAGE = FOLDER / "names.md"
DIRECTIVE = re.compile(r"^::: (\S+)\n    options: \{heading: (gs\.\S+), toc_label: \w+\}$")
HEAD = """# Every name

The public names with their arguments, and what they are in one sentence; `gs` is `lightning_gnnscale`. The other pages
of the reference tell every argument, and are built (`make docs`); `help(gs.partition)` says the same. The file
in brackets is where a name is written, below `lightning_gnnscale/`. This page is made by `python docs/names.py`.
"""


def page() -> str:
    """Return the page, from the directives of the other pages and the docstrings that they name."""
    told = [HEAD]
    listed = re.findall(r": reference/(\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    for name in listed:
        if name == PAGE.stem:
            continue
        text = (FOLDER / f"{name}.md").read_text()
        title = text.splitlines()[0].removeprefix("# ")
        told.append(f"\n## [{title}]({name}.md)\n")
        for block in text.split("\n\n"):
            heading = re.fullmatch(r"## (.+)", block.strip())
            found = DIRECTIVE.match(block.strip())
            if heading:
                told.append(f"\n### {heading[1]}\n")
            elif found:
                told.append(_entry(*found.groups()))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(told)) + "\n"


def _entry(path: str, shown: str) -> str:
    """Return the line of a name: what is typed, its first sentence, its file."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    # the docstring in one line, up to the first full stop that ends a sentence
    text = " ".join(inspect.cleandoc(value.__doc__).split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`\"])", text)[0].rstrip(":.")
    file = Path(inspect.getsourcefile(inspect.unwrap(value))).relative_to(Path(lightning_gnnscale.__file__).parent)
    return f"- **`{shown}{_arguments(value)}`**: {sentence} [`{file}`]"


def _arguments(value) -> str:
    """Return the arguments without their types, "" of what is not called."""
    if inspect.isclass(value) and (issubclass(value, Exception) or getattr(value, "_is_protocol", False)):
        return ""
    parameters = []
    signature = inspect.signature(value)
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not inspect.Parameter.empty and not isinstance(default, str | int | float | tuple | None):
            parameter = parameter.replace(default=_Named(default))
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty))
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Named:
    """A default that is neither a number nor a word, shown by its type: `Threads(...)`."""

    def __init__(self, value):
        self.value = value

    def __repr__(self) -> str:
        if repr(self.value) == "<factory>":  # of a dataclass: made for each object
            return "..."
        named = getattr(self.value, "__name__", None)
        return named or f"{type(self.value).__name__}(...)"


if __name__ == "__main__":
    PAGE.write_text(page())
