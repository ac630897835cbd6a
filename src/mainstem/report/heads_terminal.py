"""What heads do, for the terminal: for each behaviour the first heads, with and without the sink, beside the null."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mainstem.report import heads_text as words
from mainstem.report import terminal as t
from mainstem.report.text import plain, plural, scientific, signed
from mainstem.results.heads import BehaviourReading, HeadsReading


def print_heads(console: Console, reading: HeadsReading) -> None:
    """Prints what heads do, as wide as the console is."""
    r = reading
    console.print(*t.title_rows("heads", r.model, r.provenance), sep="\n")
    console.print(t.labelled("heads", Text(plural(r.count, "head"))))
    console.print(t.labelled("tokens", Text(words.random_text(r))))
    if r.text["windows"]:
        console.print(t.labelled("text", Text(f"{plural(r.text['windows'], 'window')} of {r.text['length']} tokens")))
    console.print(t.labelled("learning", Text(f"in context: {words.in_context_text(r)}")))
    console.print(t.labelled("sinks", Text(words.sinks_text(r))))
    for one in r.behaviours:
        console.print(
            t.heading(words.title(one), words.MEANINGS[one.name]),
            _heads(r, one),
            Text(words.summary(one), "quiet"),
            sep="\n",
        )
    if r.ablations:
        caption = "by how many nats the loss of a token rises on the second copy of random tokens, and on the first"
        console.print(t.heading("Heads taken out", caption), _ablations(r), sep="\n")
        names = {row.behaviour: row.heads for row in r.ablations}
        for name, heads in names.items():
            console.print(Text(f"{name}: {', '.join(heads)}", "quiet"))
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))


def _heads(r: HeadsReading, one: BehaviourReading) -> Table:
    attends = any(row.sink is not None for row in one.heads)
    control = any(row.control is not None for row in one.heads)
    seen = any(row.without_sink is not None for row in one.heads)
    table = t.lined()
    table.add_column("rank", justify="right")
    table.add_column("head", no_wrap=True)
    heads = ["score", *(["control"] if control else []), "null", *(["sink"] if attends else [])]
    heads += [*(["without sink", "rank so"] if seen else []), "q"]
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for row in words.rows(r, one):
        numbers = [plain(row.score), *([plain(row.control)] if control else []), plain(row.null)]
        numbers += [plain(row.sink)] if attends else []
        numbers += [plain(row.without_sink), str(row.rank_without_sink)] if seen else []
        table.add_row(
            Text(str(row.rank)),
            Text(row.head, "title" if row.found else "quiet"),
            Text(numbers[0], "for" if row.found else ""),
            *(Text(number) for number in [*numbers[1:], scientific(row.q)]),
        )
    return table


def _ablations(r: HeadsReading) -> Table:
    table = t.lined()
    for name, justify in (("heads of", "left"), ("by", "left"), ("repeated", "right"), ("first", "right"),
                          ("random heads, repeated", "right"), ("", "left")):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in r.ablations:
        control = row.control.repeated
        table.add_row(
            Text(row.behaviour, "title"),
            Text(row.method),
            Text(signed(row.repeated), "for" if row.repeated > max(control) else ""),
            Text(signed(row.first)),
            Text(f"{signed(min(control))} … {signed(max(control))}"),
            Text(words.ablation_text(row), "quiet"),
        )
    return table
