"""Names for the facts of the demo model's text, and which of them training never sees.

Two kinds: cities and first names that exist, and words put together from syllables, of which there
are so many that recalling one is copying and not memory. What is held out is decided by a checksum
of the name itself, so that text and evaluation agree without a list.
"""

import random
import zlib

HELD_OUT_SHARE = 8  # one name, and one number, of so many


def _words(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


REAL = _words(
    """
    Accra Algiers Amman Ankara Athens Baku Bangkok Beirut Belfast Belgrade Berlin Bern Bogota
    Boston Bratislava Brussels Bucharest Budapest Cairo Caracas Chicago Colombo Copenhagen Cork
    Dakar Dallas Damascus Delhi Denver Dhaka Doha Dresden Dublin Durban Geneva Genoa Ghent Hanoi
    Harare Havana Helsinki Istanbul Jakarta Kabul Kampala Kingston Krakow Kyoto Lagos Leeds Lima
    Lisbon London Luanda Lusaka Lyon Madrid Malaga Manila Maputo Marseille Melbourne Miami Milan
    Minsk Montreal Moscow Mumbai Munich Nairobi Naples Oslo Ottawa Paris Perth Porto Prague Quito
    Riga Rome Rotterdam Santiago Seoul Seville Shanghai Sofia Stockholm Sydney Tallinn Tokyo
    Toronto Tripoli Tunis Turin Utrecht Valencia Vienna Vilnius Warsaw Zagreb Zurich
    Ada Adam Agnes Alan Alice Amir Anna Anton Arthur Barbara Ben Boris Carla Carlos Cecilia Chen
    Clara Daniel David Diego Dora Edgar Elena Elif Emil Emma Erik Eva Farid Felix Fiona Frank
    Grace Greta Hana Hannah Hassan Heidi Hugo Ida Igor Ines Irene Ivan Jack Jana Jane Jonas Jose
    Julia Karim Karl Kate Kenji Laila Lars Laura Leo Lena Lina Linda Lucas Lucy Maria Marco Mark
    Martin Maya Mia Mila Mina Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Petra Peter
    Priya Rafael Ravi Robert Rosa Ruth Samir Sara Simon Sonia Stefan Susan Tariq Thomas Tim Tom
    Vera Victor Vikram Wanda Yara Yuki Zoe
    """
)
_STARTS, _INNER, _VOWELS = "BDFGHJKLMNPRSTVZ", "bdfgklmnprstvz", "aeiou"


def is_held_out(word: str) -> bool:
    """Whether training must not show this name or number."""
    return zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0


def name(rng: random.Random, *, held_out: bool) -> str:
    """One name of the asked-for half, existing ones in one of three draws."""
    while True:
        drawn = rng.choice(REAL) if rng.random() < 1 / 3 else _made_up(rng)
        if is_held_out(drawn) == held_out:
            return drawn


def number(rng: random.Random, *, held_out: bool) -> str:
    """Four digits, the first of them not zero."""
    while True:
        drawn = str(rng.randrange(1000, 10000))
        if is_held_out(drawn) == held_out:
            return drawn


def _made_up(rng: random.Random) -> str:
    first = rng.choice(_STARTS) + rng.choice(_VOWELS)
    return first + "".join(
        rng.choice(_INNER) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 1, 2)))
    )
