"""Evaluators: each is a file here, named by the key `kind` of `config.evals.NAME`."""

from vit_jax.config.fields import Registry

# Messages and the config reference list them in this order.
EVALUATORS = Registry(
    {
        "classification": "vit_jax.evaluators.classification:ClassificationConfig",
        "multi_label": "vit_jax.evaluators.multi_label:MultiLabelConfig",
        "regression": "vit_jax.evaluators.regression:RegressionConfig",
        "real": "vit_jax.evaluators.label_sets:RealConfig",
        "objectnet": "vit_jax.evaluators.label_sets:ObjectNetConfig",
        "corruptions": "vit_jax.evaluators.corruptions:CorruptionsConfig",
        "fewshot": "vit_jax.evaluators.fewshot:FewShotConfig",
        "knn": "vit_jax.evaluators.knn:NeighboursConfig",
        "probe": "vit_jax.evaluators.probe:ProbeConfig",
        "ridge": "vit_jax.evaluators.ridge:RidgeConfig",
        "rank": "vit_jax.evaluators.feature_rank:RankConfig",
        "zero_shot": "vit_jax.evaluators.image_text:ZeroShotConfig",
        "retrieval": "vit_jax.evaluators.image_text:RetrievalConfig",
        "segmentation": "vit_jax.evaluators.segmentation:SegmentationConfig",
        "task": "vit_jax.evaluators.protocol:TaskMetricsConfig",
    }
)
