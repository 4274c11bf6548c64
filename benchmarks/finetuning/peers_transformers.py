"""Fine-tunes with transformers' Trainer, as its image-classification example does.

Run:  python -m benchmarks.finetuning.peers_transformers PHOTOS --weights=FOLDER --out=DIR
          [--epochs=5] [--seed=0] [--dtype=bfloat16]
      PHOTOS: a folder with train/CLASS, val/CLASS and test/CLASS
      FOLDER: weights in the format of transformers

The flags of that example's README: AdamW, a rate of 2e-5 that falls linearly, batches of 8, the
epoch that is best on val. Writes DIR/seconds.json: the seconds before the first epoch and
of an epoch with its validation, and the accuracy of test. Needs the extra parity.
"""

import argparse
import json
import pathlib
import time

BEGAN = time.perf_counter()

from benchmarks.timm_import import import_timm  # noqa: E402

import_timm()
import torch  # noqa: E402
import torchvision  # noqa: E402
import transformers  # noqa: E402
from torchvision.transforms import v2  # noqa: E402


def datasets_of(photos, processor):
    """Returns train, val and test as torchvision's folders of images."""
    size = processor.size.get("shortest_edge") or processor.size["height"]
    last = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(processor.image_mean, processor.image_std),
    ]
    train = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *last]
    evaluated = v2.Compose([v2.Resize(size), v2.CenterCrop(size), *last])
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


def main(args):
    """Trains, and scores the test images once."""
    photos, out = pathlib.Path(args.photos), pathlib.Path(args.out)
    processor = transformers.AutoImageProcessor.from_pretrained(args.weights)
    datasets = datasets_of(photos, processor)
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
        load_best_model_at_end=True,
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
    test = trainer.predict(datasets["test"]).metrics["test_accuracy"]
    found = {"seconds": [start - BEGAN, epoch], "test": test}
    (out / "seconds.json").write_text(json.dumps(found))


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("photos")
    add("--weights", required=True)
    add("--epochs", type=int, default=5)
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
