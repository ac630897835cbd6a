"""The published claims of the six-relations evaluation against what was measured, each with its null and a finding."""

from collections.abc import Sequence

from mainstem.analysis.intervals import Interval
from mainstem.analysis.scores import PUBLISHED
from mainstem.analysis.statistics import difference, interval
from mainstem.causal.outcomes import NAMED, RANDOM, Outcome
from mainstem.experiments.knowledge_runs import PromptRun
from mainstem.experiments.outcome import Claim, finding

SOURCE = "Yu and Ananiadou, EMNLP 2024"
OURS = "this project"


def claims(
    runs: Sequence[PromptRun], n_layers: int, overlap: dict[str, dict[str, float]], scores: Sequence[str]
) -> list[Claim]:
    """All claims."""
    found = [_best(runs), _weak(runs), *_drops(runs), _random(runs), _specific(runs), _contrast(runs)]
    found += [_deep(runs, n_layers)]
    if any(one.queries for one in runs):
        found += [_queries(runs), _shallower(runs, n_layers)]
    return [*found, _kinds(runs), *_shared(overlap)]


def percent(x: float) -> str:
    """12.3 %."""
    return f"{100 * x:.1f} %"


def shown(x: Interval) -> str:
    """A share with its interval."""
    return f"{percent(x.mean)} [{100 * x.low:.1f}, {100 * x.high:.1f}]"


def change(x: Interval) -> str:
    """The change of a probability when the share x of it is lost: -95.8 %, with its interval."""
    return f"{-100 * x.mean:+.1f} % [{-100 * x.high:+.1f}, {-100 * x.low:+.1f}]".replace("-", "\N{MINUS SIGN}")


def lost(after: Sequence[Outcome], before: Sequence[Outcome]) -> list[float]:
    """The part of the answer's probability that is lost, prompt by prompt."""
    return [1 - a.probability / b.probability for a, b in zip(after, before, strict=True)]


def _of(runs: Sequence[PromptRun], score: str) -> list[float]:
    return [one.compared[score].probability for one in runs]


def _best(runs: Sequence[PromptRun]) -> Claim:
    """Holds if no other published score leaves less, but for those within the interval of the paired difference."""
    own = _of(runs, "increase")
    others = {name: difference(own, _of(runs, name)) for name in PUBLISHED if name != "increase"}
    better = [name for name, gap in others.items() if gap.low > 0]
    best = min(others, key=lambda name: interval(_of(runs, name)).mean)
    loses = difference([one.before.probability for one in runs], own)
    clear = [name for name, gap in others.items() if gap.high < 0]
    return Claim(
        "Of the eight scores, log-probability increase finds the ten FFN neurons whose loss costs the answer most.",
        f"{SOURCE}, table 2",
        "774M model: MRR 0.361 to 0.201, p 7.1 to 3.4 %; next best log p(w|v), 3.6 %",
        f"p {percent(interval([one.before.probability for one in runs]).mean)} to {shown(interval(own))}; "
        f"next best {best}, {percent(interval(_of(runs, best)).mean)}; clearly better than {len(clear)} of "
        f"{len(others)}" + (f"; worse than {', '.join(better)}" if better else ""),
        "the difference's interval over prompts",
        finding(not better and loses.low > 0, not better),
        {name: gap.__dict__ for name, gap in others.items()},
    )


def _weak(runs: Sequence[PromptRun]) -> Claim:
    before = [one.before for one in runs]
    drops = {name: interval(lost([one.compared[name] for one in runs], before)) for name in ("norm", "coefficient")}
    return Claim(
        "Norm and |coefficient| find hardly any: the answer keeps nearly all of its probability.",
        f"{SOURCE}, table 2",
        "norm 7.1 of 7.1 %, |coefficient| 8.6 of 7.1 %",
        "; ".join(f"{name} loses {shown(drop)}" for name, drop in drops.items()),
        "no loss",
        finding(all(drop.mean < 0.2 for drop in drops.values()), any(drop.mean < 0.2 for drop in drops.values())),
        {name: drop.__dict__ for name, drop in drops.items()},
    )


