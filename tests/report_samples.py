"""Results made by hand for the reports' tests: no model is needed, and everything that can go wrong is in them."""

from dataclasses import asdict, replace

from mainstem.analysis.intervals import Interval
from mainstem.experiments.everything import Part, Reproduction
from mainstem.experiments.outcome import (
    Claim,
    Curves,
    Experiment,
    ExperimentProvenance,
    ExperimentTable,
    Figure,
    Finding,
)
from mainstem.results.circuits import (
    AskedRow,
    CircuitReading,
    Copying,
    EntryRow,
    NamedRatio,
    TableSummary,
    TrigramRow,
)
from mainstem.results.description import (
    AnatomyDescription,
    BlockRow,
    CourseRow,
    FinalRow,
    HeadsRow,
    LensCertificate,
    LensReading,
    LevelRow,
    LikelyToken,
    NamedToken,
    NormRow,
    ReadRow,
    RefusalRow,
    ShapeRow,
    StateRow,
    StepRow,
    StreamRow,
    WriteRow,
)
from mainstem.results.explanation import Certificate, Explanation, LayerRow, Queries, QueryRow, Token, ValueRow
from mainstem.results.generation import Compared, Generated, Likelihood
from mainstem.results.patch import CellRow, PatchReading, StabilityRow
from mainstem.results.reading import CheckSummary, Provenance
from mainstem.results.subspace import Bar, Map, SubspaceReading
from mainstem.results.trigram import TrigramHeadRow, TrigramReading
from mainstem.results.unit import Null, Sigmoid, TokenLogit, UnitReading

NASTY = [
    "The",
    "<script>alert(1)</script>",
    "[bold red]x[/]",
    ":smile:",
    "line\nbreak",
    "\u202eevil",
    " ",
    "",
    "\x1b[31m",
    "日本",
    "\u0301",
    "</td>&amp;\"'",
    " is",
]
"""Tokens that a page or a terminal could take for something else."""

NAN = float("nan")
GOOD = CheckSummary(12, 1e-6, 1e-3, True)
BAD = CheckSummary(12, 0.5, 1e-3, False, "L1H0@3")
WARNINGS = [{"code": "sink", "text": "73% of the heads look at the first position.", "value": 0.73}]


def provenance() -> Provenance:
    return Provenance("0.1", "2.9", "5.0", "tiny", None, "float32", "cpu", 0, "2026-01-01T00:00:00+00:00")


def model() -> dict:
    return {"name": "tiny <model>", "n_layers": 2, "d_model": 16, "dtype": "float32"}


def certificate(holds: bool = True) -> Certificate:
    labels = GOOD if holds else BAD
    failed = None if holds else "the heads of L1.attn"
    error = 2e-7 if holds else 0.3
    return Certificate("units", 12, error, 3e-7, 1e-4, holds, 1234, 5e-7, 1e-6, labels, GOOD, failed)


def explanation(
    *,
    holds: bool = True,
    contrast: bool = False,
    negative: bool = False,
    empty: bool = False,
    queries: bool = False,
    scale: float = 1.0,
) -> Explanation:
    units = ["embed", "L0.attn", "L0.mlp", "L1.attn", "L1.mlp"]
    steps = [-20.0, 4.0, 1.5, -0.5, 14.9]
    directs = [-0.2, 1.0, 0.5, -1.5, 6.0]
    layers, so_far = [], 0.0
    for unit, step, direct in zip(units, steps, directs, strict=True):
        so_far += step
        layers.append(LayerRow(unit, so_far, step, direct * scale, ["<b>", " the"]))
    sign = -1 if negative else 1
    values = [
        ValueRow(
            "L1H0@3", "attention_subvalue", 0.9, sign * 2.0, sign * 1.5, sign * 2.5, NASTY[:5], NASTY[5:9], ":smile:"
        ),
        ValueRow("L1N7", "ffn_neuron", -24.0, sign * 1.0, None, sign * 2.0, [" a"] * 5, [" b"] * 5, None, 1.2, 0.2),
        ValueRow("L0E3N40", "expert_neuron", 1e-9, None, NAN, sign * 1.0, [], [], None),
    ]
    return Explanation(
        provenance=provenance(),
        warnings=WARNINGS,
        model=model(),
        prompt={"text": "x", "tokens": NASTY, "ids": list(range(len(NASTY)))},
        position=len(NASTY) - 1,
        target=Token(" <Paris>", 7, 0.77, -0.26, 1),
        against=[Token(" London", 8, 1e-9, -20.0, 5000)] if contrast else [],
        norm="frozen",
        score="increase",
        certificate=certificate(holds),
        layers=layers,
        values=[] if empty else values,
        kinds=["attention_subvalue"],
        account={
            "embedding": -0.2,
            "attn": -0.5,
            "mlp": 6.5,
            "readout": 0.3,
            "unexplained": 1e-7,
            "total": 6.1 * scale,
        },
        search={"units": 1000, "scored": 16, "exact": True, "slack": 1e-4},
        notes=["'Paris' is another token and has probability 0.9; ' Paris' was taken literally."],
        queries=[row for made in _queries() for row in made.rows] if queries else [],
        query_sums=[made.sums() for made in _queries()] if queries else [],
        query_refusals=[{"unit": "L0E3N40", "reason": "no key for L0E3N40: <none>"}] if queries else [],
    )


