"""A log of all inputs of a loop, and its replay: the same inputs give the same events.

A log is JSON Lines, one input per line; arrays are deflated and base64-encoded. Of an ignored value only the reason and
the worker are logged, so that hostile values cannot fill a disk. Fits are not logged: a job is pure, so the replay runs
it again, and a digest shows whether the result is the same fit.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.control.base import ControlEvent, FitJob, LoadSeen, RequestSeen
from coterie.control.intake import is_number
from coterie.control.loop import ControlLoop
from coterie.errors import TraceError
from coterie.routing import RouterFit
from coterie.types import Placement


class InputLog(AbstractContextManager["InputLog"]):
    """Writes the inputs of a loop to a file. Pass it to the loop as `log`; close it, or use a with statement."""

    def __init__(self, path: str | Path) -> None:
        """Create the file at `path`, which must not exist."""
        self.path = Path(path)
        self.problem: OSError | None = None
        """Error, such as a full disk, after which nothing more is written; the loop goes on."""
        self._stream: BinaryIO = self.path.open("xb")

    def __call__(self, do: str, /, **values: Any) -> None:
        if self.problem is not None or self._stream.closed:
            return
        line = {"do": do} | {name: _plain(value) for name, value in values.items()}
        try:
            self._stream.write(msgspec.json.encode(line) + b"\n")
            self._stream.flush()
        except OSError as error:
            self.problem = error

    def close(self) -> None:
        self._stream.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def replay(path: str | Path, loop: ControlLoop) -> list[ControlEvent]:
    """Feed a log to a fresh loop that was constructed like the logged one; return the events of its ticks."""
    events: list[ControlEvent] = []
    job: FitJob | None = None
    with Path(path).open("rb") as stream:
        for number, line in enumerate(_whole(stream), 1):
            try:
                values = msgspec.json.decode(line, type=dict[str, Any])
                do = values.pop("do")
                if do == "tick":
                    tick = loop.tick(_time(values["now_s"]))
                    events += tick.events
                    job = tick.job or job
                elif do == "candidate":
                    fit = loop.fit if job is None else job.run()
                    if job is not None and digest(fit) != values["fit"]:
                        raise ValueError("the job gives another fit than the logged one: was the loop made alike?")
                    loop.candidate(fit, _time(values["seconds"]))
                    job = None
                else:
                    _feed(loop, do, values)
            except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
                raise TraceError(path, f"line {number}", str(error)) from None
    return events


def _whole(stream: BinaryIO) -> Iterable[bytes]:
    """Yield complete lines; the last line is cut off if the process was killed."""
    for line in stream:
        if line.endswith(b"\n"):
            yield line


def _feed(loop: ControlLoop, do: str, values: Mapping[str, Any]) -> None:
    if do in ("request", "load"):
        arrays = {name: _array(values[name]) for name in ("prefill", "decode", "tokens") if name in values}
        loop.observe((RequestSeen if do == "request" else LoadSeen)(**(dict(values) | arrays)))
    elif do == "ignored":
        loop.intake.ignore(values["reason"], values["worker"])
    elif do in ("swapped", "swap_failed"):
        getattr(loop, do)(**(dict(values) | {"now_s": _time(values["now_s"])}))
    elif do == "map":
        slots = _array(values["slots"]).astype(np.int32)
        placement = Placement(slots, values["num_ranks"], values["num_experts"])
        loop.follow(values["worker"], values["version"], placement)
    elif do in ("fit_failed", "resize", "applied", "written", "bind"):
        getattr(loop, do)(**values)
    else:
        raise ValueError(f"do={do!r} is no input of a loop")


def digest(fit: RouterFit) -> str:
    """Return a hash of the values of a fit."""
    parts = fit.learned.profiles, fit.learned.centroids, fit.learned.shares
    return blake2b(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, RouterFit):
        return digest(value)
    if isinstance(value, np.ndarray):
        narrow = value.astype("<f8" if value.dtype.kind == "f" else "<i8")
        data = base64.b64encode(zlib.compress(narrow.tobytes(), 1)).decode()
        return {"dtype": narrow.dtype.str, "shape": narrow.shape, "data": data}
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not is_number(value) else value


def _time(value: Any) -> float:
    """Return a logged number; None stands for NaN and infinities, which JSON cannot hold."""
    return float("nan") if value is None else value


def _array(value: Mapping[str, Any]) -> NDArray[Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(value["data"])), value["dtype"]).reshape(value["shape"])
