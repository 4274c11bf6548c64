"""Every key that a config can hold: its default, its type and its meaning."""

# What the sections may hold. A value gives the default and, by its type, the type.
COMMON = {
    "": {
        "name": "",  # Recipe name; the config file's stem unless stated.
        "seed": 0,  # Of initialisation, data order, augmentation and dropout.
        "total_steps": 0,  # Length of the run: this ...
        "epochs": 0.0,  # ... or this many passes over the training split.
        "batch_size": 0,  # Images a step, over all devices and microbatches.
        "init": "",  # Workdir, weights or their address to start from; "": none.
        "init_average": True,  # Take a workdir's averaged parameters if it has them.
        "init_head": "replace",  # "replace": new zero head, "keep", or "drop".
        "init_posemb": "linear",  # How they are resized: "linear" or "bicubic" (timm's).
        "init_allow": (),  # Regular expressions: what may be missing or left over.
        "debug_nans": False,  # Stop at the operation that makes the first NaN (slow).
        "profile": (0, 0),  # First and last step of a trace for xprof; zeros: none.
        "slow_step": 3.0,  # Name what took so many times its median; 0 is off.
        # Seconds without a finished step, evaluation batch or save after which a run is
        # ended, with the stacks of all threads; 3 times as long before the first step.
        # 0 is off.
        "stall_timeout": 1_800.0,
        "compilation_cache": "auto",  # Folder; "auto": a user's own; "": JAX's setting.
    },
    "data": {
        # "digits", "folder", "made", a TFDS name such as "cifar10", "vtab/clevr_count",
        # "objectnet", "parquet", "hf://datasets/owner/name", "my_module:open_source".
        "name": "",  # What there is: python -m vit_jax.datasets
        "data_dir": "",  # Where it lies; "" is TFDS's own, ~/tensorflow_datasets.
        "split": "train",  # Training split; TFDS's slicing syntax, all sources.
        "classes": 0,  # Number of classes; labels outside [0, classes) are an error.
        "examples": 0,  # Size of `split` where the data is not at hand; checked.
        "exclude": "",  # File of record ids, one a line: left out of `split`.
        "image_size": (224, 224),  # Height and width that reach the model, in pixels.
        "channels": 3,  # 1 or 3.
        "image_key": "image",  # Names of TFDS features or Parquet columns.
        "label_key": "label",
        "ops": "",  # Training transforms; see vit_jax/data/ops.py.
        "eval_ops": "",  # Evaluation transforms.
        "mean": (0.5,),  # Subtracted, one or a channel, as a fraction of 255 ...
        "std": (0.5,),  # ... then divided by.
        "workers": 0,  # Loader processes; 0 loads in threads of this process.
        "threads": 4,  # Loader threads a process.
        "prefetch": 8,  # Batches read ahead, a process.
        "on_error": "raise",  # A damaged image: "raise", or "skip" (counted).
    },
    "model": {  # And the keys of its form, see FORMS.
        "variant": "B/16",  # "B/16", "R50+B/16", "R50x1"; models/variants.py.
        "head_bias": 0.0,  # Initial bias of the classifier; -10 suits sigmoid.
        "dtype": "float32",  # Of the computation; parameters stay float32.
    },
    "loss": {
        "name": "softmax",  # "softmax" or "sigmoid" cross-entropy.
        "label_smoothing": 0.0,
    },
    "optim": {
        "name": "adam",  # "adam" or "sgd".
        "rate": 0.0,  # Peak learning rate: this ...
        "rate_per_256": 0.0,  # ... or this, times batch_size / 256.
        "decay": "cosine",  # Or "linear", "rsqrt", "staircase", "constant".
        "warmup_steps": 0,  # Linear warmup, as one of these three.
        "warmup_epochs": 0.0,
        "warmup_fraction": 0.0,  # Of total_steps.
        "weight_decay": 0.0,  # Decoupled from the loss, times the scheduled rate.
        "decay_mask": (r"/kernel$",),  # Regular expressions: what weight decay touches.
        "layer_decay": 0.0,  # Rate of a layer by that of the one above it; 0 is off.
        "clip_norm": 0.0,  # Largest global gradient norm; 0 is off.
        "accumulate": 1,  # Microbatches a step.
        "moment_dtype": "float32",  # Of Adam's first moment, SGD's momentum; "bfloat16".
        "freeze": (),  # Regular expressions: parameters that do not move ...
        "freeze_steps": 0,  # ... for this long, one of three; 0 is the whole run.
        "freeze_epochs": 0.0,
        "freeze_fraction": 0.0,
    },
    "average": {
        "decay": 0.9999,  # Polyak averaging of the parameters; 0 is off.
    },
    "every": {  # Intervals in steps, and in epochs beside them; 0 is none.
        "log": 50,
        "log_epochs": 0.0,
        "evaluate": 0,  # The last step is evaluated and saved in any case.
        "evaluate_epochs": 0.0,
        "checkpoint": 1_000,
        "checkpoint_epochs": 0.0,
    },
    "keep": {
        "last": 2,  # This many newest checkpoints stay ...
        "every": 0,  # ... and those at multiples of this step; 0 is none.
    },
    "local": {  # Checkpoints on the hosts' own disks, between those in the workdir.
        "folder": "",  # The same words on all hosts; "$VARIABLES" and "~" are resolved.
        "every": 0,  # Interval in steps; 0 is none.
    },
    "mesh": {  # Devices an axis; -1 is all that are left. See parallel/mesh.py.
        "data": -1,  # Copies of the parameters.
        "fsdp": 1,  # Parameters and moments are split, and gathered where needed.
        "model": 1,  # Attention heads and MLPs are split.
        # How many of `data` and of `fsdp` are different slices (TPU, GPU nodes) or,
        # where JAX knows of no slices, processes; both 1: as it fits.
        "dcn_data": 1,
        "dcn_fsdp": 1,
    },
    "sharding": {
        # Ahead of the defaults: "head/kernel$ -> -, model"; parallel/sharding.py.
        "rules": (),
        "smallest": 32_768,  # Elements (a layer) from which fsdp splits a parameter.
    },
    # Name of an evaluation: split of the data set to classify, or what EVALS lists.
    "evals": {},
}

