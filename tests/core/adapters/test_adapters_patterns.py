import re
import time
from itertools import combinations
from pathlib import Path

import pytest
from bad_adapters import tiny_base, write_good_adapter
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.adapters.lora.targeting import Budget, Names, Pattern, PatternError, is_plain
from manylora.core.adapters.read import HeaderReader, ReadRules

atoms = st.sampled_from(
    [
        "a",
        "b",
        r"\.",
        ".",
        r"\d",
        r"\w",
        r"\W",
        "[ab]",
        "[^a]",
        "[a-c1]",
        "^",
        "$",
        r"\b",
        r"\B",
        r"\Z",
        r"(?=a)",
        "(?!b)",
    ]
)


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{3,}"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda part: f"(?={part})"),
        inner.map(lambda part: f"(?!{part})"),
    )


@given(pattern=st.recursive(atoms, grow, max_leaves=8), text=st.text("ab1.", min_size=1, max_size=7))
@settings(max_examples=400)
def test_matches_what_python_matches(pattern: str, text: str) -> None:
    expected = re.fullmatch(pattern, text) is not None
    assert Pattern(pattern, Budget(10.0)).fullmatch(text) == expected


@pytest.mark.parametrize("pattern", ["a(?!.)", "a(?=[^b])", "a(?![^b])", r"a\b(?!.)", r"(a(?!\W))*", "a(?=.)*"])
def test_nothing_follows_the_end(pattern: str) -> None:
    for text in ("a", "aa", "ab"):
        assert Pattern(pattern, Budget(10.0)).fullmatch(text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    "published",
    [
        r".*\.(q_proj|v_proj)",
        r"model\.layers\.\d+\.self_attn\.[qv]_proj",
        r"^(?!.*visual).*(?:q_proj|v_proj).*",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
    ],
)
def test_expressions_of_published_adapters_are_cheap(published: str) -> None:
    budget = Budget(1.0)
    pattern = Pattern(published, budget)
    for layer in range(80):
        for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{module}"
            assert pattern.fullmatch(name) == (module[-6:] in ("q_proj", "v_proj"))


@pytest.mark.parametrize("bomb", [r"(a+)+b", r"(a|aa)+b", r"(.*)*(.*)*(.*)*b", r"((a{0,9999}){0,9999}){0,9999}b"])
def test_a_bomb_takes_no_time(bomb: str) -> None:
    started = time.process_time()
    try:
        assert not Pattern(bomb, Budget(0.5)).fullmatch("a" * 200)
    except PatternError as error:
        assert "too long to match" in str(error)
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "no regular expression"),
        ("a{99999999999999999999}", "no regular expression"),
        ("a(?i)", "no regular expression"),
        (r"\p{L}", "no regular expression"),
        ("a" * 8193, "8193 characters"),
        ("a{e<=1}", "outside a count"),
        ("a{}", "outside a count"),
    ],
)
def test_syntax_that_is_not_supported_is_named(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=re.escape(words)):
        Pattern(pattern, Budget(1.0)).fullmatch("ab")


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?<=a)b", "a(?<=a)b", "(?>a)b", "(?>a*)ab", "a++b", "(?i)AB", "a(?i:B)", "(?s)a.", r"(?x) a b"],
)
def test_syntax_beyond_sets_of_positions_means_the_same(pattern: str) -> None:
    for text in ("ab", "aa", "aab", "a\n", "b"):
        assert Pattern(pattern, Budget(1.0)).fullmatch(text) == (re.fullmatch(pattern, text) is not None)


def test_a_budget_is_shared_and_ends() -> None:
    budget = Budget(0.05)
    patterns = [Pattern("(a|aa)+b", budget) for _ in range(4)]
    assert patterns[0].fullmatch("ab")
    for pattern in patterns:
        with pytest.raises(PatternError, match="too long to match"):
            pattern.fullmatch("a" * 50)


@given(
    names=st.lists(st.text("ab._", min_size=1, max_size=5).filter(is_plain), max_size=6),
    module=st.text("ab._", min_size=1, max_size=7),
)
@settings(max_examples=400)
def test_names_are_found_as_the_expressions_that_they_are(names: list[str], module: str) -> None:
    matched = (number for number, name in enumerate(names) if re.match(rf"(.*\.)?({name})$", module))
    assert Names(enumerate(names), Budget(10.0)).first(module) == next(matched, None)


def test_many_names_are_covered_by_the_budget(tmp_path: Path) -> None:
    base = tiny_base(num_layers=8)
    started = time.process_time()
    many = {f"layers.{number}.x_proj": 8 for number in range(30_000)}
    folder = write_good_adapter(tmp_path / "many", base, rank_pattern=many, alpha_pattern={"y" * 250_000: 4})
    assert (folder / "adapter_config.json").stat().st_size > 900_000
    HeaderReader(ReadRules(base=base, max_bytes=1 << 24)).read(
        "mine", folder
    )  # which is cheap, though it is a megabyte
    # Each name has its dots in other places, so that each is looked at for itself.
    module = "model.layers.0.self_attn.q_proj"
    places = combinations(range(1, len(module) - 1), 3)
    odd = ["".join("." if at in three else "x" for at in range(len(module))) for three in places]
    names = Names(enumerate(odd), budget := Budget(0.2))
    with pytest.raises(PatternError, match="names take too long"):
        while True:
            names.first(module)
    with pytest.raises(PatternError, match="too long"):
        Pattern("a+", budget)
    assert time.process_time() - started < 5.0
