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
        "init_posemb": "linear",  # Resizing of position embeddings; or "bicubic".
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
        # "objectnet", "parquet", "hf://datasets/owner/name", or "my_module:open_source",
        # which runs the code of that module.
        "name": "",  # What there is: python -m vit_jax.datasets
        "data_dir": "",  # Where it lies; "" is TFDS's own, ~/tensorflow_datasets.
        "split": "train",  # Training split; TFDS's slicing syntax, all sources.
        "classes": 0,  # Number of classes; labels outside [0, classes) are an error.
        "examples": 0,  # Size of `split` where the data is not at hand; checked.
        "exclude": "",  # File of record ids, one a line: left out of `split`.
        "image_size": (224, 224),  # Height and width that reach the model, in pixels.
        "channels": 3,  # 1 or 3.
        "image_key": "image",  # TFDS feature or Parquet column of the images, and ...
        "label_key": "label",  # ... of their labels.
        "ops": "",  # Training transforms; see vit_jax/data/ops.py.
        "eval_ops": "",  # Evaluation transforms.
        "mean": (0.5,),  # Subtracted, one or a channel, as a fraction of 255 ...
        "std": (0.5,),  # ... then divided by.
        "workers": 0,  # Loader processes; 0 loads in threads of this process.
        "threads": 4,  # Loader threads a process.
        "prefetch": 8,  # Batches read ahead, a process.
        "check": True,  # Resume only on the data that the run was begun on.
        "on_error": "raise",  # A damaged image: "raise", or "skip" (counted).
    },
    "model": {  # And the keys of its form, see FORMS.
        "variant": "B/16",  # "B/16", "R50+B/16", "R50x1"; models/variants.py.
        "head_bias": 0.0,  # Initial bias of the classifier; -10 suits sigmoid.
        "dtype": "float32",  # Of the computation; parameters stay float32.
    },
    "loss": {
        "name": "softmax",  # "softmax" or "sigmoid" cross-entropy.
        "label_smoothing": 0.0,  # Part of a label's weight that all classes share.
    },
    "optim": {
        "name": "adam",  # "adam" or "sgd".
        "rate": 0.0,  # Peak learning rate: this ...
        "rate_per_256": 0.0,  # ... or this, times batch_size / 256.
        "decay": "cosine",  # Or "linear", "rsqrt", "staircase", "constant".
        "warmup_steps": 0,  # Linear warmup in steps, or else ...
        "warmup_epochs": 0.0,  # ... in epochs, or else ...
        "warmup_fraction": 0.0,  # ... as a fraction of the run.
        "weight_decay": 0.0,  # Decoupled from the loss, times the scheduled rate.
        "decay_mask": (r"/kernel$",),  # Regular expressions: what weight decay touches.
        "layer_decay": 0.0,  # Rate of a layer by that of the one above it; 0 is off.
        "clip_norm": 0.0,  # Largest global gradient norm; 0 is off.
        "accumulate": 1,  # Microbatches a step.
        "moment_dtype": "float32",  # Of Adam's first moment, SGD's momentum; "bfloat16".
        "freeze": (),  # Regular expressions: parameters that do not move ...
        "freeze_steps": 0,  # ... for so many steps; all three 0: the whole run.
        "freeze_epochs": 0.0,  # The same in epochs, or else ...
        "freeze_fraction": 0.0,  # ... as a fraction of the run.
    },
    "average": {
        "decay": 0.9999,  # Polyak averaging of the parameters; 0 is off.
    },
    "every": {  # Intervals in steps, and in epochs beside them; 0 is none.
        "log": 50,  # Steps between two lines of metrics.
        "log_epochs": 0.0,  # The same in epochs.
        "evaluate": 0,  # Steps between evaluations; the last step has one in any case.
        "evaluate_epochs": 0.0,  # The same in epochs.
        "checkpoint": 1_000,  # Steps between checkpoints; the last step has one, too.
        "checkpoint_epochs": 0.0,  # The same in epochs.
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
        # How many of `data` are different slices (TPU, GPU nodes) or, where JAX knows
        # of no slices, processes; with dcn_fsdp 1 too: as it fits.
        "dcn_data": 1,
        "dcn_fsdp": 1,  # The same of `fsdp`.
    },
    "sharding": {
        # Which parameters are split along which axes, ahead of the default rules:
        # "head/kernel$ -> -, model"; parallel/sharding.py.
        "rules": (),
        "smallest": 32_768,  # Elements (a layer) from which fsdp splits a parameter.
    },
    # Name of an evaluation: split of the data set to classify, or what EVALS lists.
    "evals": {},
}