# What an evaluation may state instead of a split: these and the keys of its kind.
_EVAL = {
    "every": 0,  # Interval in steps, and in epochs beside it; both 0: that of
    "every_epochs": 0.0,  # every.evaluate. The last step is evaluated in any case.
    "name": "",  # Another data set than `data.name`, and its own ...
    "data_dir": "",  # ... or `data.data_dir` if "".
    "image_key": "",
    "label_key": "",
    "eval_ops": "",  # In place of `data.eval_ops`, or of what travels with weights.
}
_FEATURES = _EVAL | {  # Learnt on features of one split, scored on another.
    "train": "",  # "" is `data.split`, or "train" of another data set.
    "test": "",  # "" is the split that the data set is tested on.
}
EVALS = {
    "classification": _EVAL | {"split": ""},  # "" as for `test`.
    # ImageNet's validation images with the labels of ReaL.
    "real": _EVAL
    | {
        "name": "imagenet2012_real",
        "label_key": "original_label",
        "split": "validation",
        "labels": "",  # The authors' real.json, for sets that do not hold them.
    },
    "objectnet": _EVAL | {"name": "objectnet", "split": "images"},
    "fewshot": _FEATURES
    | {
        "shots": (1, 5, 10, 25),  # Examples a class.
        "seeds": 20,  # Draws of them, over which mean and deviation are taken.
        "l2": (1024.0,),  # Strengths of the regularisation; the first is reported.
    },
    "knn": _FEATURES | {"k": 20, "temperature": 0.07},
    "probe": _FEATURES
    | {
        # Strengths, of which the held-out part of train chooses.
        "l2": (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5),
        "held_out": 0.1,
        "seed": 0,  # Of that part.
        "iterations": 1_000,  # Of L-BFGS, at most.
    },
}