def _queries() -> list[Queries]:
    rows = [
        QueryRow("L0H2@4", "attention_subvalue", "L1H0@3", 0.7, 0.4, NASTY[:5], NASTY[5:9], "L1H0", "<b>"),
        QueryRow("embed", "embedding", "L1H0@3", -0.1, 1.0, NASTY[9:], [], "L1H0"),
    ]
    plain = [QueryRow("L0N3", "ffn_neuron", "L1N7", -90.25, -1e9, [" a"], [], None)]
    end = (3, 2.0, 3.5, -1.0, 2.5, -0.5, 1e-7, 1e-5, True)
    return [
        Queries("L1H0@3", "attention_subvalue", "value", "direct effect", "units", 12, *end, rows),
        Queries("L1N7", "ffn_neuron", "value", "activation", "units", 12, *end, plain),
    ]


def unit_reading(unit: str = "L1N7", tokens: int = 2, beyond: bool = False) -> UnitReading:
    listed = [TokenLogit(token, n, 1.5 - n) for n, token in enumerate(NASTY[:6])]
    values = [0.5 * n for n in range(9)]
    curves = [
        Sigmoid(f" token{i}", i, 0.0, 2.0, values, [v / 5 for v in values], 1.0 + i, 0.3, 0.2, 0.1, 0.25)
        for i in range(tokens)
    ]
    null = Null(200, 1.5, 0.2, 3.0 if beyond else -1.0, -2.0, beyond, False, beyond)
    return UnitReading(unit, "ffn_neuron", -19.2, 108.0, listed, listed[::-1], null, curves, NASTY[1])


def lens_reading(tokens: int = 2, units: bool = False) -> LensReading:
    followed = [NamedToken(f" token{i}", i) for i in range(tokens)]
    states = []
    for i, unit in enumerate(["embed", "L0.attn", "L0.mlp", "L1.attn", "L1.mlp"]):
        top = [LikelyToken(token, n, 0.5 / (n + 1)) for n, token in enumerate(NASTY[:4])]
        course = [CourseRow(t.token, t.id, 0.5 * i, 1.0 * i, -9.0 + i, 100 - i, 0.1) for t in followed]
        states.append(StateRow(unit, 2.0 - 0.1 * i, top, course))
    return LensReading(
        provenance=provenance(),
        warnings=WARNINGS,
        model=model(),
        prompt={"text": None, "tokens": NASTY, "ids": list(range(len(NASTY)))},
        position=2,
        norm="recompute",
        tokens=followed,
        certificate=LensCertificate(1e-7, 1e-5, True, 5, 2e-5),
        states=states,
        units=[unit_reading("L1N7", tokens), unit_reading("L1H0@3", 0, beyond=True)] if units else [],
    )


