import pytest
import torch

from hardware.megatron.fused_adam import FusedAdam


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_are_those_of_torch(decoupled):
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7)]
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
    for mine, other in zip(ours, theirs):
        assert torch.allclose(mine, other, atol=1e-6)


def test_a_parameter_without_gradient_stays():
    still, moving = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    moving.grad = torch.ones(2)
    FusedAdam([still, moving], lr=0.1).step()
    assert still.tolist() == [1.0, 1.0] and moving.tolist() != [1.0, 1.0]
