"""Imports timm for comparisons; needs the extra `parity`."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra parity")


def import_timm():
    """Imports timm beside a torchvision without its compiled operators.

    Wheels of torchvision for a CPU may come without them, and its import then fails at
    describing them. timm needs none.
    """
    register = torch.library.register_fake

    def skip_missing(name, *args, **kwargs):
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    torch.library.register_fake = skip_missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytest.importorskip("timm", reason="timm is not installed")
    finally:
        torch.library.register_fake = register
