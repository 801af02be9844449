"""Templates of texts: columns in braces, lines left out where all their columns are empty."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import ConfigError
from packer.samples.template import TextTemplate


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        ("{a}\n{b}\n{c}", {"a": "x", "b": "", "c": "z"}, "x\nz"),
        ("{a}\n{b}\n{c}", {"a": "x", "b": None, "c": "z"}, "x\nz"),
        ("{a}\n{b}\n", {"a": "x", "b": ""}, "x\n"),
        ("Q: {a} {b}\n\nA: {c}", {"a": "", "b": "y", "c": ""}, "Q:  y\n"),
        ("{{{a}}}\n### Answer:", {"a": "x"}, "{x}\n### Answer:"),
        ("{a.b}{a.b}", {"a.b": "x\ny"}, "x\nyx\ny"),
        ("{a}\n{b}", {"a": "", "b": ""}, ""),
    ],
)
def test_lines_without_values_are_left_out(template, row, text):
    values = {column: [value] for column, value in row.items()}
    assert TextTemplate(template).render(values, 0) == text


@given(st.lists(st.text(alphabet="x\n", min_size=1), min_size=1, max_size=4))
def test_with_values_for_all_it_is_what_python_formats(values):
    names = [f"c{at}" for at in range(len(values))]
    template = "\n".join(f"<{{{name}}}>" for name in names)
    row = dict(zip(names, values, strict=True))
    rendered = TextTemplate(template).render({name: [value] for name, value in row.items()}, 0)
    assert rendered == template.format(**row)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no columns", "names no column"),
        ("{a", "write columns as {name}, braces as {{ and }}"),
        ("a}", "write columns as {name}"),
        ("{}", "is to hold the name of a column"),
        ("{a!r}", "is to hold the name of a column"),
        ("{a:>5}", "is to hold the name of a column"),
    ],
)
def test_what_is_no_template(template, message):
    with pytest.raises(ConfigError, match=message):
        TextTemplate(template)
