"""What goes wrong in capturing goes wrong in a step that then runs eagerly, with a reason."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from zdtrain.capture.modules import python_state
from zdtrain.capture.obstacles import replaced_functions
from zdtrain.capture.recording import Recording
from zdtrain.capture.rollback import Rollback
from zdtrain.capture.session import Entry
from zdtrain.capture.shared import failure
from zdtrain.capture.verify import Saved
from zdtrain.capture.watching import Region, Watching


class Guarded(Watching):
    """Takes back what was tried with a step and failed, and runs the step as it is."""

    @abstractmethod
    def _entry_of(self, *step: Any) -> Entry | None:
        """Return what is known of steps like this one; None where they run eagerly whatever they are."""

    def _find_entry(self, *step: Any) -> Entry | None:
        """Return what `_entry_of` does; None, too, where no step is captured any more."""
        shared = self._session.shared
        if shared.given_up is not None:
            return None
        try:
            return self._entry_of(*step)
        except Exception as error:  # ours, or out of code that we call and stock Lightning would not: a property
            shared.give_up(failure("looking at the step failed", error))
            return None

    def _look_at(self, entry: Entry, region: Region) -> None:
        """Watch the step; where that fails, take the step back and run it as it is.

        Raises:
            Exception: Out of a step that had changed Python state already, which can't be taken back.
        """
        session, batch, counted = self._session, self._batch, self._session.steps_eager
        session.refuse(entry, list(replaced_functions()))
        if entry.reason is not None:
            self._eagerly(region)
            return
        before = self._rollback(entry) if session.shared.are_on() else None
        if before is None:
            self._eagerly(region)
            return
        state, passed = None, []

        def run() -> None:
            passed.append("start")
            region()
            passed.append("end")

        try:
            state = self._host_state()
            self._watch(entry, run)
        except Exception as error:  # out of the watch, or of the step: then it comes again below
            if passed == ["start"] and self._host_state() != state:
                error.add_note('zdtrain watched this step in order to capture it; capture="off" does not')
                raise
            reason = failure("watching the step failed", error)
        else:
            return
        self._session.fail(entry, reason)
        if "end" not in passed:
            before.take_back()
            self._batch, session.steps_eager = batch, counted
            self._eagerly_with_room(region, before)

    def _host_state(self) -> Any:
        return python_state(self._module), self._looks().states()

    def _fitting(self, entry: Entry, recording: Recording) -> list[Tensor | None] | None:
        """Return what the program is to run on; None where it can't run on what is there now."""
        try:
            inputs = recording.inputs(self._tensor_leaves)
            return inputs if recording.fits(inputs) else None
        except Exception as error:  # nothing of the step has run yet
            self._session.fail(entry, failure("looking at what the program works on failed", error))
            return None

    def _rollback(self, entry: Entry) -> Rollback | None:
        """Return a copy of what the step may change; None, with a reason noted, where that fails."""
        try:
            return Rollback(self._surroundings, self._tensor_leaves, self._session.runtime)
        except Exception as error:  # nothing has been tried yet
            self._session.fail(entry, failure("copying what the step may change failed", error))
            return None

    def _eagerly_with_room(self, region: Region, before: Rollback, *copies: Saved) -> None:
        """Run the region eagerly; where memory runs out, let go of all that captured steps keep and run it once more.

        Args:
            region: The step.
            before: What it starts from.
            copies: What else is held of it.
        """
        try:
            self._eagerly(region)
        except torch.OutOfMemoryError as error:
            reason = failure("beside what is captured, an eager step ran out of memory", error)
        else:
            return
        before.take_back()
        for copy in (before.saved, *copies):
            copy.forget()
        self._session.shared.give_up(reason)
        self._session.steps_eager -= 1
        self._eagerly(region)
