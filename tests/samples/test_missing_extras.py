"""What is not installed is named, with the extra that brings it."""

import pytest

from packer.errors import MissingExtraError
from packer.samples import LengthDefinition, chat


@pytest.mark.parametrize("missing", ["transformers", "jinja2"])
def test_chats(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(chat, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(MissingExtraError, match=rf"needs {missing}; install 'microbatch-packer\[chat\]'"):
        LengthDefinition.by_messages("messages", tokenizer=str(tmp_path))
