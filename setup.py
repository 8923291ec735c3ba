"""Builds the native library into the package; everything else is in pyproject.toml."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path(__file__).parent / "common" / "ds4_common" / "native"


class BuildNative(build_ext):
    """Runs native/build.py in place of distutils' one-flag-set-for-all compile."""

    def build_extension(self, ext: Extension) -> None:
        spec = importlib.util.spec_from_file_location("ds4_native_build", NATIVE / "build.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # A development install leaves its objects where `make native` looks for them.
        objects = None if self.editable_mode else Path(self.build_temp).resolve() / "native"
        module.build(target, objects)

    def get_ext_filename(self, name: str) -> str:
        return (
            super()
            .get_ext_filename(name)
            .rsplit(".cpython", 1)[0]
            .rsplit(".abi3", 1)[0]
            .removesuffix(".so")
            + ".so"
        )


sources = sorted(str(p.relative_to(Path(__file__).parent)) for p in NATIVE.glob("*.c"))
setup(
    ext_modules=[Extension("ds4_common.native.libds4", sources)],
    cmdclass={"build_ext": BuildNative},
)
