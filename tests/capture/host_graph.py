"""A stand-in for a device graph on the host: capturing runs nothing, replaying writes to the captured addresses."""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zdtrain.device.host import HostRuntime

READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount"}


def aliased(tensor):
    """Return another tensor in the same memory: a graph knows addresses, not tensors."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


class _Recorder(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func._schema.is_mutable or name == "native_batch_norm":  # whose schema does not tell of running statistics
            for tensor in inputs:
                self.graph.keep(tensor, self.made)
        out = func(*args, **kwargs)
        before = {t.untyped_storage().data_ptr() for t in inputs}
        self.made |= {
            t.untyped_storage().data_ptr()
            for t in tree_leaves(out)
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in before
        }
        if not func._schema.name.startswith("profiler::"):
            args, kwargs, kept = tree_map_only(Tensor, aliased, (args, kwargs, out))
            self.graph.operations.append((func, args, kwargs, kept, before))
        return out


class HostGraph:
    capturing = False

    def __init__(self):
        self.operations = []
        self.replays = 0
        self._kept = {}

    def keep(self, tensor, made):
        """Remember what a capture would overwrite if it ran."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in made and storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = (storage, storage.clone())

    @contextmanager
    def capture(self):
        random = torch.get_rng_state()
        HostGraph.capturing = True
        try:
            with _Recorder(self):
                yield
        finally:
            HostGraph.capturing = False
        for storage, copy in self._kept.values():
            storage.copy_(copy)
        torch.set_rng_state(random)

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for func, args, kwargs, out, before in self.operations:
            new = func(*args, **kwargs)
            for old, fresh in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in before and old.numel():
                    old.detach().copy_(fresh)

    def reset(self):
        self.operations.clear()

    @property
    def memory_bytes(self):
        """Return the bytes of what the capture made, views counted once."""
        outputs = [t for *_, out, before in self.operations for t in tree_leaves(out) if isinstance(t, Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}.values())


class GraphRuntime(HostRuntime):
    """The host, with graphs."""

    has_graphs = True

    def graph(self):
        return HostGraph()
