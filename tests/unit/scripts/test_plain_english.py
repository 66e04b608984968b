"""The rules behind the demo's supervised task."""

import pytest

from scripts.models.kjv_text import Chapter, parse_chapters, split_tail
from scripts.models.plain_english import PlainEnglish, clauses, num_old_words

TEXT = "I make, they make. I sit, they sit. I cry and walk; cry, walk, know and know."


@pytest.fixture(scope="module")
def english() -> PlainEnglish:
    return PlainEnglish([Chapter(book="Ge", number=1, verses=(TEXT,))])


@pytest.mark.parametrize(
    ("old", "plain"),
    [
        ("Thou art thy brother's keeper.", "You are your brother's keeper."),
        ("He maketh, sitteth, crieth and walketh.", "He makes, sits, cries and walks."),
        ("Thou knowest it; knowest thou?", "You know it; know you?"),
        ("The priest of the west hath thine harvest.", "The priest of the west has your harvest."),
        ("It is thine: lift up mine eyes unto an house.", "It is yours: lift up my eyes to a house."),
        ("The seventh and the fortieth teeth", "The seventh and the fortieth teeth"),
    ],
)
def test_archaic_words_become_plain(english: PlainEnglish, old: str, plain: str) -> None:
    assert english.rewrite(old) == plain
    assert num_old_words(plain) == 0


def test_clauses_are_short_unique_and_archaic() -> None:
    chapter = Chapter(
        book="Ge",
        number=1,
        verses=("And he saith unto them: go ye forth into the land. Amen.", "Go ye forth into the land."),
    )
    assert clauses([chapter]) == ["And he saith unto them:", "Go ye forth into the land."]


def test_chapters_are_read_in_order_and_the_tail_is_whole_chapters() -> None:
    text = "A title\nGe1:1 In the beginning\nGe1:2  And  the earth\nGe2:1 Thus\n1Sm1:1 Now there was\n"
    chapters = parse_chapters(text)
    assert [(chapter.book, chapter.number) for chapter in chapters] == [("Ge", 1), ("Ge", 2), ("1Sm", 1)]
    assert chapters[0].text == "In the beginning\nAnd the earth\n"
    train, held_out = split_tail(chapters, 0.03)
    assert (train, held_out) == (chapters[:2], chapters[2:])


def test_a_line_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="not a verse: 'oops'"):
        parse_chapters("A title\noops\n")
