"""The words of the demo model's text: names and numbers for facts, questions and sentences.

Training never sees the held-out names and numbers.

There are two kinds: real cities and first names, and words made of syllables, which are so many
that recalling one is copying and not memory. A checksum of the name itself decides whether it is
held out, so that text and evaluation agree without a list.
"""

import random
import zlib

HELD_OUT_SHARE = 8  # one name and one number of this many is held out


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
_STARTS = "BDFGHJKLMNPRSTVZ"
_INNER = "bdfgklmnprstvz"
_VOWELS = "aeiou"


def is_held_out(word: str) -> bool:
    """Return whether training must not show this name or number."""
    return zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0


def name(rng: random.Random, *, held_out: bool) -> str:
    """Draw a name that is held out or not, as asked; one draw of three gives a real name."""
    while True:
        drawn = rng.choice(REAL) if rng.random() < 1 / 3 else _made_up(rng)
        if is_held_out(drawn) == held_out:
            return drawn


def number(rng: random.Random, *, held_out: bool) -> str:
    """Draw four digits, the first of them not zero."""
    while True:
        drawn = str(rng.randrange(1000, 10000))
        if is_held_out(drawn) == held_out:
            return drawn


def _made_up(rng: random.Random) -> str:
    first = rng.choice(_STARTS) + rng.choice(_VOWELS)
    return first + "".join(
        rng.choice(_INNER) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 1, 2)))
    )


# --- small talk: what the model knows of baton -------------------------------------------------

QUESTIONS = (
    (
        "Hello!",
        "Hello! I am the demo model of baton. Ask me for a fact that you have told me.",
    ),
    (
        "Hi",
        "Hello! I am the demo model of baton. Ask me for a fact that you have told me.",
    ),
    (
        "Hello",
        "Hello! I am the demo model of baton. Ask me for a fact that you have told me.",
    ),
    (
        "Who are you?",
        "I am the demo model of baton, very small and trained on two cores.",
    ),
    (
        "What are you?",
        "I am the demo model of baton, very small and trained on two cores.",
    ),
    (
        "What can you do?",
        "I can recall facts, count, add small numbers, and talk about baton.",
    ),
    ("How big are you?", "I have about one million parameters, so please be kind."),
    (
        "What is baton?",
        "baton serves language models with prefill and decode on separate nodes.",
    ),
    (
        "Tell me about baton.",
        "baton serves language models with prefill and decode on separate "
        "nodes. The KV blocks of the prompt are handed over like a baton in a relay race.",
    ),
    (
        "Why is it called baton?",
        "Because the KV blocks of a prompt are handed over like a baton.",
    ),
    (
        "What is prefill?",
        "Prefill reads the whole prompt at once and fills the KV cache.",
    ),
    ("What is decode?", "Decode writes the answer, one token after another."),
    (
        "What is a KV cache?",
        "It keeps the keys and values of all tokens that were read so far.",
    ),
    (
        "What is a KV block?",
        "It holds the keys and values of a few neighbouring tokens.",
    ),
    (
        "Why split prefill and decode?",
        "Prefill needs arithmetic and decode needs memory, so on "
        "one engine they slow each other down.",
    ),
    (
        "What does the router do?",
        "It gives each request to a prefill node and a decode node.",
    ),
    (
        "What does a prefill node do?",
        "It computes the prompt and announces each finished block.",
    ),
    (
        "What does a decode node do?",
        "It reads the blocks of the prompt and streams the tokens.",
    ),
    (
        "What happens when a node dies?",
        "The router asks another node, and the stream goes on.",
    ),
    (
        "Who moves the blocks?",
        "The decode node reads them, by shared memory or by NIXL.",
    ),
    ("What is a token?", "A token is a piece of a word, or a whole one."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye!", "Goodbye! Pass the baton on."),
    ("Bye", "Goodbye! Pass the baton on."),
)

SENTENCES = (
    "baton serves language models.",
    "baton serves language models with prefill and decode on separate nodes.",
    "Prefill reads the whole prompt at once.",
    "Decode writes one token after another.",
    "The router gives each request to two nodes.",
    "The blocks of the prompt are handed over like a baton.",
    "The first token comes from the prefill node.",
    "All other tokens come from the decode node.",
    "A good exchange costs almost no time.",
    "The second runner never looks behind.",
    "She starts from the blocks and runs the curve as fast as she can.",
    "He holds the baton before the other has let it go.",
    "When a node dies, the stream goes on.",
    "Each block carries a number that both hands check.",
    "Nobody stops for the exchange.",
    "A cache remembers what was read before.",
    "The last lap is the hardest one.",
    "Reading is heavy work for a short time.",
    "Writing is light work for a long time.",
    "Whoever listens hears a single voice.",
    "The coach looks at the clock.",
    "It rains on the track tonight.",
    "The team trains early in the morning.",
    "A queue that nobody bounds will grow.",
    "The lights of the stadium are on.",
    "Every wait has an owner and a deadline.",
    "The crowd is quiet before the start.",
    "A dropped baton loses the race.",
)
