"""What other codebases call our config keys, for the hint at an unknown one.

Words without case and punctuation, as timm, big_vision, Hugging Face and the papers have
them.
"""

_WORDS = {
    "batch_size": "batch batchsize bs perdevicetrainbatchsize",
    "data.data_dir": "datadir datapath dataroot root",
    "data.image_size": "imgsize imagesize inputsize resolution res cropsize",
    "data.name": "dataset datasetname",
    "data.num_classes": "numclasses nbclasses numlabels",
    "data.num_workers": "workers numworkers dataloaderworkers",
    "data.train_transform": (
        "mixup mixupalpha cutmix cutmixalpha randaugment randaug aa autoaugment "
        "augmentation augment colorjitter reprob randomerasing hflip ppcommon pp"
    ),
    "ema.decay": "ema emadecay modelema polyak polyakdecay",
    "ema.warmup": "emawarmup modelemawarmup usewarmup",
    "epochs": "epoch numepochs numtrainepochs totalepochs",
    "init.checkpoint": "pretrained finetune resume modelinit initialcheckpoint",
    "model.drop_path_rate": "droppath stochasticdepth stochdepth",
    "model.dropout": "droprate hiddendropoutprob",
    "model.dtype": "amp fp16 bf16 precision mixedprecision",
    "model.num_heads": "head heads numattentionheads nheads",
    "model.pool": "head globalpool pooling pooltype classifier",
    "model.scan": "scanlayers",
    "model.variant": "model modelname arch architecture patchsize variant",
    "optim.b1": "beta1",
    "optim.b2": "beta2",
    "optim.base_learning_rate": "blr baselr baselearningrate",
    "optim.grad_accum_steps": "accum accumiter gradientaccumulationsteps gradaccum",
    "optim.grad_clip_norm": "gradclip clipgrad clipgradnorm maxgradnorm gradclipnorm clip",
    "optim.layer_decay": "layerdecay llrd",
    "optim.learning_rate": "lr learningrate rate peaklr maxlr",
    "optim.name": "opt optimizer optimiser",
    "optim.schedule": "sched scheduler lrscheduler lrschedulertype",
    "optim.warmup_epochs": "warmupepochs",
    "optim.warmup_steps": "warmup warmupsteps",
    "optim.weight_decay": "wd weightdecay decay",
    "task.label_smoothing": "smoothing labelsmoothing labelsmoothingfactor",
    "total_steps": "steps maxsteps numsteps totalsteps",
}
SYNONYMS = {
    word: [key for key, words in _WORDS.items() if word in words.split()]
    for all_words in _WORDS.values()
    for word in all_words.split()
}
