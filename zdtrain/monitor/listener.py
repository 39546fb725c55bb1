"""The host's side of the monitors: what rows that arrive say about them."""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import compress, islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zdtrain.consumers.steps import RowLayout, Stamp
from zdtrain.device.base import Runtime
from zdtrain.drain import Drain, Value, pack_vectors
from zdtrain.monitor.base import Monitor
from zdtrain.monitor.events import MonitorEvent, nearest
from zdtrain.monitor.guard import Verdict
from zdtrain.monitor.informing import Columns, Watched
from zdtrain.monitor.values import OWN, StepValues
from zdtrain.ring import Rows, look_at

Tell = Callable[[MonitorEvent, Monitor], None]


class Reading(NamedTuple):
    """How the monitors that inform read rows that hold certain values."""

    key: tuple[RowLayout, list[str], list[tuple[bool, ...]]]
    """The layout, the values of our own that there are, and which columns steps logged."""
    columns: list[Columns]
    """Where each monitor looks."""


class RowListener:
    """Hears every row before anybody else, evaluates the monitors that only inform, and keeps back rows after a stop.

    Args:
        watching: Monitors that warn or call a function.
        verdicts: Columns of `acted`, of the monitors that act inside the step.
        acted: Which of them did, shape=(verdicts,), bool, device-resident.
        values: Where the values of the step lie.
        drain: The way to the host.
        tell: Called with every event and its monitor, in the order of the steps.
        step: Number of the next step.
    """

    def __init__(
        self,
        watching: Sequence[Monitor],
        verdicts: Sequence[Verdict],
        acted: Tensor,
        values: StepValues,
        drain: Drain,
        tell: Tell,
        step: int,
    ) -> None:
        self._on_host = drain.runtime.is_immediate
        self._watching = [Watched(monitor, on_host=self._on_host) for monitor in watching]
        self._verdicts = list(verdicts)
        self._parts = [acted, values.vector] if verdicts else [values.vector]
        self._values = values
        self._extras = values.names  # what follows the verdicts in a row
        self._drain = drain
        self._runtime: Runtime = drain.runtime
        self._rows_written = self._runtime.event()
        self._tell = tell
        self.heard = step - 1  # the newest step whose row has arrived
        self.stop: MonitorEvent | None = None
        self.stop_monitor: Monitor | None = None
        self.skipped: list[int] = []  # steps whose update was held back, not accounted for on the host yet
        self.seen: set[str] = set()  # metrics that some row held
        self._rows: dict[int, Sequence[Sequence[Value]]] = {}  # not judged by monitors that inform yet, by first step
        self._to_tell: list[tuple[MonitorEvent, Monitor]] = []
        self._reading: Reading | None = None
        self._named: tuple[tuple[RowLayout, list[str]], dict[str, int]] | None = None
        self._acted_here = acted.numpy() if self._on_host else None

    def parts(self) -> list[Tensor]:
        """Return what belongs to a row behind the logged metrics."""
        return self._parts

    def widths(self) -> list[int]:
        """Return the lengths of `parts`."""
        return [len(part) for part in self._parts]

    def is_urgent(self) -> bool:
        """Return whether a monitor acted in this step, where looking costs nothing; elsewhere the row says it."""
        return self._acted_here is not None and 1 in self._acted_here.tobytes()

    def take_skipped(self, last: int) -> list[int]:
        """Return the steps up to `last` that were skipped since the last call."""
        taken = [step for step in self.skipped if step <= last]
        self.skipped = self.skipped[len(taken) :]
        return taken

    def hear(self, stamps: Sequence[Stamp], layout: RowLayout, rows: Sequence[Sequence[Value]]) -> int:
        """Take in rows that have arrived; return how many of them lie before a stop, for others to see."""
        if self.stop is not None:
            return 0
        self.heard = stamps[-1].step
        count, first, end = len(rows), len(layout.names), len(layout.names) + len(self._verdicts)
        if self._verdicts and any(map(any, islice(zip(*rows, strict=True), first, end))):
            count = self._hear_actions(stamps, layout, rows)
        if self._watching:
            self._rows[stamps[0].step] = rows[:count]
        return count

    def _hear_actions(self, stamps: Sequence[Stamp], layout: RowLayout, rows: Sequence[Sequence[Value]]) -> int:
        """Take note of what acted; return the number of the row that a monitor stopped at, or how many there are."""
        for index, (stamp, row) in enumerate(zip(stamps, rows, strict=True)):
            for verdict, flag in zip(self._verdicts, row[len(layout.names) :], strict=False):
                if not flag:
                    continue
                event = self._event(verdict.reason, verdict.action, stamp, layout, row)
                self._to_tell.append((event, verdict.monitor))
                if verdict.action == "stop":
                    self.stop, self.stop_monitor, self.heard = event, verdict.monitor, stamp.step
                    return index
                if verdict.action == "skip" and (not self.skipped or self.skipped[-1] != stamp.step):
                    self.skipped.append(stamp.step)
        return len(stamps)

    def tell(self) -> None:
        """Tell of what acted in the rows heard last."""
        to_tell, self._to_tell = self._to_tell, []
        for event, monitor in to_tell:
            self._tell(event, monitor)

    def watch(self, rows: Rows, layout: RowLayout, stamps: Sequence[Stamp]) -> None:
        """Evaluate what only informs, on the monitor stream.

        Args:
            rows: Values of some steps, where they are.
            layout: What the columns mean.
            stamps: What the host knows of the rows.
        """
        reading = self._read(layout, stamps)
        if not self._watching:
            return
        if self._on_host:
            self._inform(self._answers_here(self._ask(rows, reading, stamps)), reading, stamps)
            return
        self._rows_written.record("train")
        self._rows_written.wait("monitor")
        with self._runtime.on("monitor"):
            asked = self._ask(rows, reading, stamps)
            packed = pack_vectors([vector for vectors in asked for vector in vectors], self._runtime.device)
        sizes = [sum(len(vector) for vector in vectors) for vectors in asked]

        def deliver(numbers: list[Value], _alive: Rows = rows) -> None:
            arriving = iter(numbers)
            self._inform([list(islice(arriving, size)) for size in sizes], reading, stamps)

        self._drain.send(packed, deliver, stream="monitor")

    def _read(self, layout: RowLayout, stamps: Sequence[Stamp]) -> Reading:
        """Return how to read such rows, and take note of what they hold."""
        kinds = list({id(stamp.fresh): stamp.fresh for stamp in stamps}.values())
        key = (layout, self._values.found, kinds)
        if self._reading is None or self._reading.key != key:
            always = [all(column) for column in zip(*kinds, strict=True)]
            self._reading = Reading(key, [self._columns(watched.monitor, layout, always) for watched in self._watching])
            for fresh in kinds:
                for names in (layout.metrics, layout.names):
                    self.seen.update(compress(names, fresh))
            self.seen.update(self._values.found)
        return self._reading

    @torch.no_grad()
    def _ask(self, rows: Rows, reading: Reading, stamps: Sequence[Stamp]) -> list[list[Tensor]]:
        """Return what the host needs of the device, for each monitor."""
        table = rows if isinstance(rows, Tensor) else None
        if table is None and any(watched.asks_for_rows for watched in self._watching):
            table = torch.tensor(rows, dtype=torch.float64)
        return [
            watched.ask(table, columns, stamps)
            for watched, columns in zip(self._watching, reading.columns, strict=True)
        ]

    def _answers_here(self, asked: Sequence[Sequence[Tensor]]) -> list[list[Value]]:
        return [[number for vector in vectors for number in look_at(vector).tolist()] for vectors in asked]

    def _inform(self, answers: Sequence[Sequence[Value]], reading: Reading, stamps: Sequence[Stamp]) -> None:
        """Warn and call functions, step by step, about conditions whose outcome has arrived."""
        rows, layout = self._rows.pop(stamps[0].step, ()), reading.key[0]  # those before a stop
        for index, monitor in _judge(self._watching, answers, rows, reading, stamps):
            self._tell(self._event(monitor.describe(), monitor.action, stamps[index], layout, rows[index]), monitor)

    def state(self, look: tuple[Tensor, RowLayout, Stamp] | None) -> list[dict[str, Any]]:
        """Return what a run that goes on needs to know of the monitors that inform.

        Args:
            look: A row that is still to be sent, shape=(1, columns); it is taken in, for a copy of what is known.
        """
        watching = self._watching
        if look is not None and watching:
            row, layout, stamp = look
            watching = [watched.copy() for watched in watching]
            reading = self._read(layout, [stamp])
            asked = self._ask(row, reading, [stamp])
            answers = self._answers_here([[self._runtime.read(vector) for vector in vectors] for vectors in asked])
            _judge(watching, answers, self._runtime.read(row).tolist(), reading, [stamp])
        return [watched.state_dict() for watched in watching]

    def load_state(self, state: Sequence[dict[str, Any]]) -> None:
        """Take over what an earlier run knew."""
        for watched, known in zip(self._watching, state, strict=True):
            watched.load_state_dict(known)

    def _event(
        self, reason: str, action: str, stamp: Stamp, layout: RowLayout, numbers: Sequence[Value]
    ) -> MonitorEvent:
        names = self._names(layout)
        logged = [(layout.metrics[c], numbers[c]) for c in layout.order if stamp.fresh[c]]
        values = dict(logged)
        values.update({n: numbers[names[n]] for n in self._extras if n in names and n not in layout.metrics})
        bad = next((name for name, value in values.items() if not math.isfinite(value)), None)
        return MonitorEvent(
            monitor=reason,
            action=action,
            step=stamp.step,
            epoch=stamp.epoch,
            batch_idx=stamp.batch_idx,
            values=values,
            first_nonfinite=bad,
        )

    def unknown_metrics(self, elsewhere: Collection[str]) -> list[str]:
        """Return what to say of monitors whose metric no row of the first epoch held.

        Args:
            elsewhere: Names that were logged outside `training_step`, too.
        """
        monitors = [verdict.monitor for verdict in self._verdicts] + [watched.monitor for watched in self._watching]
        said = []
        for monitor in dict.fromkeys(monitors):
            for metric in monitor.metrics or ():
                # a module that optimizes by hand may return no loss, and no norm is measured where there is no gradient
                stands_in = metric in OWN and not self.seen.isdisjoint(monitor.metrics or ())
                if metric not in self.seen and not stands_in:
                    hint = nearest(metric, sorted(self.seen))
                    if metric in elsewhere:
                        hint = f"it is logged outside, where monitors do not look (EarlyStopping does); {hint}"
                    said.append(f"monitor {monitor.describe()!r}: training_step logged no {metric!r}; {hint}")
        return said

    def _columns(self, monitor: Monitor, layout: RowLayout, always: Sequence[bool]) -> Columns:
        """Return where `monitor` looks in rows.

        Args:
            monitor: The monitor.
            layout: What the columns mean.
            always: Whether every row holds a column, of those that were logged.
        """
        places = self._names(layout)
        names = [name for name in (places if monitor.metrics is None else monitor.metrics) if name in places]
        columns = [places[name] for name in names]
        return Columns(names, columns, all(always[place] for place in columns if place < len(always)))

    def _names(self, layout: RowLayout) -> dict[str, int]:
        """Return the column of each value by name; what was logged comes before what is our own."""
        known = (layout, self._values.found)
        if self._named is None or self._named[0] != known:
            first = len(layout.names) + len(self._verdicts)
            names = {name: first + index for index, name in enumerate(self._extras) if name in self._values.found}
            names.update((name, column) for column, name in enumerate(layout.names))
            names.update((name, column) for column, name in enumerate(layout.metrics))
            self._named = known, names
        return self._named[1]


def _judge(
    watching: Sequence[Watched],
    answers: Sequence[Sequence[Value]],
    rows: Sequence[Sequence[Value]],
    reading: Reading,
    stamps: Sequence[Stamp],
) -> list[tuple[int, Monitor]]:
    """Let `watching` take in rows; return which act at which, in the order of the rows."""
    if not rows:
        return []
    columns, some = list(zip(*rows, strict=True)), stamps[: len(rows)]
    found = [
        (index, watched.monitor)
        for watched, known, looks_at in zip(watching, answers, reading.columns, strict=True)
        for index in watched.follow(known, columns, looks_at, some)
    ]
    return sorted(found, key=itemgetter(0))
