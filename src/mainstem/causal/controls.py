"""What a set of units is compared with: as many others, drawn at random or named by another token.

Random from anywhere, random of the same layers, and of the same layers with nearly the same norm; and the top units for
tokens that the prompt is not about, for tokens of the target's own kind, for the runner-up. All of the same kinds and
numbers as the set itself.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mainstem.analysis.parts import Group
from mainstem.causal.outcomes import RANDOM
from mainstem.model.anatomy import Readout
from mainstem.units import Unit

NEAREST = 20
LIKELIEST = 300
UNLIKELY = 1000
CHUNK = 4096
TRIES = 20

Place = tuple[Group, int]
"""One unit: its group of parts and its place there."""


class Pool:
    """All units of some kinds that a run has, to draw from.

    Args:
        groups: the groups of parts that hold them.
        generator: of every draw.
    """

    def __init__(self, groups: Sequence[Group], generator: torch.Generator) -> None:
        self.generator = generator
        self.by_kind: dict[str, list[Group]] = defaultdict(list)
        self.by_layer: dict[tuple[str, int | None], list[Group]] = defaultdict(list)
        for group in groups:
            self.by_kind[group.kind].append(group)
            self.by_layer[_layer(group)].append(group)
        self._norms: dict[int, Tensor] = {}

    def random_sets(self, like: Sequence[Place], draws: int) -> dict[str, list[list[Place]]]:
        """The random controls of a set, each drawn several times."""
        made = (self.anywhere, self.same_layers, self.norm_matched)
        return {name: [draw(like) for _ in range(draws)] for name, draw in zip(RANDOM, made, strict=True)}

    def anywhere(self, like: Sequence[Place]) -> list[Place]:
        """As many units of each kind, from anywhere but the set itself."""
        return self._draw(like, lambda place: self.by_kind[place[0].kind])

    def same_layers(self, like: Sequence[Place]) -> list[Place]:
        """As many units of each kind in each layer."""
        return self._draw(like, lambda place: self.by_layer[_layer(place[0])])

    def norm_matched(self, like: Sequence[Place]) -> list[Place]:
        """For each unit one of its kind and layer, drawn from those whose writes have the nearest norms."""
        taken = {(id(group), index) for group, index in like}
        drawn: list[Place] = []
        for group, index in like:
            own = torch.tensor(max(float(self.norms(group)[index]), 1e-30)).log()
            candidates: list[tuple[float, Place]] = []
            for other in self.by_layer[_layer(group)]:
                distance = (self.norms(other).clamp_min(1e-30).log() - own).abs()
                nearest = distance.topk(min(len(other), NEAREST + len(taken)), largest=False)
                places = zip(nearest.values.tolist(), nearest.indices.tolist(), strict=True)
                candidates += [(value, (other, i)) for value, i in places if (id(other), i) not in taken]
            free = [place for _, place in sorted(candidates, key=lambda c: c[0])[:NEAREST]]
            if free:
                drawn.append(free[self._random(len(free))])
                taken.add((id(drawn[-1][0]), drawn[-1][1]))
        return drawn

    def norms(self, group: Group) -> Tensor:
        """The norms of what a group's units write, [part]."""
        if id(group) not in self._norms:
            places = torch.arange(len(group), device=group.coefficients.device)
            found = [group.raw(chunk).norm(dim=-1).float() for chunk in places.split(CHUNK)]
            self._norms[id(group)] = torch.cat(found) if found else torch.zeros(0)
        return self._norms[id(group)]

    def norm_of(self, places: Sequence[Place]) -> float:
        """The sum of the norms of what units write."""
        return sum(float(self.norms(group)[index]) for group, index in places)

    def _draw(self, like: Sequence[Place], choices: Callable[[Place], list[Group]]) -> list[Place]:
        taken = {(id(group), index) for group, index in like}
        drawn: list[Place] = []
        for place in like:
            groups = choices(place)
            sizes = [len(group) for group in groups]
            for _ in range(TRIES):
                number = self._random(sum(sizes))
                which = 0
                while number >= sizes[which]:
                    number -= sizes[which]
                    which += 1
                if (id(groups[which]), number) not in taken:
                    break
            else:  # the set is most of its layer: from what is left, if anything is
                free = [(g, i) for g in groups for i in range(len(g)) if (id(g), i) not in taken]
                if not free:
                    continue
                group, number = free[self._random(len(free))]
                which = next(i for i, g in enumerate(groups) if g is group)
            taken.add((id(groups[which]), number))
            drawn.append((groups[which], number))
        return drawn

    def _random(self, size: int) -> int:
        return int(torch.randint(size, (1,), generator=self.generator))


def units_of(places: Sequence[Place]) -> list[Unit]:
    """The addresses of units given by their places."""
    return [group.units[index] for group, index in places]


def _layer(group: Group) -> tuple[str, int | None]:
    return group.kind, group.units[0].layer


def same_type(
    readout: Readout, logits: Tensor, target: Sequence[int], count: int, text: Callable[[int], str]
) -> list[int]:
    """Tokens of the target's kind: among the likeliest the nearest in the unembedding, other spellings left out.

    Args:
        readout: of the model.
        logits: [d_vocab] the prediction.
        target: the target's ids.
        count: how many.
        text: a token's text.
    """
    likeliest = logits.topk(min(LIKELIEST, len(logits))).indices.to(readout.unembedding.device)
    rows = readout.unembedding[likeliest].float()
    own = readout.unembedding[list(target)].float().mean(0, keepdim=True)
    order = torch.nn.functional.cosine_similarity(rows, own).argsort(descending=True)
    words = {text(token).strip().lower() for token in target}
    return [t for t in likeliest[order].tolist() if t not in target and not _spelled_like(text(t), words)][:count]


def _spelled_like(text: str, words: set[str]) -> bool:
    """Whether one is another spelling of the other, or a piece of it: the same, or with the same four first letters."""
    own = text.strip().lower()
    if text.startswith("id:"):  # no tokenizer, so no spelling
        return False
    return not own or any(
        own == word or (len(word) >= 4 and own[:4] == word[:4]) or (len(own) > 1 and word.startswith(own))
        for word in words
        if word
    )


def unrelated(logits: Tensor, target: Sequence[int], count: int, generator: torch.Generator) -> list[int]:
    """Random tokens that the prediction does not consider: none of the thousand likeliest where there are more."""
    order = logits.argsort(descending=True)
    far = order[UNLIKELY:] if len(order) > 2 * UNLIKELY else order[len(order) // 2 :]
    chosen = far[torch.randperm(len(far), generator=generator).to(far.device)]
    return [token for token in chosen.tolist() if token not in target][:count]
