"""The same record, looked at by hand: choose a case, see its figure and table; or launch another
run.

Without a front end (report, papermill) the figure of the default choice is drawn as it stands, and
no widget is made: a saved notebook then holds nothing that would need a live kernel to be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rlkernel.figures import Plot, schedules
from rlkernel.figures import rows as of
from rlkernel.pages import evidence, show
from rlkernel.pages.evidence import Evidence

# What a reader may choose: label -> the text of that property of a row.
AXES: dict[str, Callable[[dict], str]] = {
    "block": lambda row: of.option(row, "block"),
    "layout": lambda row: of.option(row, "layout"),
    "contract": lambda row: of.option(row, "contracts"),
    "M": lambda row: of.option(row, "m"),
    "P": lambda row: str(of.ranks(row)),
    "dtype": lambda row: row["case"]["dtype"],
    "fault": lambda row: row["case"]["fault"],
    "seed": lambda row: str(row["case"]["seed"]),
    "EP": lambda row: str(of.lanes(row)),
    "direction": lambda row: schedules.Line(row, "none").direction,
    "schedule": lambda row: of.option(row, "schedule"),
}
BROWSED = ("P", "dtype", "fault", "seed")
PARAMETER = {"P": "nproc", "M": "m"}  # axes that an experiment calls otherwise


def choices(rows, axes=BROWSED) -> dict[str, list[str]]:
    """For each axis its values in the order of the record."""
    return {name: list(dict.fromkeys(map(AXES[name], rows))) for name in axes}


def select(rows, chosen: dict[str, str]) -> list[dict]:
    """The rows that agree with every choice."""
    return [r for r in rows if all(AXES[name](r) == value for name, value in chosen.items())]


def browse(
    plot: Plot,
    found: Evidence,
    axes=BROWSED,
    start: dict[str, str] | None = None,
    again=False,
    only=None,
) -> None:
    """Choose one of a record's cases by its axes and see it drawn; each menu offers what fits those
    in front of it. The record is the local one, else the first published one.

    start: the values chosen first; where they fit no case, the first that failed, or the first one.
    Headless, that case as a static figure. again: with a button that measures the chosen case anew,
    with another seed. only: a function of the rows, to those that may be chosen.
    """
    show.missing(found)
    if not found.records:
        return
    found = _first(found, only)
    if show.headless():
        default = _default(show.rows(found), axes, start)
        show.figure(plot, found, rows=lambda record: select(record.rows, default), gap=False)
        return
    import ipywidgets
    from IPython.display import HTML, display

    chosen, drawn = menus(plot, found, axes, start)
    shown = ipywidgets.interactive_output(lambda **c: display(HTML(drawn(**c))), chosen)
    display(ipywidgets.HBox(list(chosen.values())), shown)
    if again:
        display(*anew(plot, found.experiment, chosen))


def live(plot: Plot, compute: Callable[..., list[dict]], offered: dict, start=None) -> None:
    """Choose the arguments of compute(**chosen) -> rows and see them drawn, computed at once.

    offered: argument -> the values that it may take. start: argument -> the value chosen first, by
    default the first one. Headless, those as a static figure.
    """
    first = {name: (start or {}).get(name, values[0]) for name, values in offered.items()}
    if show.headless():
        show.computed(plot, compute(**first))
        return
    import ipywidgets
    from IPython.display import HTML, display

    made, drawn = live_menus(plot, compute, offered, first)
    shown = ipywidgets.interactive_output(lambda **c: display(HTML(drawn(**c))), made)
    display(ipywidgets.HBox(list(made.values())), shown)


def live_menus(plot: Plot, compute, offered: dict, first: dict) -> tuple[dict, Callable[..., str]]:
    """({argument: menu}, a function of the chosen values -> HTML of what they give)."""
    import ipywidgets

    made = {
        name: ipywidgets.Dropdown(options=list(values), value=first[name], description=name)
        for name, values in offered.items()
    }
    return made, lambda **chosen: show.figure_html(plot, compute(**chosen), show.COMPUTED)


def menus(
    plot: Plot, found: Evidence, axes=BROWSED, start: dict[str, str] | None = None
) -> tuple[dict, Callable[..., str]]:
    """({axis: menu}, a function of the chosen values -> HTML of that case)."""
    import ipywidgets

    rows, made = show.rows(found), {}
    for name, value in _default(rows, axes, start).items():
        fitting = choices(select(rows, {n: m.value for n, m in made.items()}), (name,))[name]
        made[name] = ipywidgets.Dropdown(options=fitting, value=value, description=name)

    def follow(_change) -> None:
        fitting = rows
        for name, menu in made.items():
            offered, kept = choices(fitting, (name,))[name], menu.value
            if list(menu.options) != offered:
                menu.options = offered
                menu.value = kept if kept in offered else offered[0]
            fitting = select(fitting, {name: menu.value})

    for menu in made.values():
        menu.observe(follow, "value")

    def drawn(**chosen: str) -> str:
        picked = select(rows, chosen)
        if not picked:
            return "<p>No such case was measured.</p>"
        return show.figure_html(plot, picked, show.sources(found.records[0], bool(found.local)))

    return made, drawn


def anew(plot: Plot, experiment: str, chosen: dict) -> tuple:
    """(a seed, a button that measures the chosen case with it, where that is drawn)."""
    import ipywidgets

    seed = ipywidgets.IntText(value=7, description="seed")
    made = ipywidgets.Button(description=f"Run {experiment} on it", button_style="primary")
    output = ipywidgets.Output()

    def press(_) -> None:
        output.clear_output()
        asked = {PARAMETER.get(name, name): menu.value for name, menu in chosen.items()}
        with output:
            found = evidence.get(experiment, **{**asked, "seed": seed.value})
            show.figure(plot, found)

    made.on_click(press)
    return seed, made, output


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


def _default(rows, axes=BROWSED, start: dict[str, str] | None = None) -> dict[str, str]:
    """The case that `start` names, or the first that failed, or the first one."""
    fitting = (select(rows, start) if start else []) or [r for r in rows if not r["passed"]]
    first = (fitting or rows)[0]
    return {name: AXES[name](first) for name in axes}


def _first(found: Evidence, only: Callable | None = None) -> Evidence:
    """The first record alone, with only those of its rows."""
    first = found.records[0]
    if only:
        first = dataclasses.replace(first, rows=only(first.rows))
    local, published = (first, ()) if found.local else (None, (first,))
    return dataclasses.replace(found, local=local, published=published)
