"""Names as text, and the keys of a resource."""

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from django_fencing.exceptions import InvalidResource
from django_fencing.names import Keys, checked, slug

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(str.strip)


@pytest.mark.parametrize(
    "name", ["", " ", "\t\n", None, 7, b"name", "a\0b", "lone \ud800 surrogate", object(), ["a"]]
)
def test_bad_names_are_refused(name: Any) -> None:
    """What is no text, is empty or cannot be written in UTF-8 or a database is no name."""
    with pytest.raises(InvalidResource, match="A resource's name must"):
        checked(name)


def test_one_spelling_is_one_name() -> None:
    """Both ways to write an umlaut are one resource."""
    assert checked("Mu\u0308nchen") == checked("M\u00fcnchen")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("import:tenant-1", "import:tenant-1"),
        ("hoa.complaint:7@other", "hoa.complaint:7@other"),
        ("two words", "two%20words"),
        ("a|b", "a%7Cb"),
        ("}x{", "%7Dx%7B"),
        ("100%", "100%25"),
        ("line\nbreak", "line%0Abreak"),
    ],
)
def test_names_stay_readable_in_keys(name: str, key: str) -> None:
    """Only what Redis, a database or a log could misread is percent-encoded."""
    assert slug(name) == key


@given(texts, texts)
def test_different_names_never_share_a_key(one: str, other: str) -> None:
    """The encoding is injective, and short enough for `Fence.name`."""
    one, other = checked(one), checked(other)

    assert (slug(one) == slug(other)) is (one == other)
    assert len(slug(one)) <= 200


@given(texts, st.one_of(st.just(""), texts), texts, st.one_of(st.just(""), texts))
def test_a_namespace_is_never_read_as_part_of_a_name(
    one: str, its_space: str, other: str, other_space: str
) -> None:
    """Name and namespace stay apart, whatever they hold."""
    same = (checked(one), its_space and checked(its_space)) == (
        checked(other),
        other_space and checked(other_space),
    )

    assert (slug(checked(one), its_space) == slug(checked(other), other_space)) is same


def test_long_names_that_differ_at_the_end_have_different_keys() -> None:
    """The digest covers what is cut off."""
    keys = {slug("n" * 999 + letter) for letter in "ab"}

    assert len(keys) == 2
    assert all(len(key) == 200 for key in keys)


def test_no_name_reads_like_the_short_form_of_a_long_one() -> None:
    """The mark of a short form cannot come out of the encoding."""
    short = slug("n" * 1000)

    assert slug(short) != short


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_keys_are_the_same_in_every_process(hash_seed: str) -> None:
    """Nothing depends on hash()."""
    code = "from django_fencing.names import *; print(Keys.of('p', slug('ä' * 300)).lease)"

    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
    )

    assert printed.stdout.strip() == Keys.of("p", slug("ä" * 300)).lease


@given(st.one_of(texts, st.sampled_from(["}", "}x", "{", "a{b}c", "{}"])))
def test_the_keys_of_a_resource_share_a_slot(name: str) -> None:
    """Redis Cluster can run each script, whatever the name holds."""
    keys = Keys.of("fencing", f"name:{slug(checked(name))}")

    slots = {key_slot(key.encode()) for key in (keys.lease, keys.token, keys.held, keys.done)}

    assert len(slots) == 1


def test_names_spread_over_the_64_tags() -> None:
    """No tag is left out, and none has more than its share."""
    bases = [Keys.of("fencing", f"name:import:{number}").base for number in range(1000)]

    assert len(set(bases)) == 64
    assert max(bases.count(base) for base in set(bases)) <= 50
