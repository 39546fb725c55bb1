"""Restores checkpoints as Lightning does, and says what a checkpoint that does not fit the module leaves as it was."""

from typing import Any

from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from zdtrain.records.recorder import find_recorder
from zdtrain.weights import WeightsReport, WeightsWarning, compare

_ANEW = "load_weights(module, path, strict=False) of zdtrain.weights, then fit without ckpt_path"


class CheckpointConnector(_CheckpointConnector):
    """Lightning's, which takes a checkpoint that lacks parameters in silence where ``strict_loading`` is off."""

    @override
    def restore_model(self) -> None:
        """Restore the weights; warn of what keeps its initial values, and of what is not used.

        Raises:
            RuntimeError: torch's, with a note that says what helps.
        """
        module, reports = self.trainer.lightning_module, list[WeightsReport]()

        def compare_all(loaded: nn.Module, keys: Any) -> None:
            state = self._loaded_checkpoint["state_dict"]
            reports.append(compare(loaded, state, fresh=keys.missing_keys, unused=keys.unexpected_keys))

        hook = module.register_load_state_dict_post_hook(compare_all)  # type: ignore[no-untyped-call]
        try:
            super().restore_model()
        except RuntimeError as error:
            if reports:
                error.add_note(f"{reports[-1]}; to go on with that, {self._remedy}")
            raise
        finally:
            hook.remove()
        if reports and not reports[-1].is_complete:
            self._tell(reports[-1])

    @override
    def restore_optimizers(self) -> None:
        """Restore the optimizers.

        Raises:
            ValueError: torch's, with a note that says what helps.
        """
        try:
            super().restore_optimizers()
        except ValueError as error:
            error.add_note(f"the checkpoint's optimizer had other parameters; to leave its state behind, {_ANEW}")
            raise

    @property
    def _remedy(self) -> str:
        return _ANEW if self.trainer.state.fn == "fit" else "set strict_loading = False on the module"

    def _tell(self, report: WeightsReport) -> None:
        by_place = "; the optimizer's state is taken over by position" if self.trainer.state.fn == "fit" else ""
        rank_zero_warn(f"{self._ckpt_path}: {report}{by_place}", category=WeightsWarning)
        recorder = find_recorder(self.trainer.loggers)
        if recorder is not None:
            fresh, unused = list(report.fresh), list(report.unused)
            recorder.record_event("weights", path=str(self._ckpt_path), fresh=fresh, unused=unused)
