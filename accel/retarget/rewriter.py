"""Rewrites one module's syntax tree so that it reaches the selected device where its source says CUDA."""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import NoReturn, TypeVar

from accel.retarget.errors import UnknownSite
from accel.retarget.imports import ImportedNames
from accel.retarget.namespace import HELPERS_NAME, NAMESPACE_NAME
from accel.retarget.sites import LEFT_ALONE, Site, SiteRules

_TENSOR_TYPE = re.compile(r"\btorch\.cuda\.(\w+Tensor)\b")
# A text without blanks that names a CUDA device, module or backend: "cuda:%d", "torch.cuda.amp", "cpu:gloo,cuda:nccl".
_NAMES_CUDA = re.compile(r"^(?:\S+,)?(?:torch\.)?cuda(?:[:.,]\S*)?$")
_FIELD = "{}"
_F = TypeVar("_F", ast.FunctionDef, ast.AsyncFunctionDef)


class TensorTypeRewriter(ast.NodeTransformer):
    """Only texts like ``'torch.cuda.FloatTensor'``, which no redirection of ``torch.cuda`` reaches: tensors name their
    type by the device's own name."""

    def __init__(self, device_type: str) -> None:
        self._tensor = rf"torch.{device_type}.\1"

    def rewrite(self, tree: ast.Module) -> ast.Module:
        self.visit(tree)
        return tree

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            node.value = _TENSOR_TYPE.sub(self._tensor, node.value)
        return node