def compared(edits: int = 2) -> Compared:
    """Two texts of tokens that a page or a terminal could take for something else."""

    def written(tokens: list[str], cached: bool) -> Generated:
        count = len(tokens)
        return Generated(tokens, list(range(count)), [-0.5] * count, "".join(tokens), not cached, cached, 1e-6)

    return Compared(
        provenance=provenance(),
        warnings=WARNINGS,
        model=model(),
        prompt={"text": None, "tokens": NASTY, "ids": list(range(len(NASTY)))},
        edits=["add L1.mlp '<b>\u202e' - '[red]x[/]' 4", "zero L0H1 @-1"][:edits],
        count=13,
        temperature=0.0 if edits else 0.7,
        plain=written(NASTY, True),
        edited=written([*NASTY[:3], *NASTY[::-1]], False),
        same=3,
        continuations=[Likelihood("<i>", ["<i>"], -3.0, -1.0), Likelihood("\n", ["\n"], -800.0, -1.0)],
        notes=["a note with <tags>"],
    )


def patched(pairs: int = 1, heads: bool = False) -> PatchReading:
    """A sweep of the residual stream over nasty tokens, or one of many heads with a gap in it."""
    rows = [f"L{i}" for i in range(3)] if not heads else [f"L{i}" for i in range(80)]
    columns = [f"H{i}" for i in range(20)] if heads else [f"{i} {token}" for i, token in enumerate(NASTY)]
    effects: list[list[float | None]] = [
        [(-1) ** j * (i + j) / 40 for j in range(len(columns))] for i in range(len(rows))
    ]
    effects[1][1] = None
    low, high = ([[e and e + shift for e in row] for row in effects] for shift in (-0.1, 0.1))
    several = pairs > 1
    ends = (0.3, 0.5) if several else (None, None)
    return PatchReading(
        provenance=provenance(),
        warnings=WARNINGS,
        model=model(),
        pairs=pairs,
        prompt={"text": None, "tokens": NASTY, "ids": list(range(len(NASTY)))},
        corrupted={"text": None, "tokens": [*NASTY[:-1], " was"], "ids": [*range(len(NASTY) - 1), 99]},
        answers=[" <Paris>"],
        wrong_answers=[" [bold]"],
        metric="logit-difference",
        grid="heads" if heads else "resid",
        direction="noising" if several else "denoising",
        window=1,
        position=len(NASTY) - 1,
        rows=rows,
        columns=columns,
        values=effects,
        effects=effects,
        low=low if several else None,
        high=high if several else None,
        clean=3.0,
        corrupted_value=-2.0,
        stability=StabilityRow(0.8, 0.89, 100) if several else None,
        top=[CellRow(rows[2], columns[4], 1.5, 0.4, *ends), CellRow(rows[1], columns[3], -1.5, -0.3, *ends)],
        run=30,
        identical=8,
        checked=2,
        error=1e-6,
        notes=["a note with <tags>"],
    )


def _write(layer: int, unit: str, **changes) -> WriteRow:
    fields = dict(
        unit=f"L{layer}.{unit}", layer=layer, module=f"blocks.{layer}.{unit}.out", dtype="float32", matrix=[16, 32],
        coefficient=1.0, tail=[], bias=False, heads=None, neurons=None, shared_expert=None, experts=False, refused={},
    )  # fmt: skip
    return WriteRow(**{**fields, **changes})


