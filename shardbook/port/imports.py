"""Imports between the files of a project: what a name of another file stands for.

A file is read by itself first. Where one imports a name that another got from a CUDA library or a
compiled module, it is read once more, knowing that.
"""

import re
from pathlib import Path

from .reader import Reader
from .uses import Around, library

IMPORT = re.compile(r"^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)", re.MULTILINE)
ROUNDS = 4  # a name handed on through so many files


class Project:
    """Holds what is known of each file: the names it gives, the names it imports."""

    def __init__(self, files: list[Path]):
        self.paths = {str(p): p for p in files}
        self.modules = {_module(p) for p in files}
        self.gives: dict[str, dict] = {}  # module -> {name: Value}
        self.imports: dict[str, set] = {}  # file -> {(module, name)}
        self.origin: dict[str, str] = {}
        self.optional: set[str] = set()
        self.compiled: set[str] = set()
        self.told: dict[str, set] = {}  # file -> what it knew of others when it was read

    def around(self, file: str) -> Around:
        """What the other files tell this one."""
        wanted = self.imports.get(file, set())
        names = {(m, n): self.gives[m][n] for m, n in wanted if n in self.gives.get(m, {})}
        self.told[file] = self.known(wanted)
        heard = {library(v.data) for v in names.values()}
        origin = {name: place for name, place in self.origin.items() if name in heard}
        optional = self.optional & heard
        return Around(names, origin, optional, self.compiled, self.modules)

    def module(self, file: str) -> str:
        """The last part of a file's module name."""
        return _module(self.paths[file])

    def known(self, wanted: set[tuple[str, str]]) -> set[tuple[str, ...]]:
        """Which of these imports are of a CUDA library or a compiled module."""
        compiled = {name.rpartition(".")[2] for name in self.compiled}
        given = {(m, n) for m, n in wanted if n in self.gives.get(m, {})}
        return given | {(m, n, "compiled") for m, n in wanted if {m, n} & compiled}

    def skip(self, file: str, source: str) -> bool:
        """A file without a word of any rule: note its imports; whether it is read after all."""
        if file in self.imports:
            return False  # now something is known of what it imports
        wanted = self.imports[file] = set()
        for module, names in IMPORT.findall(source):
            for name in names.strip("()").split(","):
                wanted.add((module.rpartition(".")[2], name.split(" as ")[0].strip()))
        return True

    def learn(self, file: str, reader: Reader) -> None:
        """Note what a file that was read holds."""
        self.imports[file] = reader.imports
        self.compiled |= reader.builds
        given = {}
        for name, values in reader.scopes[0].items():
            known = [v for v in values if v.kind == "mod" and library(v.data)]
            if known and len(known) == len(values):
                given[name] = known[0]
        if given:
            self.gives[_module(Path(file))] = given
        for value in given.values():
            name = library(value.data)
            place = reader.origin.get(name, "")
            self.origin.setdefault(name, place if ":" in place else f"{file}:{place[5:]}")
            self.optional |= reader.optional & {name}

    def again(self):
        """The files to read once more, each after those that it imports from."""
        for _ in range(ROUNDS):
            waiting = []
            for file, wanted in self.imports.items():
                if self.known(wanted) - self.told.get(file, set()):
                    waiting.append(file)
            if not waiting:
                return
            for file in waiting:
                yield self.paths[file]


def _module(path: Path) -> str:
    """The last part of a file's module name: a package is called as its folder."""
    return path.parent.name if path.stem == "__init__" else path.stem
