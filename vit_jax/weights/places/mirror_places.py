"""Every known place of the weights that have a name, AugReg's excepted.

The original comes first, then copies; a copy may lack a head or a representation layer
that the original has. `mirrors.py` says where these names were found.
"""

_BUCKET = "gs://vit_models"
_TIMM_FILES = (
    "https://github.com/huggingface/pytorch-image-models/releases/download/v0.1-vitjx"
)
_KERAS_FILES = "https://github.com/faustomorales/vit-keras/releases/download/dl"
_DEIT_FILES = "https://dl.fbaipublicfiles.com/deit"

PAPER = {
    "paper:B/32-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-B_32.npz",
        "hf://google/vit-base-patch32-224-in21k",
        "hf://timm/vit_base_patch32_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_base_patch32_224_in21k-8db57226.pth",
        f"{_KERAS_FILES}/ViT-B_32_imagenet21k.npz",
    ),
    "paper:B/16-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-B_16.npz",
        "hf://google/vit-base-patch16-224-in21k",
        "hf://timm/vit_base_patch16_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_base_patch16_224_in21k-e5005f0a.pth",
        f"{_KERAS_FILES}/ViT-B_16_imagenet21k.npz",
    ),
    "paper:L/32-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-L_32.npz",
        "hf://google/vit-large-patch32-224-in21k",
        "hf://timm/vit_large_patch32_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_large_patch32_224_in21k-9046d2e7.pth",
        f"{_KERAS_FILES}/ViT-L_32_imagenet21k.npz",
    ),
    "paper:L/16-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-L_16.npz",
        "hf://google/vit-large-patch16-224-in21k",
        "hf://timm/vit_large_patch16_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_large_patch16_224_in21k-606da67d.pth",
        f"{_KERAS_FILES}/ViT-L_16_imagenet21k.npz",
    ),
    "paper:H/14-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-H_14.npz",
        "hf://google/vit-huge-patch14-224-in21k",
        "hf://timm/vit_huge_patch14_224.orig_in21k",
    ),
    "paper:R50+B/16-i21k": (
        f"{_BUCKET}/imagenet21k/R50+ViT-B_16.npz",
        "hf://timm/vit_base_r50_s16_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_base_resnet50_224_in21k-6f7c7740.pth",
    ),
    # Later files of the same folder, which nobody is known to have copied.
    "paper:B/8-i21k": (f"{_BUCKET}/imagenet21k/ViT-B_8.npz",),
    "paper:R26+B/32-i21k": (f"{_BUCKET}/imagenet21k/R26+ViT-B_32.npz",),
    "paper:R50+L/32-i21k": (f"{_BUCKET}/imagenet21k/R50+ViT-L_32.npz",),
    "paper:B/32": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-B_32.npz",
        "hf://google/vit-base-patch32-384",
        f"{_KERAS_FILES}/ViT-B_32_imagenet21k+imagenet2012.npz",
    ),
    "paper:B/16": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-B_16.npz",
        "hf://google/vit-base-patch16-384",
        "hf://timm/vit_base_patch16_384.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_base_p16_384-83fb41ba.pth",
        f"{_KERAS_FILES}/ViT-B_16_imagenet21k+imagenet2012.npz",
    ),
    "paper:B/16-224": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-B_16-224.npz",
        "hf://google/vit-base-patch16-224",
        "hf://timm/vit_base_patch16_224.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_base_p16_224-80ecf9dd.pth",
    ),
    "paper:L/32": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-L_32.npz",
        "hf://google/vit-large-patch32-384",
        "hf://timm/vit_large_patch32_384.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_large_p32_384-9b920ba8.pth",
        f"{_KERAS_FILES}/ViT-L_32_imagenet21k+imagenet2012.npz",
    ),
    "paper:L/16": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-L_16.npz",
        "hf://google/vit-large-patch16-384",
        f"{_KERAS_FILES}/ViT-L_16_imagenet21k+imagenet2012.npz",
    ),
    "paper:L/16-224": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-L_16-224.npz",
        "hf://google/vit-large-patch16-224",
    ),
    "paper:R50+B/16": (
        f"{_BUCKET}/imagenet21k+imagenet2012/R50+ViT-B_16.npz",
        "hf://timm/vit_base_r50_s16_384.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_base_resnet50_384-9fd3c705.pth",
    ),
}

SAM = {
    "sam:B/32": (
        f"{_BUCKET}/sam/ViT-B_32.npz",
        "hf://timm/vit_base_patch32_224.sam_in1k",
    ),
    "sam:B/16": (
        f"{_BUCKET}/sam/ViT-B_16.npz",
        "hf://timm/vit_base_patch16_224.sam_in1k",
    ),
    "sam:L/32": (f"{_BUCKET}/sam/ViT-L_32.npz",),
    "sam:L/16": (f"{_BUCKET}/sam/ViT-L_16.npz",),
}

# Name; what names the model in all three places; the end of Meta's file.
_DEIT = (
    ("Ti/16", "tiny_patch16_224", "a1311bcf"),
    ("S/16", "small_patch16_224", "cd65a155"),
    ("B/16", "base_patch16_224", "b5f2ef4d"),
    ("B/16-384", "base_patch16_384", "8de9b5d1"),
    ("Ti/16-distilled", "tiny_distilled_patch16_224", "b40b3cf7"),
    ("S/16-distilled", "small_distilled_patch16_224", "649709d9"),
    ("B/16-distilled", "base_distilled_patch16_224", "df68dfff"),
    ("B/16-distilled-384", "base_distilled_patch16_384", "d0272ac0"),
)
DEIT = {
    f"deit:{name}": (
        f"hf://facebook/deit-{model.replace('_', '-')}",
        f"hf://timm/deit_{model}.fb_in1k",
        f"{_DEIT_FILES}/deit_{model}-{end}.pth",
    )
    for name, model, end in _DEIT
}

# The widths and depths that were published, BiT-M upstream.
_BIT = ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")
BIT = {
    f"bit:{name}{end}": (
        f"gs://bit_models/BiT-M-{name}{file}.npz",
        f"hf://timm/resnetv2_{name[1:]}_bit.goog_{timm}",
    )
    for name in _BIT
    for end, file, timm in (
        ("", "", "in21k"),
        ("-i1k", "-ILSVRC2012", "in21k_ft_in1k"),
    )
}

BIG_VISION = {
    f"big_vision:S/16-i1k-{epochs}ep": (f"gs://big_vision/vit_s16_i1k_{epochs}ep.npz",)
    for epochs in (90, 150, 300)
}
