"""What is learnt: each task is a file here, named by `config.task.name`."""

from vit_jax.tasks.classification import ClassificationConfig
from vit_jax.tasks.contrastive import ContrastiveConfig
from vit_jax.tasks.dino import DinoConfig
from vit_jax.tasks.distillation import DistillationConfig
from vit_jax.tasks.linear_probe import LinearProbeConfig
from vit_jax.tasks.lora import LoraConfig
from vit_jax.tasks.mae import MaeConfig
from vit_jax.tasks.masked_patch import MaskedPatchConfig
from vit_jax.tasks.simmim import SimMimConfig

TASKS = {
    "classification": ClassificationConfig,
    "distillation": DistillationConfig,
    "linear_probe": LinearProbeConfig,
    "lora": LoraConfig,
    "masked_patch": MaskedPatchConfig,
    "mae": MaeConfig,
    "simmim": SimMimConfig,
    "dino": DinoConfig,
    "contrastive": ContrastiveConfig,
}
