"""An Adam whose hyperparameters live on the device, with schedules and clipping that stay there too.

Usable without the rest of zdtrain: nothing here imports lightning or torchmetrics.
"""

from zdtrain.optim.adam import SimpleAdam
from zdtrain.optim.clipping import clip_grad_norm_
from zdtrain.optim.schedules import (
    Constant,
    Cosine,
    DeviceLR,
    InverseSquareRoot,
    Linear,
    OneCycle,
    Schedule,
    Warmup,
)

__all__ = [
    "Constant",
    "Cosine",
    "DeviceLR",
    "InverseSquareRoot",
    "Linear",
    "OneCycle",
    "Schedule",
    "SimpleAdam",
    "Warmup",
    "clip_grad_norm_",
]
