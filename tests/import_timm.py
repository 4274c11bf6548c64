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


def skip_values_on_meta(monkeypatch):
    """Has no values drawn on the meta device, which takes five sixths of the time there."""
    import timm

    def skipped(draw):
        return lambda tensor, *args, **kwargs: (
            tensor if tensor.is_meta else draw(tensor, *args, **kwargs)
        )

    for module, name in (
        (timm.layers.weight_init, "_trunc_normal_"),
        (torch.nn.init, "kaiming_uniform_"),
        (torch.nn.init, "uniform_"),
    ):
        monkeypatch.setattr(module, name, skipped(getattr(module, name)))
