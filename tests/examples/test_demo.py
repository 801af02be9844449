"""What the demo computes beside the library: attention within the samples of a packed row."""

import importlib
from types import ModuleType

import pytest
import torch

from tests.attentions import reference
from tests.examples.launches import EXAMPLES


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("demo")


@pytest.mark.parametrize("causal", [True, False])
def test_samples_of_a_row_do_not_see_each_other(demo: ModuleType, causal: bool) -> None:
    torch.manual_seed(0)
    edges = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    row = torch.randn(3, 9, 2, 8, dtype=torch.float64, requires_grad=True)
    attended = demo.attend_each(*row, edges, edges, 5, 5, causal=causal)
    expected = reference(*row[:, None], edges, causal=causal)[0]
    torch.testing.assert_close(attended, expected)
    weights = torch.randn_like(expected)
    (grad,), (expected_grad,) = (torch.autograd.grad((x * weights).sum(), row) for x in (attended, expected))
    torch.testing.assert_close(grad, expected_grad)


def test_padded_batches_are_attended_row_by_row(demo: ModuleType) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64)
    attention = demo.UlyssesAttention(demo.attend_each)
    torch.testing.assert_close(
        attention(query, key, value, cu_seqlens=None), reference(query, key, value, None)
    )
