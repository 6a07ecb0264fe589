"""One file per verb: parse, call the library, print.

``coterie --help`` lists the table VERBS below. The table imports no verb: most verbs import NumPy and trace readers,
which would make help take twice as long.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer


class Verb(NamedTuple):
    """Verb that is imported when it is used: function `NAME_command` of module `NAME`, or Typer group `NAME_app`."""

    summary: str
    """Line in the list of verbs; the verb's own help is its docstring."""
    compile_s: int | None = None
    """Seconds to compile the verb's loops on an idle core, once; None if it depends on options whether any compile."""
    command_class: str | None = None
    """Name of a command class in the verb's module, used instead of Typer's; None takes Typer's."""
    folder: str = ""
    """Sub-folder of the verb's module; empty for this folder."""

    def load(self, name: str) -> Any:
        """Import the verb and return it as a command."""
        module = import_module(".".join(filter(None, (__name__, self.folder, name))))
        group = getattr(module, f"{name}_app", None)
        if group is None:
            group = typer.Typer(add_completion=False, rich_markup_mode="rich")
            of_class = None if self.command_class is None else getattr(module, self.command_class)
            group.command(name, cls=of_class)(getattr(module, f"{name}_command"))
        command = typer.main.get_command(group)
        command.name = name
        command.params.append(plugin_option())
        return command


def _load_plugins(names: list[str] | None) -> None:
    from coterie.registry import load_plugin

    for name in names or ():
        load_plugin(name)


def _takes_plugins(
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            metavar="MODULE",
            help="Module or .py file with policies of yours, which are then found by name. May be repeated.",
            callback=_load_plugins,
            is_eager=True,  # parsed before other options, whose values may be names from the plugin
            expose_value=False,
        ),
    ] = None,
) -> None:
    del plugin


def plugin_option() -> Any:
    """Return the option `--plugin`, which every verb has."""
    app = typer.Typer(add_completion=False)
    app.command()(_takes_plugins)
    return typer.main.get_command(app).params[0]


VERBS = {
    "advise": Verb("Say which decisions pay on your own traffic, and write the files that turn them on.", 30),
    "bench": Verb("Measure how fast Coterie is on this machine."),
    "calibrate": Verb("Measure this machine's device and fit the step-time model to it."),
    "convert": Verb("Read a trace of any known format and write it in another."),
    "demo": Verb("Serve a small model with several workers and see what routing by experts saves.", 15),
    "evaluate": Verb("Run a suite: our numbers beside the published ones.", command_class="SeveralValues"),
    "fit": Verb("Fit a router to a trace.", 10),
    "fleet": Verb("Say what every router would save on a fleet of yours, on a trace's own requests.", 20),
    "generate": Verb("Generate a synthetic trace.", 7),
    "inspect": Verb("Show how a trace uses its experts.", 2),
    "load": Verb("Measure a server under load: TTFT and TPOT with intervals, routers compared.", folder="serving"),
    "models": Verb("List known models, or show the shape of one."),
    "place": Verb("Look at placements, and apply them to checkpoints."),
    "plan": Verb("Plan where experts live, and when moving them pays off.", 30),
    "record": Verb("Record the experts of real requests, from a model run here or a running server."),
    "serve": Verb("Route requests in front of a live fleet; OpenAI-compatible.", 10, folder="serving"),
    "simulate": Verb("Simulate batch selection on your own requests.", 10),
    "tokens": Verb("Make the token table that vLLM's scheduler takes as `loads`.", 3),
    "warm": Verb("Compile the loops of all verbs ahead."),
    "worker": Verb("Serve a model with the reference worker.", folder="serving"),
}
