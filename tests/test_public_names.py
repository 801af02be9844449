"""A name, a signature or an option that changed is seen: they are written down in one file."""

from pathlib import Path

from tests import public_names

WRITTEN = Path(__file__).parent / "public_names.txt"


def test_they_are_those_that_are_written_down():
    written, now = WRITTEN.read_text(encoding="utf-8").splitlines(), public_names.lines()
    gone, new = sorted(set(written) - set(now)), sorted(set(now) - set(written))
    assert (gone, new) == ([], []), (
        "what others rely on has changed. If it is meant: say so in CHANGELOG.md, keep what goes for one "
        "minor version with a DeprecationWarning, and run "
        "`python -m tests.public_names > tests/public_names.txt`"
    )
    assert written == now


def test_a_class_is_written_with_its_members():
    names = public_names.lines()
    assert any(line.startswith("class packer.PlanLoader(") for line in names)
    assert any(line.startswith("packer.PlanLoader.state_dict(self)") for line in names)
    assert any(line.startswith("packer.make_plan(seqlens:") for line in names)
    assert any(line.startswith("packer plan --max-tokens") for line in names)
