"""The fork server of the ranks loads torch, Megatron and the engine once, before it forks the first.

Nothing here may start a thread or a process group: neither would live on in a fork.
"""

import gc

from support.ranks.pool import set_environment


def load() -> None:
    set_environment()
    gc.disable()  # nothing that is imported goes, so that looking for garbage takes time and finds none
    from support.ranks.engines_cases import start_process

    start_process(0)
    import transformers  # noqa: F401

    import engines.megatron.engine
    import engines.probes.megatron  # noqa: F401

    gc.freeze()  # a collection in a fork would write to pages that it shares with the others
    gc.enable()


load()
