"""Fine-tunes with transformers' Trainer; `benchmarks.finetuning.peers` starts it as a process.

The flags are those of the README of transformers' image-classification example: AdamW, a rate of
2e-5 that falls linearly, batches of 8, the epoch that is best on val. Writes OUT/scores.json: the
seconds before the first epoch and of an epoch with its validation, and the accuracy of test.
"""

import argparse
import json
import pathlib
import time

BEGAN = time.perf_counter()

from benchmarks.timm_import import import_timm

import_timm()
import torch
import torchvision
import transformers
from torchvision.transforms import v2


def datasets_of(photos, processor, side):
    """Returns train, val and test as folders of torchvision, of side x side pixels."""
    shorter = processor.size.get("shortest_edge") or processor.size["height"]
    last = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(processor.image_mean, processor.image_std),
    ]
    train = [v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), *last]
    evaluated = v2.Compose([v2.Resize(shorter), v2.CenterCrop(side), *last])
    chosen = {"train": v2.Compose(train), "val": evaluated, "test": evaluated}
    return {
        split: torchvision.datasets.ImageFolder(photos / split, transform)
        for split, transform in chosen.items()
    }


def collate(rows):
    """Stacks images and labels."""
    images, labels = zip(*rows, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def accuracy(predicted):
    """Returns the accuracy of the Trainer's predictions."""
    right = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"accuracy": float(right.mean())}


def main():
    """Trains, and scores the test images once."""
    args = parse()
    photos, out = pathlib.Path(args.photos), pathlib.Path(args.out)
    processor = transformers.AutoImageProcessor.from_pretrained(args.weights)
    side = transformers.AutoConfig.from_pretrained(args.weights).image_size
    datasets = datasets_of(photos, processor, side)
    model = transformers.AutoModelForImageClassification.from_pretrained(
        args.weights,
        num_labels=len(datasets["train"].classes),
        ignore_mismatched_sizes=True,
    )
    settings = transformers.TrainingArguments(
        output_dir=str(out),
        seed=args.seed,
        num_train_epochs=args.epochs,
        learning_rate=2e-5,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="accuracy",
        save_total_limit=1,
        remove_unused_columns=False,
        dataloader_num_workers=2,
        bf16=args.dtype == "bfloat16",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=datasets["train"],
        eval_dataset=datasets["val"],
        data_collator=collate,
        compute_metrics=accuracy,
    )
    start = time.perf_counter()
    trainer.train()
    epoch = (time.perf_counter() - start) / args.epochs
    # Transformers 5.23 reads its best checkpoint by other names than it writes, and keeps
    # the last weights instead.
    trainer.model = type(model).from_pretrained(trainer.state.best_model_checkpoint)
    test = trainer.predict(datasets["test"]).metrics["test_accuracy"]
    scores = {"seconds": [start - BEGAN, epoch], "test": test}
    (out / "scores.json").write_text(json.dumps(scores))


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("photos", help="a folder with train/CLASS, val/CLASS and test/CLASS")
    add("--weights", required=True, help="in the format of transformers")
    add("--epochs", type=int, default=5)
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--out", required=True)
    return parser.parse_args()