def anatomy(shapes: bool = True) -> AnatomyDescription:
    norm = NormRow("rms", 1e-6, [0.5, 1.5], False)
    writes = [
        WriteRow("embed", None, "table", "float32", None, 1.0, [], False, None, None, None, False, {}),
        *(_write(i, "attn", heads=HeadsRow(4, 2, 8, None, True), matrix=[16, 32]) for i in range(3)),
        *(_write(i, "mlp", neurons=32, tail=[StepRow("norm", norm=norm)], coefficient=0.5 + i) for i in range(2)),
        _write(
            2, "mixer", matrix=None, refused={"neurons": "it is <no> product"}, tail=[StepRow("gate", gate="blocks.2")]
        ),
    ]
    reads = [
        ReadRow(f"L{i}.attn", i, ["query"], f"blocks.{i}.attn.q", [32, 16], True, "embed", norm, [], norm, "float32")
        for i in range(3)
    ]
    rows = [ShapeRow(None, None, "ids", "the tokens", ["batch", "pos"], [1, 3], False)]
    for i in range(3):
        rows.append(
            ShapeRow(i, None, "stream", "what enters the block", ["batch", "pos", "d_model"], [1, 3, 16], False)
        )
        rows.append(ShapeRow(i, f"L{i}.attn", "W_Q", "reads", ["(n_heads d_head)", "d_model"], [32, 16], True, "q"))
    rows.append(ShapeRow(None, None, "logits", "W_U x", ["batch", "pos", "d_vocab"], [1, 3, 64], False))
    return AnatomyDescription(
        provenance=provenance(),
        warnings=[],
        model={**model(), "class": "Tiny", "parameters": 12345},
        sizes={"n_layers": 3, "d_model": 16, "d_vocab": 64, "n_heads": [4, 4, 2], "d_mlp": None},
        tied=True,
        causal=False,
        positions="not in the stream",
        blocks=[
            BlockRow(0, "blocks.0", 0, ["L0.attn", "L0.mlp"], "embed"),
            BlockRow(1, "blocks.1", 0, ["L1.attn", "L1.mlp"], "L0.mlp"),
            BlockRow(2, "blocks.2", 0, ["L2.attn", "L2.mixer"], "L1.mlp"),
        ],
        writes=writes,
        reads=reads,
        stream=[StreamRow("embed", StepRow("factor", factor=8.0))],
        final=FinalRow(None, [16, 8], [64, 16], True, 0.5, 30.0, "a <reason>"),
        levels=[
            LevelRow("sublayers", 7, False, []),
            LevelRow("neurons", 64, False, [RefusalRow("L2.mixer", "it is <no> product")]),
            LevelRow("subvalues", 12, True, []),
        ],
        labels=BAD,
        prompt={"text": "x", "tokens": NASTY[:3], "ids": [0, 1, 2]} if shapes else None,
        shapes=rows if shapes else None,
    )


def _ratios(count: int) -> list[NamedRatio]:
    return [NamedRatio(token, id, 9.5 - id) for id, token in enumerate(NASTY[:count])]


def circuit_reading(asked: bool = False) -> CircuitReading:
    """A head's circuits, with tokens of every kind as sources, destinations and outputs."""
    rows = [
        EntryRow(name, token, 2 * i, NASTY[-1 - i], i, 12.5 - i, 60.0 - 5 * i)
        for name in ("qk", "ov")
        for i, token in enumerate(NASTY[:10])
    ]
    found = AskedRow(NASTY[1], NASTY[2], NASTY[8], 3.25, -0.5, 1, 48_000) if asked else None
    return CircuitReading(
        provenance=provenance(),
        warnings=WARNINGS,
        model=model(),
        head="L1H0",
        offset=3,
        embedding="normed" if asked else "plain",
        qk=TableSummary(0.25, 21.0, 0.05, 1e-6, 0.03, 0.4),
        ov=TableSummary(0.004, 38.5, 0.05, 1e-9, 0.01, NAN),
        entries=rows,
        copying=Copying(0.83, 512, 0.125, 10, 37.5, 10 / 49_152),
        trigrams=[TrigramRow(token, i, 120.0 - i, _ratios(3), _ratios(2)) for i, token in enumerate(NASTY)],
        asked=found,
        factors=BAD if asked else GOOD,
        notes=["<note>"],
    )


def trigram_reading(found: bool = True) -> TrigramReading:
    """All heads by a skip trigram; one head makes it, or none."""
    roles = ("out", "source", "destination", "out", "source", "out", "destination")
    rows = [
        TrigramHeadRow(
            head=f"L{i}H{i}", qk=9.0 - 2 * i, ov=4.0 - i, score=36.0 - 12 * i, source_rank=1 + i**5, out_rank=1 + i**6,
            p=10.0 ** (i - 7), weakest=role, q=0.04 * (i + 1),
        )
        for i, role in enumerate(roles)
    ]  # fmt: skip
    return TrigramReading(
        provenance=provenance(),
        warnings=WARNINGS if found else [],
        model=model(),
        source=NASTY[1],
        destination=NASTY[4],
        out=NASTY[2],
        ids=[1, 4, 2],
        offset=0,
        rate=0.05,
        found=["L0H0"] if found else [],
        heads=rows,
        top=5,
        factors=GOOD,
        notes=["<note>"],
    )


