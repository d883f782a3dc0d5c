import torch
from support.ranks.engines_cases import join_group, start_process
from support.ranks.pool import draw_address

from hardware.collectives import gather_keys_values, sum_over_ranks


def gather_and_sum(rank, world, address):
    """Outputs and gradients of both collectives, with gradients that are not contiguous in memory."""
    start_process(rank)
    group = join_group(rank, world, address)
    torch.manual_seed(rank)
    key, value = (torch.randn(3, 2, requires_grad=True) for _ in range(2))
    keys, values = gather_keys_values(key, value, group)
    weight = torch.arange(12.0).view(2, 6)
    gradients = torch.autograd.grad((keys.t() * weight).sum() + (values.t() * weight**2).sum(), (key, value))
    mine = torch.full((4,), float(rank + 1), requires_grad=True)
    total = sum_over_ranks(mine, group)
    (passed,) = torch.autograd.grad((total * torch.arange(4.0)).sum(), mine)
    return key.detach(), value.detach(), keys.detach(), values.detach(), gradients, total.detach(), passed


def test_gather_and_sum_over_two_ranks(two_ranks):
    first, second = two_ranks.run(gather_and_sum, draw_address())
    weight = torch.arange(12.0).view(2, 6).t()
    for rank, result in enumerate((first, second)):
        own = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(result[2], torch.cat([first[0], second[0]]))
        assert torch.equal(result[3], torch.cat([first[1], second[1]]))
        # Both ranks weigh every gathered row alike, so a rank's own rows get twice the weight.
        assert torch.equal(result[4][0], 2 * weight[own])
        assert torch.equal(result[4][1], 2 * weight[own] ** 2)
        assert result[5].tolist() == [3.0] * 4
        assert result[6].tolist() == [0.0, 1.0, 2.0, 3.0], "the gradient comes back unchanged, not summed"
