"""Text of a wanted number of words for prompts that are made up: the same for the same seed, and alike nowhere else.

The words are common English ones that tokenizers know as one token each, so that words and tokens hardly differ; what
difference there is, preparation.py measures.
"""

import random
from functools import lru_cache

_TEXT = """
that with said have this each many than from about will three time your first does into much between more which
they some were cost hours when people machine miles times number total line only through very what could would
billion there before travel their find year profit week costs over think been other then second like half upon
must thing another month high move down should table every hour being last explain here years hand life take
house them blue book fire after points know real four morning left where back future model dozen next five tree
third water within speed days runs need right along lamp always words these cannot took make space dance post
answer using green movie takes revenue overall feed pieces ties thought school mean course most moment looking
quite little just stop never room trick candles under lever minute went while less story latest start place
parked wants twice bought program phone price market minutes rate sells cups walk pair spend jewels dinner begin
things object solid though wrong results well such sure enough away world gone began above great feet against
himself might seemed round still long looked seen small made light past common parts those candle guests blog
data short unique write tasked provide works order true orange format main gives same home design dollars sheep
sell pairs cream boots coins gold notes caught glasses rather ideas person without length cube however heard
spoken tried surface models work finger shows fell freely done present getting earth better white account money
going hands tell held ivory chair also perhaps behind part look forth towards below point plain asked taking
serious holding felt asks daily trip email writing fewer article role various coach request complex include step
cars color drives name apples word during taken video both copies value list range highest binary given array
lists reviews river named plans battery packs makes choice review sets camera fast class buys spends average
liters drink says care dragon wrote speak matter pale eyes face silver passed paradox follow shall almost taught
ground admit having body exist wait became natural fact really call planes fourth unreal latter because moves
lives young making cigar angles others even flat lips manner mind curious pause kind popular trace night again
smiled forward exactly fifty staying able turn reason show verify case leave wild until cried passage came
larger front placed drew brass several appears plan want vanish told changed turning certain pipe spill journey
simple wheel faster gets sounds bench explore clever shown suppose found already paper seven note comes seems
known outline user local address strong details involve energy sources options purse opinion please task text
teacher problem further study help lines group heated pink healthy company parking spaces yellow purple names
bananas father pole shadow recess girl boys game area startup amount liked divided books priced history strings
sorted arrays element full size scale plot shape author realm magic meet rare power posted capital city wonders
vibrant count region venture news entity types type build lacks amazing falls keep
"""
_WORDS = tuple(_TEXT.split())
_OWN_BEGINNING = 8  # words that tell one text from all others: 512 ** 8 of them
_STOCK_WORDS = 1 << 16


@lru_cache(maxsize=1)
def _stock() -> tuple[str, ...]:
    """Words in one fixed random order: a text is a stretch of it, which is cheaper than to draw each word."""
    return tuple(random.Random(0).choices(_WORDS, k=_STOCK_WORDS))  # noqa: S311  # no secrets here


def make_words(num_words: int, seed: str) -> str:
    """A text of `num_words` words, each with a space before it, that is the same for the same seed.

    A shorter text of the same seed is the beginning of a longer one. Texts of different seeds begin differently, so
    that a server's prefix cache cannot take one for another.
    """
    chance = random.Random(seed)  # noqa: S311  # no secrets here
    words = chance.choices(_WORDS, k=min(num_words, _OWN_BEGINNING))
    stock = _stock()
    while len(words) < num_words:
        start = chance.randrange(_STOCK_WORDS)
        words += stock[start : start + num_words - len(words)]
    return "".join([f" {word}" for word in words])


def make_token_ids(num_tokens: int, seed: str, first: int, end: int) -> list[int]:
    """As make_words, in token ids of [first, end): for servers that take prompts as ids."""
    return random.Random(seed).choices(range(first, end), k=num_tokens)  # noqa: S311  # no secrets here
