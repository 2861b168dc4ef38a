"""What the names in one module's source stand for: ``th.cuda`` is ``torch.cuda`` after ``import torch as th``."""

from __future__ import annotations

import ast


class ImportedNames:
    """Local name -> dotted path, over every import statement of a module, at any depth.

    Scopes are not told apart: where a name is imported twice, the meaning inside torch wins, which is the careful one.
    """

    def __init__(self) -> None:
        # torch is torch even where no import statement says so (a star import, a name passed in).
        self._paths = {"torch": "torch"}
        self._modules: set[str] = set()

    def collect(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        self._modules.add(alias.name)
                        self._add(alias.asname, alias.name)
                    else:
                        root = alias.name.partition(".")[0]
                        self._modules.add(root)
                        self._add(root, root)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for alias in node.names:
                    self._add(alias.asname or alias.name, f"{module}.{alias.name}")

    def path(self, node: ast.expr) -> str | None:
        """The dotted path of ``a.b.c`` where ``a`` was imported; None for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        root = self._paths.get(node.id)
        if root is None:
            return None
        return ".".join([root, *reversed(parts)])

    def is_foreign_module(self, node: ast.expr) -> bool:
        """Whether ``node`` is, for certain, a module from outside torch: ``cupy.cuda`` after ``import cupy``."""
        path = self.path(node)
        return path in self._modules and path.partition(".")[0] != "torch"

    def _add(self, name: str, path: str) -> None:
        if not self._paths.get(name, "").startswith("torch"):
            self._paths[name] = path
