"""Tasks for long contexts, in the style of RULER (arXiv:2404.06654, section 3), made by code from a seed.

    multikey    several secrets hidden in a text, each under a key; one of them is asked for, the others distract
    variables   chains of assignments hidden in a text; which variables hold the value that one chain began with?
    counting    a numbered list of words, some of which come ten times as often; which are they?

Differences from RULER's programs: the answers are words that differ in one token and are scored by likelihood against
each other (`eval.probe`), not written out; names of variables and secrets are common nouns instead of random letters
and numbers; the text is the user's or the shipped one instead of essays.
"""

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.eval.probe import MakeProbe, Probe
from ambidex.eval.words import Hay, hide, known_words, pick_answers
from ambidex.text.tokenizer import Tokenizer

SECRET: Final = "\nThe secret word of the {key} is {value}.\n"
ASK_SECRET: Final = "\nWhat is the secret word of the {key}? The secret word of the {key} is"
FIRST_VALUE: Final = "\nVAR {name} = {value}\n"
COPY: Final = "\nVAR {name} = VAR {source}\n"
ASK_VARIABLES: Final = "\nWhich variables have the value {value}? The variables with the value {value} are VAR"
LIST_OPENING: Final = "Some words come more often in this list than the others.\n"
ASK_COUNT: Final = "\nWhich words come most often in the list? The most common words are"
TIMES_AS_OFTEN: Final = 10
"""A common word comes so many times as often as another, as in RULER (30 and 3 times)."""
WRONG_PER_RIGHT: Final = 3
"""Words of the list that are compared with each common one."""


def make_multikey(tokenizer: Tokenizer, hay: Hay, *, context: int, keys: int, seed: int) -> Probe:
    """`keys` secrets at random depths, one of them asked for.

    Raises:
        ConfigError: the context or the tokenizer does not do.
    """
    rng = random.Random(f"multikey {seed}")
    wanted = rng.randrange(keys)
    names = rng.sample(known_words(), keys)
    ask = ASK_SECRET.format(key=names[wanted])
    answers = pick_answers(tokenizer, ask, count=keys, rng=rng, without=names, flag="--keys")
    pieces = [
        tokenizer.encode(SECRET.format(key=key, value=value), add_special=False)
        for key, value in zip(names, answers.words, strict=True)
    ]
    num_hay = context - sum(map(len, pieces)) - len(answers.question)
    return Probe(
        prompt=hide(hay.take(num_hay), pieces, rng),
        question=answers.question,
        candidates=answers.tokens,
        right=frozenset({wanted}),
    )


def make_variables(tokenizer: Tokenizer, hay: Hay, *, context: int, chains: int, hops: int, seed: int) -> Probe:
    """`chains` chains of `hops` copies after a first value, their lines mixed but in order; errors as before."""
    rng = random.Random(f"variables {seed}")
    values = rng.sample(range(10000, 99999), chains)
    count = chains * (hops + 1)
    ask = ASK_VARIABLES.format(value=values[0])
    answers = pick_answers(tokenizer, ask, count=count, rng=rng, flag="--chains times --hops plus 1")
    lines = []
    for chain, value in enumerate(values):
        names = answers.words[chain * (hops + 1) : (chain + 1) * (hops + 1)]
        texts = [FIRST_VALUE.format(name=names[0], value=value)]
        texts += [COPY.format(name=name, source=source) for source, name in pairwise(names)]
        lines.append([tokenizer.encode(text, add_special=False) for text in texts])
    order = rng.sample([chain for chain in range(chains) for _ in range(hops + 1)], count)
    pieces = [lines[chain].pop(0) for chain in order]
    num_hay = context - sum(map(len, pieces)) - len(answers.question)
    return Probe(
        prompt=hide(hay.take(num_hay), pieces, rng),
        question=answers.question,
        candidates=answers.tokens,
        right=frozenset(range(hops + 1)),
    )


def make_counting(tokenizer: Tokenizer, *, context: int, common: int, seed: int) -> Probe:
    """A list of words that fills the context, `common` of them ten times as often; errors as `make_multikey`."""
    rng = random.Random(f"counting {seed}")
    answers = pick_answers(
        tokenizer,
        ASK_COUNT,
        count=common * (1 + WRONG_PER_RIGHT),
        rng=rng,
        flag=f"--common times {1 + WRONG_PER_RIGHT}",
    )
    opening = tokenizer.encode(LIST_OPENING)
    room = context - len(opening) - len(answers.question)
    often, compared = answers.words[:common], answers.words[common:]
    others = [word for word in known_words() if word not in answers.words]
    listed: list[int] = []
    # Each round has every common word ten times and a share of the others, so that any beginning of rounds will do.
    rare = [*compared, *rng.sample(others, min(len(others), common * TIMES_AS_OFTEN // 2))]
    number = 0
    while True:
        entries = []
        for word in rng.sample([*often * TIMES_AS_OFTEN, *rare], len(often) * TIMES_AS_OFTEN + len(rare)):
            number += 1
            entries += tokenizer.encode(f"{number}. {word}\n", add_special=False)
        if len(listed) + len(entries) > room:
            break
        listed += entries
    if not listed:
        raise ConfigError(
            f"--contexts {context} is too short for a list in which {common} words come {TIMES_AS_OFTEN} times: "
            f"it needs {len(opening) + len(entries) + len(answers.question)} tokens: raise it, or lower --common"
        )
    return Probe(
        prompt=[*opening, *listed],
        question=answers.question,
        candidates=answers.tokens,
        right=frozenset(range(common)),
    )


TaskMaker = Callable[[Tokenizer, Hay, int, Mapping[str, int]], MakeProbe]
"""Tokenizer, text, context and the task's settings → what makes the probe of a seed."""


def _multikey(tokenizer: Tokenizer, hay: Hay, context: int, settings: Mapping[str, int]) -> MakeProbe:
    return lambda seed: make_multikey(tokenizer, hay, context=context, keys=settings["keys"], seed=seed)


def _variables(tokenizer: Tokenizer, hay: Hay, context: int, settings: Mapping[str, int]) -> MakeProbe:
    return lambda seed: make_variables(
        tokenizer, hay, context=context, chains=settings["chains"], hops=settings["hops"], seed=seed
    )


def _counting(tokenizer: Tokenizer, hay: Hay, context: int, settings: Mapping[str, int]) -> MakeProbe:
    del hay
    return lambda seed: make_counting(tokenizer, context=context, common=settings["common"], seed=seed)


TASKS: Final[Mapping[str, TaskMaker]] = {"multikey": _multikey, "variables": _variables, "counting": _counting}
TASK_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "multikey": {"keys": 4},
    "variables": {"chains": 4, "hops": 2},
    "counting": {"common": 2},
}
"""RULER's are 4 keys and more, 1 to 4 chains of 4 hops and 10 common words; small models do nothing with those."""
