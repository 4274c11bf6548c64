"""Puts the recipes into wheels: what stands in configs/ here is in vit_jax/recipes there."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Builds the package, and copies configs/ into it unless the install is editable."""

    def run(self) -> None:
        """Builds."""
        super().run()
        if not self.editable_mode:
            target = pathlib.Path(self.build_lib, "vit_jax", "recipes", "configs")
            shutil.rmtree(target, ignore_errors=True)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree("configs", target, ignore=ignored)


setup(cmdclass={"build_py": BuildWithRecipes})
