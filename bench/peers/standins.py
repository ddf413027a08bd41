"""Empty modules in place of those that a peer imports at load time but uses only with a GPU or a network.

`stand_in("triton", ...)` makes `import triton.anything` succeed; whatever is taken from such a module is an object that
can be called, subclassed, subscripted and used as a decorator, and does nothing. What is installed is left alone,
unless it is named by its dotted name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

__all__ = ["sglang_without_gpu", "stand_in", "without_init"]


class _Nothing(type):
    """A class whose every attribute is another such class, and whose call hands back a decorated function as it is."""

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any], **options: Any) -> Any:
        return super().__new__(mcs, name, bases, members)

    def __init__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, members)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else cls

    def __setitem__(cls, item: Any, value: Any) -> None:
        """Kept nowhere."""

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls) -> Any:
        return iter(())


def _nothing(name: str) -> Any:
    return _Nothing(name, (), {})


class _Empty(types.ModuleType):
    __version__ = "99.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _nothing(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def stand_in(*names: str) -> list[str]:
    """Stand in for those top-level modules that are not installed, and for every dotted one; returns their names."""
    absent = [name for name in names if "." in name or importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder(absent))
    return absent


def without_init(package: str) -> None:
    """Make a package importable without running its `__init__`, which may import far more than the parts we need."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    module.__spec__ = spec
    sys.modules[package] = module


def sglang_without_gpu() -> list[str]:
    """Make SGLang's memory-cache modules importable where no GPU package is; returns what was stood in for."""
    absent = stand_in(
        "IPython",
        "compressed_tensors",
        "flashinfer",
        "sgl_kernel",
        "sglang.srt.configs",
        "torchaudio",
        "torchvision",
        "transformers",
        "triton",
        "tvm_ffi",
    )
    without_init("sglang")
    return absent
