"""Why there is no layer of experts."""

NO_EXPERTS = (
    "there is no layer of experts to build models from: mixtures of experts run as transformers' modules, whose "
    "experts quantised checkpoints fill"
)