# What an evaluation may state instead of a split: these and the keys of its kind.
_EVAL = {
    # Interval in steps; 0 in both units: that of every.evaluate. The last step is
    # evaluated in any case.
    "every": 0,
    "every_epochs": 0.0,  # The same in epochs.
    "name": "",  # Another data set than `data.name`.
    "data_dir": "",  # Where that lies; "": `data.data_dir`.
    "image_key": "",  # Its images; "": as `data.image_key`, or "image" of another set.
    "label_key": "",  # Its labels; "": as `data.label_key`, or "label" of another set.
    "eval_ops": "",  # In place of `data.eval_ops`, or of what travels with weights.
}
_FEATURES = _EVAL | {  # Learnt on features of one split, scored on another.
    "train": "",  # "" is `data.split`, or "train" of another data set.
    "test": "",  # "" is the split that the data set is tested on.
}
EVALS = {
    "classification": _EVAL
    | {
        "split": "",  # To classify; "" is the split that the data set is tested on.
    },
    # ImageNet's validation images with the labels of ReaL.
    "real": _EVAL
    | {
        "name": "imagenet2012_real",
        "label_key": "original_label",
        "split": "validation",  # To classify.
        "labels": "",  # The authors' real.json, for sets that do not hold them.
    },
    "objectnet": _EVAL
    | {
        "name": "objectnet",
        "split": "images",  # To classify.
    },
    "fewshot": _FEATURES
    | {
        "shots": (1, 5, 10, 25),  # Examples a class.
        "seeds": 20,  # Draws of them, over which mean and deviation are taken.
        "l2": (1024.0,),  # Strengths of the regularisation; the first is reported.
    },
    "knn": _FEATURES
    | {
        "k": 20,  # Neighbours that vote.
        "temperature": 0.07,  # A neighbour's vote is exp(cosine / temperature).
    },
    "probe": _FEATURES
    | {
        # Strengths, of which the held-out part of train chooses.
        "l2": (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5),
        # Size of that part, as a fraction of train; if it has fewer than 500 images, 5-fold
        # cross-validation chooses.
        "held_out": 0.1,
        "seed": 0,  # Of its draw.
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
    "width": 0,  # Features a token, in place of the variant's own if not 0.
    "depth": 0,  # Encoder blocks, likewise.
    "heads": 0,  # Attention heads a block, likewise.
    "mlp_dim": 0,  # Hidden units of the MLP, likewise.
    "head": "token",  # Classifier input: "token", "gap" (mean) or "map" (attention).
    "distillation": False,  # DeiT's second token, whose classifier is averaged in.
    "representation": False,  # One tanh layer of the model's width before the head.
    "pooled_norm": False,  # The final LayerNorm after the pooling, as timm's fc_norm.
    "posemb": "learned",  # Or "none", "learned2d", "relative", "sincos2d".
    # Its rate, after the position embeddings and each dense layer but those of query,
    # key and value and of the head.
    "dropout": 0.0,
    "stochastic_depth": 0.0,  # Drop rate of the last block; 0 at the first, linear.
    "gelu": "tanh",  # "tanh" (Google's) or "erf" (timm, Hugging Face).
    "epsilon": 1e-6,  # Of the LayerNorms.
    # One trace of a block for all: compiles faster, needs more memory. The results,
    # parameters and checkpoints are the same with any value of this and the next two.
    "scan": False,
    "remat": "none",  # What a block computes again, see models/stacking.py.
    "attention": "auto",  # Or "einsum", "cudnn" (NVIDIA GPUs), "splash" (TPUs).
}
_STEM = {
    "blocks": (0,),  # Units of each stage, in place of the variant's if not (0,).
    "stem_width": 0,  # Features of the root, likewise if not 0.
}

# Keys of a model by the form of its variant; the first that matches.
FORMS = {
    # ResNets, as `R50x1`
    r"R\d+x\d+": _STEM
    | {
        # Zeros take part in the root's max pooling: so have timm and BiT's first code.
        "zero_pool": False,
    },
    # Hybrids, as `R50+B/16`
    r"R.*\+.*": _ENCODER | _STEM,
    # All others, as `B/16`
    r".*": _ENCODER,
}

# Keys that exist only under one choice, so that a key nobody reads is found.
_END = {"end_rate": 0.0}  # Where the decay ends, one step after the last.
_KEPT = {"class_token": False}  # Keep a class token beside the patches.
_ADDED = {
    # Where they are added: once ("stem"), in "every" layer its own, or in each the same
    # ("shared").
    "posemb_at": "stem",
}
_WITHIN = {"posemb_at": "every"}  # Each layer has its own; "shared": all the same.
CHOICES = {
    ("optim", "name"): {
        "adam": {
            "b1": 0.9,  # Decay of the mean of gradients, a step.
            "b2": 0.999,  # Decay of the mean of their squares, a step.
            "eps": 1e-8,  # Added to the root of that, by which steps are divided.
        },
        "sgd": {
            "momentum": 0.9,  # Decay of the sum of gradients, a step; 0 is plain SGD.
            "nesterov": False,  # Looks ahead along the momentum.
        },
    },
    ("optim", "decay"): {
        "linear": _END,
        "cosine": _END,
        # peak / sqrt(1 + steps after warmup / timescale), at the end linearly to 0.
        "rsqrt": {
            "timescale": 10_000,  # Steps.
            "cooldown_steps": 0,  # The way to 0 in steps; 0 in all units is none.
            "cooldown_epochs": 0.0,  # The same in epochs, or else ...
            "cooldown_fraction": 0.0,  # ... as a fraction of the run.
        },
        "constant": {},
        "staircase": {
            "boundaries": (0,),  # Steps at which the rate falls ...
            "factor": 0.1,  # ... to this part of what it was.
        },
    },
    ("", "init_head"): {"replace": {}, "keep": {}, "drop": {}},
    ("", "init_posemb"): {"linear": {}, "bicubic": {}},
    ("model", "head"): {
        "token": {},
        "gap": _KEPT,
        "map": _KEPT,
    },
    ("model", "posemb"): {
        "learned": _ADDED,
        "learned2d": _ADDED,
        "sincos2d": _ADDED,
        "relative": _WITHIN,
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
