import pytest
import torch

from hardware.megatron import fused_adam
from hardware.megatron.fused_adam import FusedAdam


@pytest.mark.parametrize("at_once", [10**8, 8, 4], ids="{} elements at once".format)
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_torch(monkeypatch, decoupled, at_once):
    """Whole, in slices of whole tensors, and in parts of them; no copy is larger than a slice."""
    monkeypatch.setattr(fused_adam, "AT_ONCE", at_once)
    copied, root = [], torch._foreach_sqrt
    monkeypatch.setattr(
        torch, "_foreach_sqrt", lambda tensors: copied.append(sum(x.numel() for x in tensors)) or root(tensors)
    )
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7), torch.randn(1), torch.randn(2)]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    settings = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **settings)
    optimizer = FusedAdam(ours, **settings, adam_w_mode=decoupled)
    for _ in range(5):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    assert optimizer.param_groups[0]["step"] == 5
    assert copied == {10**8: [25], 8: [8, 7, 8, 2], 4: [4, 4, 4, 3, 4, 4, 2]}[at_once] * 5
    for mine, other in zip(ours, theirs):
        assert torch.allclose(mine, other, atol=1e-6)


def test_a_parameter_without_gradient_stays():
    still, moving = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    moving.grad = torch.ones(2)
    FusedAdam([still, moving], lr=0.1).step()
    assert still.tolist() == [1.0, 1.0] and moving.tolist() != [1.0, 1.0]
