"""Rewrite clauses of the King James Version in plainer English, by rules: thou becomes you, goeth becomes goes.

This is the data of the demo's supervised task. A small model learns within a minute to repeat the prompt in the new
style, and both the loss and the remaining old words can be measured. The rules are mechanical; they do not translate.

    python -m scripts.models.plain_english --output scripts/demo/data

writes plain_english.train.jsonl and plain_english.test.jsonl: one object a line with `prompt` (a clause in the old
style and a line end) and `completion` (the same in plain English and a line end). Training clauses are spread over the
shipped model's own training text; test clauses come from the last 3 %, which it was not trained on.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.models.kjv_text import Chapter, load_chapters, split_tail

PLAIN_WORDS = {
    "thou": "you", "thee": "you", "ye": "you", "thy": "your", "thyself": "yourself",
    "art": "are", "wast": "were", "wert": "were", "hast": "have", "hath": "has", "hadst": "had", "dost": "do",
    "doth": "does", "doeth": "does", "didst": "did", "shalt": "will", "shall": "will", "wilt": "will", "canst": "can",
    "couldest": "could", "shouldest": "should", "wouldest": "would", "mayest": "may", "mightest": "might",
    "saith": "says", "saidst": "said", "spake": "spoke", "seeth": "sees", "fleeth": "flees", "dieth": "dies",
    "lieth": "lies", "hieth": "hies", "useth": "uses", "goeth": "goes", "unto": "to", "upon": "on", "thereof": "of it",
    "therein": "in it", "thereon": "on it", "wherein": "in which", "whereof": "of which", "whither": "where",
    "hither": "here", "thither": "there", "whence": "where", "nay": "no", "yea": "yes", "verily": "truly",
    "behold": "see", "lo": "see", "wroth": "angry", "nigh": "near", "sware": "swore", "bare": "bore",
    "brake": "broke", "gat": "got", "begat": "fathered", "brethren": "brothers", "shew": "show", "shewed": "showed",
    "shewing": "showing", "slew": "killed", "slay": "kill", "slain": "killed", "smote": "struck", "smite": "strike",
    "smitten": "struck", "raiment": "clothes", "multitude": "crowd", "multitudes": "crowds", "wherefore": "so",
    "hearken": "listen", "hearkened": "listened", "whosoever": "whoever", "whatsoever": "whatever", "damsel": "girl",
    "twain": "two", "threescore": "sixty", "fourscore": "eighty", "morrow": "next day", "betwixt": "between",
    "sepulchre": "tomb", "kine": "cows", "concerning": "about", "peradventure": "perhaps",
}  # fmt: skip
"""Old word to plain word, lower case. `thine` and the endings -eth and -est have rules of their own."""

PLAIN_PHRASES = (
    (r"\band it came to pass, (that|when|as|after)\b", r"and \1"),
    (r"\bit came to pass\b", "it happened"),
    (r"\bit shall come to pass\b", "it will happen"),
    (r"\bin the midst of\b", "among"),
    (r"\bafter this manner\b", "like this"),
    (r"\bmine(?= [aeiouh])", "my"),
    (r"\bthine(?=[,.;:?!)])", "yours"),
    (r"\bthine\b", "your"),
    (r"\ban(?= h(?!our|on|eir))", "a"),
)

ETH_WITHOUT_VERB = re.compile(r"teeth|seventh|.+tieth|.+[a-z]{2}eenth|beneth", re.IGNORECASE)
CLAUSE_BYTES = range(21, 61)
"""A model of this size repeats longer clauses less well, and more slowly."""
TRAIN_STRIDE = 8
"""Every 8th suitable clause becomes a training pair."""
TEST_STRIDE = 5


class PlainEnglish:
    """The rules, with a vocabulary that gives a verb's form without its old ending."""

    def __init__(self, chapters: Sequence[Chapter]) -> None:
        self._known = Counter(word for chapter in chapters for word in re.findall(r"[a-z]+", chapter.text))

    def rewrite(self, verse: str) -> str:
        """Return the verse in plain English; a capital at the start of a word is kept."""
        verse = re.sub(r"\b(thou|ye)( \w+)? (\w+est)\b", self._plain_you_verb, verse, flags=re.IGNORECASE)
        verse = re.sub(r"\b(\w+est)(?= thou\b)", lambda m: self._without_est(m[1]), verse, flags=re.IGNORECASE)
        for pattern, plain in PLAIN_PHRASES:
            verse = re.sub(pattern, functools.partial(_plain_phrase, plain), verse, flags=re.IGNORECASE)
        return re.sub(r"\b[A-Za-z]+\b", lambda m: self._plain_word(m[0]), verse)

    def _plain_you_verb(self, match: re.Match[str]) -> str:
        return f"{match[1]}{match[2] or ''} {self._without_est(match[3])}"

    def _plain_word(self, word: str) -> str:
        if plain := PLAIN_WORDS.get(word.lower()):
            return _cased(word, plain)
        if word.endswith("eth") and word.islower() and not ETH_WITHOUT_VERB.fullmatch(word):
            return self._third_person(word.removesuffix("eth"))
        return word

    def _without_est(self, verb: str) -> str:
        if verb.lower() in PLAIN_WORDS or verb.lower() in {"lest", "rest", "west", "best", "least", "harvest"}:
            return verb
        return _cased(verb, self._base_form(verb.lower().removesuffix("est")))

    def _base_form(self, stem: str) -> str:
        """Return the verb in the vocabulary: `mak` is make, `sitt` is sit, `cri` is cry, `walk` is walk."""
        if stem.endswith("i"):
            return stem + "e" if len(stem) == 2 else stem[:-1] + "y"
        candidates = [stem + "e", stem, *([stem[:-1]] if stem[-1:] == stem[-2:-1] else [])]
        return next((candidate for candidate in candidates if self._known[candidate] > 1), stem)

    def _third_person(self, stem: str) -> str:
        base = self._base_form(stem)
        base = PLAIN_WORDS.get(base, base)
        if base.endswith("y") and base[-2:-1] not in "aeiou":
            return base[:-1] + "ies"
        return base + ("es" if re.search(r"(s|x|z|ch|sh|o)$", base) else "s")