def _drops(runs: Sequence[PromptRun]) -> list[Claim]:
    before = [one.before for one in runs]
    null = interval(_null(runs))
    out = []
    for name in ("increase", "additive"):
        small = interval(lost([one.taken[f"{name} 25 + 75"] for one in runs], before))
        large = interval(lost([one.taken[f"{name} 100 + 200"] for one in runs], before))
        out.append(
            Claim(
                f"A few hundred neurons hold the answer: those that {name} names.",
                f"{SOURCE}, section 5" if name == "increase" else OURS,
                "100 FFN + 200 attention neurons: probability -99.2 % (774M model), -99.6 % (7B model)",
                f"100 + 200: {change(large)}; 25 + 75: {change(small)}",
                f"random: {change(null)}",
                finding(small.mean >= 0.9 and large.mean >= 0.9, small.mean >= 0.5),
                {"25 + 75": small.__dict__, "100 + 200": large.__dict__},
            )
        )
    return out


def _null(runs: Sequence[PromptRun], name: str = RANDOM[0]) -> list[float]:
    """For each prompt the mean loss over the draws of a control."""
    out = []
    for one in runs:
        each = lost(one.controls[name], [one.before] * len(one.controls[name]))
        if each:
            out.append(sum(each) / len(each))
    return out


def _random(runs: Sequence[PromptRun]) -> Claim:
    before = [one.before for one in runs]
    top = interval(lost([one.taken["increase 25 + 75"] for one in runs], before))
    anywhere, matched = interval(_null(runs)), interval(_null(runs, RANDOM[2]))
    holds = anywhere.mean <= 0.05 and top.mean >= 5 * matched.mean
    return Claim(
        "Random neurons do next to nothing.",
        f"{SOURCE}, section 5",
        "-0.22 % (774M model), -0.14 % (7B model)",
        f"random anywhere {change(anywhere)}; norm-matched in the same layers {change(matched)}",
        f"the top units: {change(top)}",
        finding(holds, anywhere.mean <= 0.05),
        {"anywhere": anywhere.__dict__, "norm-matched": matched.__dict__},
    )


def _specificity(runs: Sequence[PromptRun], ranking: str, contrast: bool) -> list[float]:
    """For each prompt by how many nats more the top units lower the answer than the rivals' top units do."""
    out = []
    for one in runs:
        controls = (one.contrast if contrast else one.controls)[NAMED[1]]
        own = one.before.log_probability - one.taken[f"{ranking} 25 + 75"].log_probability
        rivals = [one.before.log_probability - found.log_probability for found in controls]
        out.append(own - sum(rivals) / len(rivals) if rivals else float("nan"))
    return [value for value in out if value == value]


def _specific(runs: Sequence[PromptRun]) -> Claim:
    excess = interval(_specificity(runs, "increase", False))
    before = [one.before for one in runs]
    top = interval(lost([one.taken["increase 25 + 75"] for one in runs], before))
    named = {name: interval(_null(runs, name)) for name in NAMED}
    return Claim(
        "The units hold this very answer: those of another answer of its kind do less.",
        OURS,
        "not tested by the paper",
        f"top units {change(top)}; " + "; ".join(f"{name} {change(drop)}" for name, drop in named.items()),
        f"excess over rivals {excess.mean:.2f} nats [{excess.low:.2f}, {excess.high:.2f}]",
        finding(excess.low > 0, excess.mean > 0),
        {"excess": excess.__dict__, **{name: drop.__dict__ for name, drop in named.items()}},
    )


def _contrast(runs: Sequence[PromptRun]) -> Claim:
    plain, own = _specificity(runs, "increase", False), _specificity(runs, "contrast", True)
    gap = difference(own, plain) if len(own) == len(plain) else interval([])
    contrast = interval(own)
    return Claim(
        "A contrastive ranking, answer over the other answers, is more specific than the plain one.",
        OURS,
        "not tested by the paper",
        f"excess over rivals {contrast.mean:.2f} nats [{contrast.low:.2f}, {contrast.high:.2f}], "
        f"{gap.mean:+.2f} [{gap.low:.2f}, {gap.high:.2f}] more than the plain ranking's",
        "no difference",
        finding(gap.low > 0, gap.mean > 0),
        {"excess": contrast.__dict__, "difference": gap.__dict__},
    )