# What is read of a config where weights are evaluated alone; "evals" takes any name.
EVALUATION = {
    "": ("name", "batch_size", "compilation_cache"),
    "data": (
        *("name", "data_dir", "split", "examples", "image_key", "label_key"),
        *("workers", "threads", "prefetch", "on_error"),
    ),
    "mesh": tuple(COMMON["mesh"]),
    "sharding": tuple(COMMON["sharding"]),
    "evals": (),
}

_ENCODER = {
    "width": 0,  # These four replace the variant's own numbers when not 0.
    "depth": 0,
    "heads": 0,
    "mlp_dim": 0,
    "head": "token",  # Classifier input: "token", "gap" (mean) or "map" (attention).
    "distillation": False,  # DeiT's second token, whose classifier is averaged in.
    "representation": False,  # One tanh layer of the model's width before the head.
    "pooled_norm": False,  # The final LayerNorm after the pooling, as timm's fc_norm.
    "posemb": "learned",  # Or "none", "learned2d", "relative", "sincos2d".
    "dropout": 0.0,
    "stochastic_depth": 0.0,  # Drop rate of the last block; 0 at the first, linear.
    "gelu": "tanh",  # "tanh" (Google's) or "erf" (timm, Hugging Face).
    "epsilon": 1e-6,  # Of the LayerNorms.
    # How it is computed; the same results, parameters and checkpoints in any case.
    "scan": False,  # One trace of a block for all: compiles faster, needs more memory.
    "remat": "none",  # What a block computes again, see models/remat.py.
    "attention": "auto",  # Or "einsum", "cudnn" (NVIDIA GPUs), "splash" (TPUs).
}
_STEM = {
    "blocks": (0,),  # Units of each stage and features of the root, which replace
    "stem_width": 0,  # the variant's own when not 0.
}

# Keys of a model by the form of its variant; the first that matches.
FORMS = {
    # Zeros take part in the root's max pooling: so have timm and BiT's first code.
    r"R\d+x\d+": _STEM | {"zero_pool": False},
    r"R.*\+.*": _ENCODER | _STEM,
    r".*": _ENCODER,
}

# Keys that exist only under one choice, so that a key nobody reads is found.
_END = {"end_rate": 0.0}  # Where the decay ends, one step after the last.
CHOICES = {
    ("optim", "name"): {
        "adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
        "sgd": {"momentum": 0.9, "nesterov": False},
    },
    ("optim", "decay"): {
        "linear": _END,
        "cosine": _END,
        # peak / sqrt(1 + steps after warmup / timescale), at the end linearly to 0.
        "rsqrt": {
            "timescale": 10_000,
            "cooldown_steps": 0,
            "cooldown_epochs": 0.0,
            "cooldown_fraction": 0.0,
        },
        "constant": {},
        # Constant, times `factor` at each of the steps `boundaries`.
        "staircase": {"boundaries": (0,), "factor": 0.1},
    },
    ("", "init_head"): {"replace": {}, "keep": {}, "drop": {}},
    ("", "init_posemb"): {"linear": {}, "bicubic": {}},
    ("model", "head"): {
        "token": {},
        "gap": {"class_token": False},  # Keep a class token beside the patches.
        "map": {"class_token": False},
    },
    ("model", "posemb"): {
        "learned": {"posemb_at": "stem"},  # Where: "stem", "every" layer or "shared".
        "learned2d": {"posemb_at": "stem"},
        "sincos2d": {"posemb_at": "stem"},
        "relative": {"posemb_at": "every"},  # Or "shared".
        "none": {},
    },
    ("model", "posemb_at"): {"stem": {}, "every": {}, "shared": {}},
    ("model", "gelu"): {"tanh": {}, "erf": {}},
    ("model", "dtype"): {"float32": {}, "bfloat16": {}},
    # From most memory to most computing.
    ("model", "remat"): {"none": {}, "dots": {}, "attention": {}, "full": {}},
    ("model", "attention"): {"auto": {}, "einsum": {}, "cudnn": {}, "splash": {}},
    ("optim", "moment_dtype"): {"float32": {}, "bfloat16": {}},
    ("loss", "name"): {"softmax": {}, "sigmoid": {}},
    ("data", "on_error"): {"raise": {}, "skip": {}},
}
