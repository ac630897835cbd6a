"""The project's own tasks: generators of prompt pairs, by a seed, that fit a model's tokenizer.

    indirect-object  "When Mary and John met at the market, John handed the map to" -> Mary, not John. Both orders of
                     the names occur (ABBA and BABA). Corrupted: the giver is the other one (`swap`, so that the clean
                     run's wrong answer is right), or a third person (`third`, so that neither is). Task: Wang et al.
                     2022, "Interpretability in the Wild".
    greater-than     "The war lasted from the year 1732 to the year 17" -> any later year, not the same or an earlier
                     one. Corrupted: from the year 01. Task: Hanna, Liu and Variengien 2023, "How does GPT-2 compute
                     greater-than?"
    induction        random tokens x, then x again up to its token A -> the token B that followed A. Corrupted: in the
                     first x another token in B's place (`value`: what is copied; it is the wrong answer), or in A's
                     (`key`: what is matched; the wrong answer is another token of x). Task: Olsson et al. 2022.
    capitals         "The capital of France is" -> Paris, not Rome. Corrupted: another country.

Years are two tokens (17, 32) or digits, as the tokenizer has it. Where two-digit ends are single tokens (at least 90 of
a century's; the others are left out), the year goes from 02 to 98 and the answers are all ends above it. Where digits
are single tokens, the next token is the tens digit, which decides alone only if the clean year ends in 9: it is 19, 29
... 89, the answers are the digits above its tens digit, the wrong answers that digit and those below. Tokenizers that
join digits otherwise are refused.

Every pair has passed `encode_pair`: equal token lengths, answers of one token. It names its roles, the same ones
whatever its sentence is (`mainstem.lab.roles`), so that pairs of different lengths share columns. A pair occurs once in
a list. The same tokenizer, count and seed give the same list. Sentences are the project's own (`mainstem.lab.wording`).
"""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from mainstem.errors import ChoiceError, PairError, PromptError, TokenError
from mainstem.lab.pairs import Encoder, PromptPair, encode_pair
from mainstem.lab.roles import Role
from mainstem.lab.wording import ASKING, CAPITALS, CENTURIES, EVENTS, GIVING, LASTING, NAMES, PLACES, THINGS
from mainstem.targets import parse_token

Giver = Literal["swap", "third"]
Replaced = Literal["value", "key"]

END = Role("end", -1)
"""The last token, from which the answer is read."""

FRUITLESS = 500
"""After how many draws in a row without a new pair a task counts as exhausted."""

MOST_YEARS = 90
"""How many of a century's years have to be single tokens, for the two-digit construction."""


def indirect_object(encoder: Encoder, count: int, seed: int = 0, corruption: Giver = "swap") -> list[PromptPair]:
    """Pairs of the indirect-object task.

    Raises:
        ChoiceError: if there is no such corruption.
        PairError: if the tokenizer has too few names of one token for so many pairs.
        PromptError: if the model came without a tokenizer.
    """
    _check_choice(corruption, get_args(Giver))
    names = [name for name in NAMES if _is_one_token(f" {name}", encoder)]

    def make(rng: random.Random) -> PromptPair | None:
        if len(names) < 3:
            return None
        receiver, giver, third = rng.sample(names, 3)
        first, second = rng.choice([(receiver, giver), (giver, receiver)])
        template, words = rng.choice(GIVING), {"place": rng.choice(PLACES), "thing": rng.choice(THINGS)}
        other = receiver if corruption == "swap" else third
        clean, corrupted = (template.format(first=first, second=second, giver=one, **words) for one in (giver, other))
        roles = (
            Role("receiver", receiver), Role("giver", (giver, 1)), Role("place", words["place"]),
            Role("giver again", (giver, 2)), Role("thing", words["thing"]), END,
        )  # fmt: skip
        return PromptPair(clean, corrupted, (f" {receiver}",), (f" {giver}",), roles=roles)

    return _draw("indirect-object", encoder, count, seed, make)


def greater_than(encoder: Encoder, count: int, seed: int = 0) -> list[PromptPair]:
    """Pairs of the greater-than task, in the construction that the tokenizer allows.

    Raises:
        PairError: if the tokenizer joins the digits of years otherwise, or for so many pairs.
        PromptError: if the model came without a tokenizer.
    """
    _check_text(encoder)
    years = {century: _year_tokens(encoder, century, 2) for century in CENTURIES}
    years = {century: tokens for century, tokens in years.items() if len(tokens) >= MOST_YEARS}
    if years:
        starts = {f"{year:02}": year for year in range(2, 99)}
    else:
        starts = {f"{tens}9": tens for tens in range(1, 9)}
        years = {century: _year_tokens(encoder, century, 1) for century in CENTURIES}
        years = {century: tokens for century, tokens in years.items() if len(tokens) == 10}
    if not years:
        raise PairError(
            "Neither two-digit years nor digits are single tokens here, so greater-than has no answers of one token",
            remedy="Take another task.",
        )

    def make(rng: random.Random) -> PromptPair:
        event, century, start = rng.choice(EVENTS), rng.choice(sorted(years)), rng.choice(sorted(starts))
        clean, corrupted = (LASTING.format(event=event, century=century, year=year) for year in (start, "01"))
        tokens, bound = years[century], starts[start]
        later = tuple(token for end, token in tokens.items() if end > bound)
        not_later = tuple(token for end, token in tokens.items() if end <= bound)
        roles = (Role("event", event), Role("start", f"{century}{start}", f"{century}01"), END)
        return PromptPair(clean, corrupted, later, not_later, roles=roles)

    return _draw("greater-than", encoder, count, seed, make)