def _depth(units: Sequence, n_layers: int) -> float:
    return sum((unit.layer or 0) + 0.5 for unit in units) / len(units) / n_layers


def _deep(runs: Sequence[PromptRun], n_layers: int) -> Claim:
    depth = interval([_depth([unit for unit, _ in one.values], n_layers) for one in runs])
    return Claim(
        "Value units lie deep.",
        f"{SOURCE}, section 5",
        "all value layers in the deep half",
        f"mean depth {percent(depth.mean)} of the layers [{100 * depth.low:.1f}, {100 * depth.high:.1f}]",
        "50 % for units at random",
        finding(depth.low > 0.6, depth.low > 0.5),
        depth.__dict__,
    )


def _queries(runs: Sequence[PromptRun]) -> Claim:
    own = [one for one in runs if one.queries]
    before = [one.before for one in own]
    named = interval(lost([one.queries["queries"] for one in own], before))
    chance = interval(lost([one.queries["random"] for one in own], before))
    return Claim(
        "Query neurons carry the answer too: without them the values are not activated.",
        f"{SOURCE}, section 5",
        "1,000 query neurons: probability -95 % in both models; random -1.1 %",
        f"100 query neurons: {change(named)}",
        f"random: {change(chance)}",
        finding(named.mean >= 0.8 and named.low > chance.high, named.low > chance.high),
        {"queries": named.__dict__, "random": chance.__dict__},
    )


def _shallower(runs: Sequence[PromptRun], n_layers: int) -> Claim:
    own = [one for one in runs if one.query_units]
    queries = [_depth(one.query_units, n_layers) for one in own]
    values = [_depth([unit for unit, _ in one.values], n_layers) for one in own]
    gap = difference(values, queries)
    return Claim(
        "Query neurons lie before the value units.",
        f"{SOURCE}, section 5",
        "medium layers against deep ones",
        f"mean depth {percent(interval(queries).mean)} against {percent(interval(values).mean)}",
        f"difference {percent(gap.mean)} [{100 * gap.low:.1f}, {100 * gap.high:.1f}]",
        finding(gap.low > 0),
        gap.__dict__,
    )


def _kinds(runs: Sequence[PromptRun]) -> Claim:
    by: dict[str, list[float]] = {}
    for one in runs:
        by.setdefault(one.prompt.relation, []).append(one.shares["attention"] - one.shares["FFN"])
    means = {relation: sum(values) / len(values) for relation, values in by.items()}
    expected = {"language": 1, "capital": 1, "country": 1, "number": -1}
    right = [name for name, sign in expected.items() if name in means and means[name] * sign > 0]
    text = ", ".join(f"{name} {value:+.1f}" for name, value in means.items())
    return Claim(
        "Attention gives most for language, capital and country, FFN for number.",
        f"{SOURCE}, section 5",
        "attention above FFN for the first three, below for number",
        f"attention minus FFN, nats: {text}",
        "signs at random: two of four",
        finding(len(right) == len(expected), len(right) > 2),
        means,
    )


def _shared(overlap: dict[str, dict[str, float]]) -> list[Claim]:
    if "same" not in overlap["values"] or "same" not in overlap.get("queries", {}):
        return []
    values, queries = overlap["values"], overlap["queries"]
    return [
        Claim(
            "Prompts of one relation share value neurons, and more of them than query neurons.",
            f"{SOURCE}, section 5",
            "value neurons 27.6 % shared, query neurons 15.7 %",
            f"value neurons {percent(values['same'])}, query neurons {percent(queries['same'])}",
            f"other relations: {percent(values.get('other', 0))} and {percent(queries.get('other', 0))}",
            finding(
                values["same"] > values.get("other", 0) and values["same"] > queries["same"],
                values["same"] > values.get("other", 0),
            ),
            {"values": values, "queries": queries},
        )
    ]
