"""The import hook: finds modules of the named libraries, rewrites them, and remembers the result on disk."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, NamespaceLoader, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from accel.contract import Accelerator
from accel.retarget.code_cache import CodeCache
from accel.retarget.errors import RetargetError
from accel.retarget.namespace import HELPERS_NAME, NAMESPACE_NAME, DeviceNamespace, SiteHelpers
from accel.retarget.rewriter import Rewriter, TensorTypeRewriter
from accel.retarget.sites import USER_RULES, SiteRules, megatron_rules

MEGATRON = "megatron.core"


Patch = Callable[[ModuleType], None]


def install(
    accelerator: Accelerator, *, extra_modules: Sequence[str] = (), after_import: Mapping[str, Patch] | None = None
) -> None:
    """Point ``megatron.core`` and the modules under ``extra_modules`` at ``accelerator``, for the life of the process.

    Does nothing for CUDA. Where the vendor's own wrapper redirects ``torch.cuda`` (``Accelerator.redirects_cuda``),
    only the names of tensor types are rewritten. Must come before the first import of those modules, in every process.
    Calling it again for the same accelerator is fine and may add modules. torch itself is never touched.

    ``after_import`` maps a module to what is called with it when its code has run, before anyone imports from it.

    Raises AcceleratorError: one of the modules is already imported, another accelerator is installed, Megatron-Core is
    missing or of a version that is not known. Importing a module later raises UnknownSite for a form that is not known.
    """
    if accelerator.device_type == "cuda":
        return
    prefixes = _checked_prefixes(extra_modules)
    finder = _installed_finder()
    if finder is None:
        _refuse_imported([MEGATRON, *prefixes])
        finder = RetargetFinder(accelerator, _megatron_version(), prefixes)
        finder.patches.update(after_import or {})
        sys.meta_path.insert(0, finder)
        return
    if (finder.accelerator_name, finder.device_type) != (accelerator.name, accelerator.device_type):
        raise RetargetError(
            f"megatron.core is already pointed at accelerator '{finder.accelerator_name}' in this process; "
            f"start a new process for '{accelerator.name}'"
        )
    added = [prefix for prefix in prefixes if not finder.covers(prefix)]
    _refuse_imported(added)
    finder.add(added)
    finder.patches.update(after_import or {})


class RetargetFinder(MetaPathFinder):
    """Hands the modules under its prefixes to a RetargetLoader; every other import passes by."""

    def __init__(self, accelerator: Accelerator, megatron_version: str, extra_modules: Sequence[str]) -> None:
        self.accelerator_name = accelerator.name
        self.device_type = accelerator.device_type
        self.redirected = accelerator.redirects_cuda()
        namespace = DeviceNamespace(self.device_type, accelerator.torch_namespace())
        self.module_globals = {
            NAMESPACE_NAME: namespace,
            HELPERS_NAME: SiteHelpers(self.device_type, namespace),
        }
        kind = f"{self.device_type}-redirected" if self.redirected else self.device_type
        self.cache = CodeCache.for_user(kind, megatron_version)
        self._rules = {MEGATRON: megatron_rules(megatron_version)}
        self.patches: dict[str, Patch] = {}
        self.add(extra_modules)

    def add(self, modules: Iterable[str]) -> None:
        for module in modules:
            self._rules.setdefault(module, USER_RULES)

    def covers(self, name: str) -> bool:
        return self._rules_of(name) is not None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        rules = self._rules_of(fullname)
        if rules is None:
            return None
        spec = self._next_spec(fullname, path, target)
        if spec is None or spec.loader is None or isinstance(spec.loader, ExtensionFileLoader | NamespaceLoader):
            return spec
        if type(spec.loader) is not SourceFileLoader:
            raise RetargetError(
                f"{fullname} is loaded by {type(spec.loader).__name__} from {spec.origin}: it cannot be pointed at "
                f"device '{self.device_type}' without its source as a plain .py file; install it unpacked"
            )
        spec.loader = RetargetLoader(spec.loader.name, str(spec.loader.path), self, rules)
        return spec

    def _next_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _rules_of(self, name: str) -> SiteRules | None:
        return next((rules for prefix, rules in self._rules.items() if _is_under(name, prefix)), None)


class RetargetLoader(SourceFileLoader):
    """Loads one source file rewritten. Python's own bytecode cache is left out: it holds the original."""

    def __init__(self, fullname: str, path: str, finder: RetargetFinder, rules: SiteRules) -> None:
        super().__init__(fullname, path)
        self._finder = finder
        self._rules = rules

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._finder.module_globals)
        super().exec_module(module)
        patch = self._finder.patches.get(module.__name__)
        if patch is not None:
            patch(module)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        stats = self.path_stats(path)
        stamp = (stats["mtime"], stats["size"])
        code = self._finder.cache.load(fullname, path, stamp)
        if code is None:
            code = self.source_to_code(self.get_data(path), path)
            self._finder.cache.store(fullname, path, stamp, code)
        return code

    def source_to_code(self, data: bytes, path: str) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, path)
        if self._finder.redirected:
            rewritten = TensorTypeRewriter(self._finder.device_type).rewrite(tree)
        else:
            rewritten = Rewriter(self._finder.device_type, self._rules, path).rewrite(tree)
        code: CodeType = compile(rewritten, path, "exec", dont_inherit=True)
        return code


def _installed_finder() -> RetargetFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, RetargetFinder)), None)


def _checked_prefixes(modules: Sequence[str]) -> list[str]:
    if isinstance(modules, str):
        modules = [modules]
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise RetargetError(f"cannot point '{module}' at a device: it is not the dotted name of a module")
        if _is_under(module, "torch"):
            raise RetargetError(f"cannot point '{module}' at a device: torch itself is never rewritten")
    return list(modules)


def _refuse_imported(prefixes: Sequence[str]) -> None:
    for name in sorted(sys.modules):
        for prefix in prefixes:
            if _is_under(name, prefix):
                raise RetargetError(
                    f"{name} is already imported, so it can no longer be pointed at another device; "
                    f"accel.retarget.install() must run before the first import of {prefix}"
                )


def _megatron_version() -> str:
    # From its own file: a checkout on PYTHONPATH has no package metadata, and importing the package is too early.
    spec = importlib.util.find_spec(MEGATRON)
    if spec is None or not spec.submodule_search_locations:
        raise RetargetError("megatron-core is not installed: pip install 'megatron-core>=0.16.1,<0.17'")
    package_info = Path(spec.submodule_search_locations[0]) / "package_info.py"
    if not package_info.is_file():
        raise RetargetError(f"{package_info} is missing, so this is no megatron-core whose version can be told")
    return str(runpy.run_path(str(package_info))["__version__"])


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")