class Rewriter(ast.NodeTransformer):
    """One module's rewriting: ``tree = Rewriter(...).rewrite(tree)``. Docstrings are left as they are.

    A site of a kind outside ``rules``, or a form that is of no kind, raises UnknownSite.
    ``found`` counts what was rewritten. ``.is_cuda`` stays: it guards CUDA-only calls like ``record_stream``.
    """

    def __init__(self, device_type: str, rules: SiteRules, path: str) -> None:
        self.found: Counter[Site] = Counter()
        self._device_type = device_type
        self._rules = rules
        self._path = path
        self._names = ImportedNames()
        self._annotation_depth = 0
        self._guard_depth = 0  # inside how many try statements that catch a failing import
        # Host tensors are torch's own "torch.FloatTensor"; every other device stands in the middle.
        self._tensor_prefix = "torch." if device_type == "cpu" else f"torch.{device_type}."

    def rewrite(self, tree: ast.Module) -> ast.Module:
        self._names.collect(tree)
        self.visit(tree)
        return ast.fix_missing_locations(tree)

    # Imports

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for alias in node.names:
            if not _is_inside(alias.name, "torch.cuda"):
                statements.append(ast.Import([alias]))
            elif alias.asname is None:
                self._site(Site.IMPORT, node)
                statements.append(ast.Import([ast.alias("torch")]))
            else:
                self._site(Site.IMPORT_AS, node)
                statements.append(self._bind(alias.asname, alias.name.removeprefix("torch.cuda").removeprefix(".")))
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | list[ast.stmt]:
        module = node.module or ""
        if node.level or not _is_inside(module, "torch"):
            return node
        kept: list[ast.alias] = []
        bound: list[ast.stmt] = []
        for alias in node.names:
            path = f"{module}.{alias.name}"
            name = alias.asname or alias.name
            if module == "torch" and alias.name == "cuda":
                self._site(Site.FROM_TORCH, node)
                bound.append(self._bind(name, ""))
            elif _is_inside(module, "torch.cuda"):
                if alias.name == "*":
                    self._unknown(node, f"from {module} import *")
                self._site(Site.FROM_CUDA, node)
                bound.append(self._bind(name, path.removeprefix("torch.cuda.")))
            elif path.startswith("torch._C._cuda"):
                self._site(Site.BINDING, node)
                bound.append(self._bind(name, alias.name))
            else:
                kept.append(alias)
        if not bound:
            return node
        statements: list[ast.stmt] = [ast.ImportFrom(module, kept, 0), *bound] if kept else bound
        return [ast.copy_location(statement, node) for statement in statements]

    def _bind(self, name: str, path: str) -> ast.stmt:
        helper = "import_name" if self._guard_depth else "import_for_use"
        value = self._helper(helper, ast.Constant(path)) if path else self._namespace()
        return ast.Assign([ast.Name(name, ast.Store())], value)

    def visit_Try(self, node: ast.Try) -> ast.Try:
        guards = any(_catches_import_error(handler.type) for handler in node.handlers)
        self._guard_depth += guards
        node.body = self._statements(node.body)
        self._guard_depth -= guards
        node.handlers = [self.visit(handler) for handler in node.handlers]
        node.orelse = self._statements(node.orelse)
        node.finalbody = self._statements(node.finalbody)
        return node

    def _statements(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        visited = (self.visit(statement) for statement in statements)
        return [one for result in visited for one in (result if isinstance(result, list) else [result])]

    # Expressions

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        path = self._names.path(node)
        loading = isinstance(node.ctx, ast.Load)
        if path == "torch.cuda":
            if not loading:
                self._unknown(node, "torch.cuda is replaced or deleted")
            self._site(Site.NAMESPACE, node)
            return ast.copy_location(self._namespace(), node)
        if path is not None and path.startswith("torch._C._cuda"):
            self._site(Site.BINDING, node)
            return ast.copy_location(ast.Attribute(self._namespace(), node.attr, node.ctx), node)
        if node.attr == "cuda" and loading and path not in LEFT_ALONE and not self._names.is_foreign_module(node.value):
            self._unknown(node, f"{ast.unparse(node)} is taken without being called")
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return self._move(node, node.func)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
            return self._attribute_call(node, node.func.id)
        path = self._names.path(node.func)
        if path == "torch.device":
            return self._device_call(node)
        if path == "torch.get_device_module" and len(node.args) == 1 and _is_cuda_text(node.args[0]):
            self._site(Site.DEVICE_MODULE, node)
            return ast.copy_location(self._namespace(), node)
        self.generic_visit(node)
        return node

    def _move(self, node: ast.Call, func: ast.Attribute) -> ast.Call:
        """``x.cuda(device, non_blocking)`` is ``x.to(device, non_blocking=…)`` for tensors, modules and storages."""
        if _is_inside(self._names.path(func) or "", "torch"):
            self._unknown(node, f"{ast.unparse(func)} is called as a function")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        if (
            len(node.args) > 2
            or len(keywords) < len(node.keywords)
            or any(isinstance(argument, ast.Starred) for argument in node.args)
        ):
            self._unknown(node, f"{ast.unparse(node)} passes arguments that are not spelled out")
        self._site(Site.MOVE, node)
        device = node.args[0] if node.args else keywords.pop("device", None)
        if len(node.args) == 2:
            keywords["non_blocking"] = node.args[1]
        target = ast.Constant(self._device_type) if device is None else self._helper("device", self.visit(device))
        moved = ast.Call(
            ast.copy_location(ast.Attribute(self.visit(func.value), "to", ast.Load()), func),
            [target],
            [ast.keyword(name, self.visit(value)) for name, value in keywords.items()],
        )
        return ast.copy_location(moved, node)

    def _attribute_call(self, node: ast.Call, function: str) -> ast.expr:
        """``getattr`` and its kin with a literal name; with a computed one the object is rewritten like any other."""
        name = node.args[1] if len(node.args) > 1 else None
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            self.generic_visit(node)
            return node
        owner = self._names.path(node.args[0])
        reading = function in ("getattr", "hasattr")
        if name.value == "cuda" and owner == "torch" and reading:
            self._site(Site.GETATTR, node)
            return ast.copy_location(self._namespace() if function == "getattr" else ast.Constant(True), node)
        if owner == "torch._C" and name.value.startswith("_cuda") and reading:
            self._site(Site.BINDING, node)
            node.args[0] = ast.copy_location(self._namespace(), node.args[0])
        elif name.value == "cuda" and f"{owner}.cuda" not in LEFT_ALONE:
            if function != "hasattr":
                self._unknown(node, ast.unparse(node))
            self._site(Site.HAS_MOVE, node)
            node.args[1] = ast.copy_location(ast.Constant("to"), name)
        # The name itself is settled; a plain visit would take "cuda" for a device.
        node.args = [argument if argument is node.args[1] else self.visit(argument) for argument in node.args]
        return node

    def _device_call(self, node: ast.Call) -> ast.expr:
        """``torch.device("cuda", index)``, where a namespace may answer ``current_device()`` with a device."""
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        kind = node.args[0] if node.args else keywords.get("type")
        index = node.args[1] if len(node.args) > 1 else keywords.get("index")
        if index is None or kind is None or not _is_cuda_text(kind):
            self.generic_visit(node)
            return node
        self._site(Site.DEVICE_CALL, node)
        return ast.copy_location(self._helper("device", self.visit(index)), node)

    # Text

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if not _is_text(node.value):  # a text that stands alone is documentation
            self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str) or "cuda" not in node.value:
            return node
        text = node.value
        if text == "cuda":
            self._site(Site.LITERAL, node)
            text = self._device_type
        elif re.fullmatch(r"cuda:\d+", text):
            self._site(Site.INDEXED_LITERAL, node)
            text = self._device_type + text.removeprefix("cuda")
        elif _TENSOR_TYPE.search(text):
            text = self._tensor_types(text, node)
        elif _NAMES_CUDA.match(text) and not self._annotation_depth and text not in self._rules.labels:
            self._unknown(node, repr(text))
        return ast.copy_location(ast.Constant(text), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        first, *rest = node.values or [ast.Constant("")]
        if isinstance(first, ast.Constant) and first.value == "cuda:" and len(rest) == 1:
            field = rest[0]
            if isinstance(field, ast.FormattedValue) and field.conversion == -1 and field.format_spec is None:
                self._site(Site.INDEXED_FSTRING, node)
                first.value = f"{self._device_type}:"
                field.value = self._helper("index", self.visit(field.value))
                return node
        shape = "".join(str(part.value) if isinstance(part, ast.Constant) else _FIELD for part in node.values)
        if _NAMES_CUDA.match(shape) and not _TENSOR_TYPE.search(shape):
            self._unknown(node, ast.unparse(node))
        for part in node.values:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                part.value = self._tensor_types(part.value, node)
            else:
                self.visit(part)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if {"cuda", self._device_type} <= keys:
            self._unknown(node, f"a table with the keys 'cuda' and '{self._device_type}', which would become one")
        self.generic_visit(node)
        return node

    def _tensor_types(self, text: str, node: ast.expr) -> str:
        replaced, count = _TENSOR_TYPE.subn(lambda match: self._tensor_prefix + match[1], text)
        if count:
            self._site(Site.TENSOR_TYPE, node)
        return replaced

    # Annotations: a quoted type is not executed, so it cannot name CUDA in an unknown way.

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = self._annotation(node.annotation)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.target = self.visit(node.target)
        node.value = self.visit(node.value) if node.value is not None else None
        node.annotation = self._annotation(node.annotation) or node.annotation
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        return self._function(node)

    def _function(self, node: _F) -> _F:
        returns, node.returns = self._annotation(node.returns), None
        self.generic_visit(node)
        node.returns = returns
        return node

    def _annotation(self, annotation: ast.expr | None) -> ast.expr | None:
        if annotation is None:
            return None
        self._annotation_depth += 1
        visited: ast.expr = self.visit(annotation)
        self._annotation_depth -= 1
        return visited

    # Helpers

    def _namespace(self) -> ast.Name:
        return ast.Name(NAMESPACE_NAME, ast.Load())

    def _helper(self, name: str, argument: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(ast.Name(HELPERS_NAME, ast.Load()), name, ast.Load()), [argument], [])

    def _site(self, site: Site, node: ast.expr | ast.stmt) -> None:
        if site not in self._rules.kinds:
            self._unknown(node, f"{site.value}, a form that this version was not known to contain")
        self.found[site] += 1

    def _unknown(self, node: ast.expr | ast.stmt, form: str) -> NoReturn:
        raise UnknownSite(
            f"{self._path}, line {node.lineno}: this reaches CUDA in a way that cannot be pointed at device "
            f"'{self._device_type}': {form}. Take the device from a tensor or an argument, or write "
            f"torch.cuda.X, 'cuda' or x.cuda() in full."
        )


def _is_inside(path: str, package: str) -> bool:
    return path == package or path.startswith(package + ".")


def _catches_import_error(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    names = {one.id for one in kinds if isinstance(one, ast.Name)}
    return None in kinds or not names.isdisjoint({"ImportError", "Exception", "BaseException"})


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_cuda_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cuda"
