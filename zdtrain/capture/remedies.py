"""What a host read is in the words of the user's code, and what to write instead."""

from types import FrameType

from zdtrain import readless

INSTEAD_OF_KEEPING = (
    "self.log(..., on_epoch=True) and torchmetrics add up on the device, and on_train_batch_end gets what "
    "training_step returns"
)
"""What helps where a step keeps the values of every batch."""

INSTEAD_OF_READING_OPTIONS = (
    "log it in a hook around the step, as LearningRateMonitor does; SimpleAdam's lr is a tensor, which a replay sees"
)
"""What helps where a step reads options of an optimizer that a schedule changes."""

# What people write for an operation that they have never heard of.
_WRITTEN = {
    "_local_scalar_dense": "item(), int(t), float(t), `if t` or text made of it",
    "_pack_padded_sequence": "pack_padded_sequence",
}
_CALLED = {
    "__bool__": "`if t`",
    "__float__": "float(t)",
    "__format__": "text made of t",
    "__getitem__": "a slice up to t",
    "__index__": "t as an index",
    "__int__": "int(t)",
    "item": "t.item()",
    "numpy": "t.numpy()",
    "tolist": "t.tolist()",
}

_CHOOSE = "choose with torch.where or masked_fill, or multiply by the mask"
_KEEP = "keep the tensor, self.log takes it as it is"
_PRINT = "print it in a hook around the step"
_REMEDIES = {
    **dict.fromkeys(("item", "__float__", "__int__", "tolist", "numpy"), _KEEP),
    **dict.fromkeys(("__bool__", "masked_select", "nonzero", "argwhere"), _CHOOSE),
    **dict.fromkeys(("index with a mask", "index_put with a mask", "index_put_ with a mask"), _CHOOSE),
    **dict.fromkeys(("repr", "format", "__format__"), _PRINT),
    "bincount": "add ones in place: torch.zeros(n).index_add_(0, x, ones)",
    "one_hot": "give num_classes",
    "_pack_padded_sequence": "run the network on the padded batch and mask what lies past the lengths",
    "tensor of tensors": "torch.stack makes one of them on the device",
}
"""By what was called, or by the operation that it led to."""

_IN_LIBRARIES = (
    (
        "torch.distributions.",
        "pass validate_args=False, or call torch.distributions.Distribution.set_default_validate_args(False) once",
    ),
    ("torch.nn.utils.clip_grad.", "leave out error_if_nonfinite=True; Trainer(nonfinite=...) acts on the device"),
    (
        "lightning.pytorch.utilities.grads.",
        'torch.nn.utils.get_total_norm(gradients) stays on the device, and so does "grad_norm" of monitors',
    ),
)
"""By the beginning of the name of what reads inside a library."""


def host_read(operation: str, function: str, library: str | None, frame: FrameType | None) -> str:
    """Return in words how a step reads on the host, and what helps, where that is known.

    Args:
        operation: The operation that waits.
        function: The function of torch that was called, such as ``"__bool__"``.
        library: What in a library reads, with its line; None where the user's code does.
        frame: The frame that reads.
    """
    if operation == "_local_scalar_dense":
        said = _CALLED.get(function, function) or _WRITTEN[operation]
    else:
        said = _WRITTEN.get(operation) or _CALLED.get(operation, operation)
    return f"the step waits for the value of a tensor ({said}){_help(operation, function, library, frame)}"


def _help(operation: str, function: str, library: str | None, frame: FrameType | None) -> str:
    if what := readless.remedy(frame):
        return what
    what = next((remedy for beginning, remedy in _IN_LIBRARIES if (library or "").startswith(beginning)), "")
    ours = library is None or library.startswith("zdtrain.")
    if library is not None and not ours and (what or operation not in _REMEDIES):
        return f" in {library.rpartition(':')[0]}{what and ': '}{what}"
    what = _REMEDIES.get(operation) or _REMEDIES.get(function, "")
    return what and f": {what}"