def num_old_words(text: str) -> int:
    """Count words of the old style: those with a plain word here, thine, and verbs in -eth."""
    words = re.findall(r"[A-Za-z]+", text)
    return sum(
        word.lower() in PLAIN_WORDS
        or word.lower() == "thine"
        or (word.islower() and word.endswith("eth") and not ETH_WITHOUT_VERB.fullmatch(word))
        for word in words
    )


def clauses(chapters: Sequence[Chapter]) -> list[str]:
    """Return the short clauses with an old word, each once, in order, with a capital at the start."""
    parts = [part for chapter in chapters for verse in chapter.verses for part in re.split(r"(?<=[:;.?!]) ", verse)]
    capitalised = [part[0].upper() + part[1:] for part in parts if len(part) in CLAUSE_BYTES]
    return list(dict.fromkeys(clause for clause in capitalised if num_old_words(clause)))


def pairs(texts: Sequence[str], english: PlainEnglish) -> list[dict[str, str]]:
    """Return prompt and completion of every clause, each with a line end."""
    return [{"prompt": text + "\n", "completion": english.rewrite(text) + "\n"} for text in texts]


def _plain_phrase(plain: str, match: re.Match[str]) -> str:
    return _cased(match[0], match.expand(plain))


def _cased(old: str, plain: str) -> str:
    return plain[0].upper() + plain[1:] if old[:1].isupper() else plain


def main() -> None:
    """Write the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--text", type=Path, help="bible.data, or the plain text inside it (default: the package's)")
    args = parser.parse_args()
    chapters = load_chapters(args.text)
    english = PlainEnglish(chapters)
    read, held_out = (clauses(part) for part in split_tail(chapters, 0.03))
    known = set(read)
    unread = [clause for clause in held_out if clause not in known]
    for name, chosen in {"train": read[::TRAIN_STRIDE], "test": unread[::TEST_STRIDE]}.items():
        chosen_pairs = pairs(chosen, english)
        path = args.output / f"plain_english.{name}.jsonl"
        path.write_text("".join(json.dumps(pair) + "\n" for pair in chosen_pairs), encoding="utf-8")
        print(f"{path}: {len(chosen_pairs)} pairs, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
