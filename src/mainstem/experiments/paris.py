"""The Paris case: "The capital of France is" -> " Paris", told by its units (Yu, Exploring the Residual Stream, 2023).

Some attention subvalues say "Paris is related to France", some FFN subvalues say "Paris is a capital", and those are
activated by attention subvalues that read " capital". Against a capital of another country attention should decide,
against another French city the FFN. What the model says is looked up in the tokens that a unit promotes; what it does,
by taking the units out beside controls.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mainstem.errors import LevelRefusedError, TokenError, UsageError
from mainstem.experiments.outcome import Claim, Experiment, ExperimentTable, finding
from mainstem.results.explanation import Explanation, Queries, ValueRow
from mainstem.targets import parse_token

if TYPE_CHECKING:
    from mainstem.causal.outcomes import Verification
    from mainstem.causal.query_check import QueryCheck
    from mainstem.session import Model
    from mainstem.tracing import Trace

PROMPT = "The capital of France is"
TARGET = " Paris"
CAPITAL = " London"
CITIES = (" Bordeaux", " Lyon", " Nice")
SOURCE = "Yu, Exploring the Residual Stream of Transformers, 2023"
LISTED = 10
QUERIES = 200
CHECKED = 10


def run(model: "Model", quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Experiment:
    """Runs the case.

    Args:
        model: the model, with its tokenizer.
        quick: fewer draws of the controls.
        report: receives a line of progress for each step.

    Raises:
        UsageError: if the model has no tokenizer, or its vocabulary no token for the cities.
    """
    if model.tokenizer is None:
        raise UsageError("The case is text, and this model came without a tokenizer", None, "Give it one.")
    city = _one_token(model)
    trace = model.trace(PROMPT)
    report("attention's and the FFNs' top units ...")
    attention = trace.explain(target=TARGET, kinds=("attention_subvalue",), top=LISTED)
    ffn = trace.explain(target=TARGET, kinds=("ffn_neuron", "expert_neuron"), top=LISTED)
    if not attention.values or not ffn.values:
        raise UsageError("The case needs attention subvalues and FFN neurons", model.loaded.name, "Try another model.")
    report("contrasts ...")
    contrasts = {rival: trace.explain(target=TARGET, against=rival, top=1, score="direct") for rival in (CAPITAL, city)}
    capital = [row for row in ffn.values if _says(row, "capital")]
    report("what activates them ...")
    queries, checks = [], []
    for row in capital[:3]:
        try:
            queries.append(trace.queries(row.unit, top=QUERIES))
            checks.append(trace.check_queries(row.unit, CHECKED))
        except LevelRefusedError as error:  # experts' neurons have no one key
            report(f"{row.unit} is left out: {error.description}")
    report("taking the units out ...")
    verdict = trace.verify(TARGET, draws=3 if quick else 10)
    return _assemble(model, trace, attention, ffn, contrasts, city, capital, queries, checks, verdict)


def _one_token(model: "Model") -> str:
    """The first of a few French cities that is one token of the vocabulary."""
    for name in CITIES:
        try:
            parse_token(name, model.tokenizer, model.anatomy.sizes.d_vocab)
        except TokenError:
            continue
        return name
    raise UsageError(f"None of {', '.join(CITIES)} is one token here", model.loaded.name, "Try another model.")


def _says(row: ValueRow, *words: str) -> bool:
    """Whether one of the tokens that a unit promotes begins like one of the words."""
    return any(token.strip().lower().startswith(word) for token in row.promotes for word in words)


def _assemble(
    model: "Model",
    trace: "Trace",
    attention: Explanation,
    ffn: Explanation,
    contrasts: dict[str, Explanation],
    city: str,
    capital: list[ValueRow],
    queries: list[Queries],
    checks: list["QueryCheck"],
    verdict: "Verification",
) -> Experiment:
    by_source = {made.of: _by_source(made) for made in queries}
    return Experiment(
        name="paris",
        title='The Paris case: who says "Paris is related to France", who says "Paris is a capital"',
        question=f"{PROMPT!r} is continued by {TARGET!r} with probability {attention.target.probability:.3f}",
        provenance=model.provenance(),
        model=attention.model,
        claims=[
            _related(attention),
            _capital(ffn, capital),
            _activated(by_source),
            _checked(checks),
            _contrast(contrasts[CAPITAL], CAPITAL, "attn"),
            _contrast(contrasts[city], city, "mlp"),
            _causal(verdict),
        ],
        tables=[
            _values("Attention subvalues", attention),
            _values("FFN subvalues", ffn),
            _queries_table(queries),
            _contrast_table(contrasts),
            _ablations(verdict),
            _controls(verdict),
        ],
        warnings=attention.warnings,
        notes=_notes(city, verdict),
    )


def _notes(city: str, verdict: "Verification") -> list[str]:
    notes = list(verdict.notes)
    if city != CITIES[0]:
        notes.append(f"{CITIES[0]!r}, the city of the post, is several tokens here; {city!r} stands for it.")
    return notes


def _related(attention: Explanation) -> Claim:
    best = attention.values[0]
    reads = [row for row in attention.values if (row.source or "").strip() == "France"]
    says = [row for row in reads if _says(row, "france", "french", "paris")]
    return Claim(
        'Attention subvalues provide "Paris is related to France".',
        SOURCE,
        "shown by example",
        f"{best.unit} reads {best.source!r}: {best.increase:+.2f} nats, promotes {', '.join(best.promotes[:3])}; "
        f"{len(says)} of the top {len(attention.values)} read ' France' and promote it",
        f"one of {len(attention.prompt['tokens'])} sources at random",
        finding(best in says, bool(says)),
        {"units": [row.unit for row in says]},
    )


def _capital(ffn: Explanation, capital: Sequence[ValueRow]) -> Claim:
    found = ", ".join(f"{row.unit} {row.increase:+.2f} nats ({', '.join(row.promotes[:2])})" for row in capital)
    return Claim(
        'FFN subvalues provide "Paris is a capital".',
        SOURCE,
        "shown by example",
        found or "none of the top FFN units promotes a word that begins with capital",
        f"of {len(ffn.values)} listed, {len(capital)} promote it",
        finding(bool(capital)),
        {"units": [row.unit for row in capital]},
    )


def _by_source(made: Queries) -> dict[str, float]:
    """What attention subvalues give to a value unit, by the source token that they read; parts of its quantity."""
    out: dict[str, float] = defaultdict(float)
    for row in made.rows:
        if row.kind == "attention_subvalue" and row.source is not None:
            out[row.source] += row.share / made.observed
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _activated(by_source: dict[str, dict[str, float]]) -> Claim:
    most = {unit: max(own, key=lambda token: own[token]) for unit, own in by_source.items() if own}
    right = [unit for unit, token in most.items() if token.strip().lower() == "capital"]
    text = "; ".join(
        f"{unit}: " + ", ".join(f"{token!r} {100 * value:+.0f} %" for token, value in list(own.items())[:4])
        for unit, own in by_source.items()
    )
    return Claim(
        "Those FFN subvalues are mainly activated by attention subvalues that read the word capital.",
        SOURCE,
        "shown by example",
        text or "no such FFN subvalue",
        "parts of the activation, by the source that subvalues read; parts cancel, so they may be large",
        finding(bool(most) and len(right) == len(most), bool(right)),
        {"by_source": by_source},
    )


def _checked(checks: Sequence["QueryCheck"]) -> Claim:
    text = "; ".join(
        f"{check.unit}: {check.before:.2f} to {check.after:.2f} without the {len(check.queries)} largest, "
        f"whose shares are {check.share:+.2f}"
        for check in checks
    )
    null = "; ".join(f"norm-matched: {check.before - check.control:.2f}" for check in checks)
    return Claim(
        "Without its queries a value unit is not activated.",
        SOURCE,
        "claimed, not tested",
        text or "no such FFN subvalue",
        null or "none",
        finding(bool(checks) and all(check.holds for check in checks), any(check.holds for check in checks)),
        {str(check.unit): {"before": check.before, "after": check.after, "share": check.share} for check in checks},
    )


def _contrast(made: Explanation, rival: str, expected: str) -> Claim:
    attention, ffn = made.account.get("attn", 0.0), made.account.get("mlp", 0.0)
    larger = "attn" if attention > ffn else "mlp"
    word = {"attn": "attention", "mlp": "the FFN"}
    return Claim(
        f"Paris against{rival}: {word[expected]} decides.",
        SOURCE,
        f"{word[expected]} tells them apart",
        f"of a logit difference of {made.account['total']:+.2f}: attention {attention:+.2f}, FFN {ffn:+.2f}",
        "the two equal",
        finding(larger == expected and made.account.get(expected, 0.0) > 0),
        {"attention": attention, "ffn": ffn},
    )


def _causal(verdict: "Verification") -> Claim:
    random = next(control for control in verdict.controls if control.name.startswith("random"))
    return Claim(
        "A few neurons hold the answer.",
        SOURCE,
        "ablation lowers it",
        f"probability {verdict.before.probability:.3f} to {verdict.ablated['probability']:.4f} without "
        f"{len(verdict.ablated['units'])} neurons; verdict: {verdict.verdict}",
        f"random: {random.mean:.3f} [{random.min:.3f}, {random.max:.3f}]",
        finding(verdict.verdict == "causal and specific", verdict.verdict == "causal"),
        {"verdict": verdict.verdict},
    )


def _values(title: str, made: Explanation) -> ExperimentTable:
    rows = [
        [row.unit, row.source or "", row.increase, row.additive, ", ".join(row.promotes[:4])] for row in made.values
    ]
    return ExperimentTable(
        title,
        f"the {len(rows)} that raise the answer's log-probability most, exactly; nats, frozen norm",
        ["unit", "reads", "increase", "additive", "promotes"],
        rows,
    )


def _queries_table(queries: Sequence[Queries]) -> ExperimentTable:
    rows = [
        [made.of, row.unit, row.source or "", row.share, ", ".join(row.promotes[:4])]
        for made in queries
        for row in made.rows[:8]
    ]
    return ExperimentTable(
        "What activates them",
        "earlier units with the largest shares of each FFN subvalue's activation",
        ["value", "query", "reads", "share", "reads as"],
        rows,
    )


def _contrast_table(contrasts: dict[str, Explanation]) -> ExperimentTable:
    rows = [
        [rival, made.account.get("attn", 0.0), made.account.get("mlp", 0.0), made.account["total"]]
        for rival, made in contrasts.items()
    ]
    return ExperimentTable(
        "Contrasts",
        "the logit of Paris minus that of the rival, by kind of writer",
        ["against", "attention", "FFN", "total"],
        rows,
    )


def _ablations(verdict: "Verification") -> ExperimentTable:
    rows = [[row.name, row.method, row.units, row.outcome.probability, row.outcome.rank] for row in verdict.rows]
    return ExperimentTable(
        "Units taken out",
        "without the top units by increase; mean, resample: values of a reference text in their place",
        ["taken out", "method", "units", "probability", "rank"],
        [["nothing", "", 0, verdict.before.probability, verdict.before.rank], *rows],
    )


def _controls(verdict: "Verification") -> ExperimentTable:
    rows = [[c.name, c.draws, c.mean, c.min, c.max, "yes" if c.beaten else "no"] for c in verdict.controls]
    return ExperimentTable(
        "Others taken out instead",
        "as many other units, zeroed; does less: whether every draw lowers the answer by less than the top units",
        ["control", "draws", "probability", "least", "most", "does less"],
        rows,
    )
