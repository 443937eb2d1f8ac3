"""The same record, looked at by hand: choose a case, see its figure and table; or launch another
run.

Without a front end (report, papermill) the figure of the default choice is drawn as it stands, and
no widget is made: a saved notebook then holds nothing that would need a live kernel to be seen.
"""

from __future__ import annotations

from collections.abc import Callable

from rlkernel.figures import Plot
from rlkernel.figures import rows as of
from rlkernel.pages import evidence, show
from rlkernel.pages.evidence import Evidence

# What a reader may choose: label -> the text of that property of a row.
AXES: dict[str, Callable[[dict], str]] = {
    "P": lambda row: str(of.ranks(row)),
    "dtype": lambda row: row["case"]["dtype"],
    "fault": lambda row: row["case"]["fault"],
    "seed": lambda row: str(row["case"]["seed"]),
}


def choices(rows) -> dict[str, list[str]]:
    """For each axis its values in the order of the record."""
    return {name: list(dict.fromkeys(map(value, rows))) for name, value in AXES.items()}


def select(rows, chosen: dict[str, str]) -> list[dict]:
    """The rows that agree with every choice."""
    return [r for r in rows if all(AXES[name](r) == value for name, value in chosen.items())]


def browse(plot: Plot, found: Evidence) -> None:
    """Choose P, dtype, fault and seed of a record's cases and see that case drawn.

    Headless: the first case that failed, or the first one, as a static figure.
    """
    if found.local is None:
        show.not_measured(found)
        return
    if show.headless():
        default = _default(found.local.rows)
        show.figure(plot, _only_local(found), rows=lambda record: select(record.rows, default))
        return
    import ipywidgets
    from IPython.display import HTML, display

    chosen, drawn = menus(plot, found)
    shown = ipywidgets.interactive_output(lambda **c: display(HTML(drawn(**c))), chosen)
    display(ipywidgets.HBox(list(chosen.values())), shown)


def menus(plot: Plot, found: Evidence) -> tuple[dict, Callable[..., str]]:
    """({axis: menu}, a function of the chosen values -> HTML of that case)."""
    import ipywidgets

    rows = found.local.rows
    start = _default(rows)
    made = {
        name: ipywidgets.Dropdown(options=values, value=start[name], description=name)
        for name, values in choices(rows).items()
    }

    def drawn(**chosen: str) -> str:
        picked = select(rows, chosen)
        if not picked:
            return "<p>No such case was measured.</p>"
        return show.figure_html(plot, picked, found.local)

    return made, drawn


def launch_button(experiment: str, parameters: dict, then: Callable | None = None) -> None:
    """A button that measures `parameters` anew and shows the verdict; headless: the command.

    then: called with the new evidence, to draw it.
    """
    if show.headless():
        show.command(Evidence(experiment, parameters, None).command)
        return
    from IPython.display import display

    display(*button(experiment, parameters, then))


def button(experiment: str, parameters: dict, then: Callable | None = None) -> tuple:
    """(the button, where it shows what it measured)."""
    import ipywidgets

    made = ipywidgets.Button(description=f"Measure {experiment}", button_style="primary")
    output = ipywidgets.Output()

    def press(_):
        output.clear_output()
        with output:
            found = evidence.get(experiment, force=True, **parameters)
            show.verdict(found, "This run")
            if then:
                then(found)

    made.on_click(press)
    return made, output


def _default(rows) -> dict[str, str]:
    """The first case that failed, or the first one."""
    first = next((row for row in rows if not row["passed"]), rows[0])
    return {name: value(first) for name, value in AXES.items()}


def _only_local(found: Evidence) -> Evidence:
    return Evidence(found.experiment, found.parameters, found.local)
