"""Advantages and losses of a policy, as plain functions of a batch."""


def import_distillation():
    """Import what only a run with a reference or teachers needs."""
    from rlworker.algorithms import distillation

    return distillation