def induction(
    encoder: Encoder, count: int, seed: int = 0, corruption: Replaced = "value", length: int = 8
) -> list[PromptPair]:
    """Pairs of the induction task, as token ids; special tokens are left out. Works without a tokenizer.

    Args:
        encoder: the model's; of the tokenizer only its special ids are used.
        count: how many pairs.
        seed: of the draws.
        corruption: what is replaced in the first copy: the `value` that is copied or the `key` that is matched.
        length: tokens of the copy, three at least.

    Raises:
        ChoiceError: if there is no such corruption.
        PairError: if the copy is shorter than three tokens, or the vocabulary too small for it.
    """
    _check_choice(corruption, get_args(Replaced))
    special = set(getattr(encoder.tokenizer, "all_special_ids", ()))
    pool = [token for token in range(encoder.d_vocab) if token not in special]
    if not 3 <= length < len(pool):
        raise PairError(
            f"Induction over {length} different tokens cannot be had from a vocabulary of {len(pool)}",
            remedy="Take a length of three at least, and below the size of the vocabulary.",
        )

    def make(rng: random.Random) -> PromptPair:
        *copy, new = rng.sample(pool, length + 1)
        place = rng.randrange(1, length - 1)  # not 0: many heads look at the first token whatever it is
        changed = list(copy)
        changed[place + (corruption == "value")] = new
        wrong = new if corruption == "value" else rng.choice([*copy[:place], *copy[place + 2 :]])
        again = copy[: place + 1]
        roles = (Role("key", place), Role("value", place + 1), Role("key again", length + place))
        return PromptPair((*copy, *again), (*changed, *again), (copy[place + 1],), (wrong,), roles=roles)

    return _draw("induction", encoder, count, seed, make)


def capitals(encoder: Encoder, count: int, seed: int = 0) -> list[PromptPair]:
    """Pairs of the capitals task: two countries of as many tokens.

    Raises:
        PairError: if the tokenizer has too few capitals of one token for so many pairs.
        PromptError: if the model came without a tokenizer.
    """
    known = [country for country, capital in CAPITALS.items() if _is_one_token(f" {capital}", encoder)]

    def make(rng: random.Random) -> PromptPair | None:
        if len(known) < 2:
            return None
        template, countries = rng.choice(ASKING), rng.sample(known, 2)
        clean, corrupted = (template.format(country=country) for country in countries)
        answer, wrong = (f" {CAPITALS[country]}" for country in countries)
        return PromptPair(clean, corrupted, (answer,), (wrong,), roles=(Role("country", *countries), END))

    return _draw("capitals", encoder, count, seed, make)


TASKS: Mapping[str, Callable[..., list[PromptPair]]] = MappingProxyType(
    {"indirect-object": indirect_object, "greater-than": greater_than, "induction": induction, "capitals": capitals}
)
"""The generators by name; each takes an encoder, a count and a seed."""


def generate(task: str, encoder: Encoder, count: int, seed: int = 0) -> list[PromptPair]:
    """Pairs of a task given by name.

    Raises:
        ChoiceError: if there is no such task.
        PairError, PromptError: as the generator.
    """
    if task not in TASKS:
        raise ChoiceError("task", task, TASKS)
    return TASKS[task](encoder, count, seed)


def _draw(
    task: str, encoder: Encoder, count: int, seed: int, make: Callable[[random.Random], PromptPair | None]
) -> list[PromptPair]:
    """Different pairs that fit the tokenizer, in the order in which they were drawn."""
    rng = random.Random(seed)
    found: dict[PromptPair, None] = {}
    fruitless = 0
    while len(found) < count and fruitless < FRUITLESS:
        pair, before = make(rng), len(found)
        if pair is not None and pair not in found and _fits(pair, encoder):
            found[pair] = None
        fruitless = fruitless + 1 if len(found) == before else 0
    if len(found) < count:
        raise PairError(
            f"This tokenizer gives {len(found)} different pairs of {task}, not {count} ({FRUITLESS} more draws failed)",
            remedy="Ask for fewer pairs, or take another task." if found else "Take another task.",
        )
    return list(found)


def _fits(pair: PromptPair, encoder: Encoder) -> bool:
    try:
        encode_pair(pair, encoder)
    except (PairError, TokenError):
        return False
    return True


def _year_tokens(encoder: Encoder, century: int, digits: int) -> dict[int, int]:
    """The ends of a year, of so many digits, that are one token each after the century: number -> id."""
    prompt = LASTING.format(event=EVENTS[0], century=century, year="32")
    before = encoder.encode(prompt)
    tokens: dict[int, int] = {}
    for number in range(10**digits):
        after = encoder.encode(f"{prompt}{number:0{digits}}")
        if after[:-1] == before:
            tokens[number] = after[-1]
    return tokens


def _is_one_token(text: str, encoder: Encoder) -> bool:
    _check_text(encoder)
    try:
        parse_token(text, encoder.tokenizer, encoder.d_vocab)
    except TokenError:
        return False
    return True


def _check_text(encoder: Encoder) -> None:
    if encoder.tokenizer is None:
        raise PromptError(
            "This task is written as text, and the model came without a tokenizer", None, "Take induction."
        )


def _check_choice(given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ChoiceError("corruption", given, allowed)
