"""Training tasks, one file each; `config.task.name` chooses one."""

from vit_jax.config.fields import Registry

TASKS = Registry(
    {
        "classification": "vit_jax.tasks.classification:ClassificationConfig",
        "distillation": "vit_jax.tasks.distillation:DistillationConfig",
        "feature_distillation": (
            "vit_jax.tasks.feature_distillation:FeatureDistillationConfig"
        ),
        "linear_probe": "vit_jax.tasks.linear_probe:LinearProbeConfig",
        "lora": "vit_jax.tasks.lora:LoraConfig",
        "adapters": "vit_jax.tasks.adapters:AdaptersConfig",
        "masked_patch": "vit_jax.tasks.masked_patch:MaskedPatchConfig",
        "mae": "vit_jax.tasks.mae:MaeConfig",
        "simmim": "vit_jax.tasks.simmim:SimMimConfig",
        "dino": "vit_jax.tasks.dino:DinoConfig",
        "dinov2": "vit_jax.tasks.dinov2:Dinov2Config",
        "contrastive": "vit_jax.tasks.contrastive:ContrastiveConfig",
        "regression": "vit_jax.tasks.regression:RegressionConfig",
        "segmentation": "vit_jax.tasks.segmentation:SegmentationConfig",
    }
)