def subspace_reading(subject: str = "overlap") -> SubspaceReading:
    """An overlap of sets, with a map of their pairs; or erasers, with facts that are lists."""
    overlap = subject == "overlap"
    names = ["L0H0.write", "L0H1.write", "<b>.key"]
    row = {"unit": "L1N7", "role": "<up>", "erased": 0.5, "matched_mean": -0.01, "confirmed": True}
    return SubspaceReading(
        subject=subject,
        title="L0H0.write+<script>alert(1)</script>.key",
        verdict="shared" if overlap else "3 rows of neurons are against what they write",
        provenance=provenance(),
        warnings=WARNINGS,
        model=model(),
        facts={
            "offset": 0,
            "overlap": {"sizes": (2, 3), "overlap": 1.5, "z": NAN, "p_shared": None},
            "confirmation": [] if overlap else [row, row],
        },
        rows=[{"number": n, "degrees": 30.0 * n, "cosine": NAN if n == 2 else 0.5} for n in range(60)],
        caption="principal <angles>",
        bars=[Bar("overlap <own>", 3.0, 3.0, 3.0), Bar("of random subspaces", 1.0, 0.5, 1.5)],
        bars_unit="times what is expected",
        maps=[Map("Unit by unit", "<above> chance", names[:2], names, [[0.5, -0.2, None], [0.0, 1.0, NAN]])],
        notes=["<note>"],
    )


def experiment() -> Experiment:
    """One that trained its own models: every finding, curves with holes in them, words of all kinds."""
    findings: tuple[Finding, ...] = ("reproduced", "in part", "not reproduced", "measured")
    return Experiment(
        name="fake",
        title="A title with <tags> and " + NASTY[5],
        question="does " + "".join(NASTY) + "?",
        provenance=ExperimentProvenance(
            **asdict(provenance()), code="0123456789abcdef", python="3.11", numpy="2.0", machine="a <machine>",
            threads=1, seeds=[0, 1, 2],
        ),
        model={"name": "networks <trained> here"},
        claims=[
            Claim(f"A claim that is {one} {NASTY[n]}", "A <source>", "0.5", "0.4", "0.1", one, {"seed 0": NAN})
            for n, one in enumerate(findings)
        ],
        tables=[
            ExperimentTable("Table", "of <cells>", NASTY[:3], [[1, "x", Interval(1.0, 0.5, NAN)], [2, None, 0.1]]),
        ],
        figures=[
            Curves(
                "Losses", "over <steps>", "steps", "nats",
                {f"arm {n} {NASTY[n]}, seed {seed}": [(float(i), (n + 1.0) / (i + seed + 1)) for i in range(0, 900, 9)]
                 for n in range(7) for seed in range(2)}, logarithmic=True,
            ),
            Curves("Hole", "", "x", "y", {"a": [(0.0, 1.0), (1.0, NAN), (2.0, 1.0)], "none": [], "one": [(1.0, 2.0)]}),
            Curves("Nothing", "", "x", "y", {"a": [(NAN, NAN)]}),
            Figure("Bars", ["<a>", "b"], [Interval(1.0, 0.5, 1.5), Interval(NAN, NAN, NAN)], caption="over seeds"),
        ],
        warnings=WARNINGS,
        notes=["a note with <tags>"],
    )  # fmt: skip


def reproduction() -> Reproduction:
    """Three experiments: done now, kept by an earlier run, and failed."""
    made = experiment()
    own = replace(made, name="other", provenance=provenance(), model=model())
    return Reproduction(
        provenance=made.provenance,
        warnings=[],
        model=model(),
        form="quick",
        parts=[
            Part("fake", "what it asks", made, None, 61.5, None),
            Part("other", "what it <asks>", own, None, 4000.0, "2026-01-01T00:00:00+00:00"),
            Part("third", "what it asks", None, "OSError: <nothing> " + NASTY[5], 0.2, None),
        ],
        notes=["kept in <folder>"],
    )
