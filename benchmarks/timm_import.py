"""Imports timm in whatever state its optional companions are."""

import torch


def import_timm():
    """Imports timm, also beside a torchvision that PyTorch's CPU build cannot use."""
    real = torch.library.register_fake
    torch.library.register_fake = lambda op, *args, **kwargs: (
        (lambda function: function)
        if str(op).startswith("torchvision::")
        else real(op, *args, **kwargs)
    )
    try:
        import timm
    finally:
        torch.library.register_fake = real
    return timm
