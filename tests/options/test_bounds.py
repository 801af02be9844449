"""The one rule of the bounds against a twin that shares no code with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import ConfigError
from packer.options import PlanConfig
from packer.options.bounds import Company, longest_sample, most_samples
from tests.options import twin


@st.composite
def configs(draw):
    """Options that bound a micro-batch, small enough to bite."""
    layout = draw(st.sampled_from(["padded", "packed"]))
    options = {
        "max_tokens": draw(st.integers(1, 200)),
        "layout": layout,
        "count": draw(st.sampled_from(["padded", "real"])),
        "sp_size": draw(st.sampled_from([1, 1, 2, 4])),
        "pad_multiple": draw(st.sampled_from([1, 1, 3, 8])),
        "max_attention": draw(st.one_of(st.none(), st.integers(1, 40_000))),
        "max_seqlen": draw(st.one_of(st.none(), st.integers(1, 200))),
        "max_samples": draw(st.one_of(st.none(), st.integers(1, 9))),
    }
    if layout == "packed":
        options["pad_segments_to"] = draw(st.sampled_from([1, 1, 4]))
        options["packing"] = draw(st.sampled_from([None, None, "wrapped"]))
    if options.get("packing") == "wrapped":
        options |= {"max_attention": None, "max_samples": None}
    try:
        return PlanConfig(**options)
    except ConfigError:
        return PlanConfig(max_tokens=options["max_tokens"], layout=layout)


@given(configs(), st.integers(1, 4))
def test_bounds_equal_those_of_the_twin(config, company):
    entries = config.to_json()
    others = company if (config.layout, config.count) == ("padded", "padded") else 1
    expected = twin.longest_sample(entries, company=others)
    assert longest_sample(config, company=Company(num_samples=others - 1)) == expected
    assert most_samples(config) == twin.most_samples(entries)


@pytest.mark.parametrize("fixed", [8, 16, 24])
def test_a_fixed_length_is_the_longest_or_none_fits(fixed):
    config = PlanConfig(max_tokens=24, fixed_seqlen=fixed)
    assert longest_sample(config) == fixed
    assert longest_sample(config, company=Company(num_samples=1)) == (fixed if 2 * fixed <= 24 else 0)
    assert twin.longest_sample(config.to_json(), company=2) == (fixed if 2 * fixed <= 24 else 0)
