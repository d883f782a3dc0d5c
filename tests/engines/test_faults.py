"""Faults that are planted into code of production."""

import inspect

from engines.probes.faults import ADAPTER_FAULTS, FAULTS, REAL_FAULTS


def test_faulty_functions_take_the_arguments_of_those_that_they_replace():
    """Otherwise a check finds an error in place of the fault. Those of rollouts, which import vLLM, are aside."""
    count = 0
    for name, fault in (FAULTS | REAL_FAULTS | ADAPTER_FAULTS).items():
        for owner, attribute, wrap in fault.patches() if fault.patches and fault.where == "actor" else []:
            right = getattr(owner, attribute)
            arguments = inspect.signature(right).parameters.values()
            by_place = [each for each in arguments if each.kind == each.POSITIONAL_OR_KEYWORD]
            by_name = {each.name: each for each in arguments if each.kind == each.KEYWORD_ONLY}
            try:
                inspect.signature(wrap(right)).bind(*by_place, **by_name)
            except TypeError as error:
                raise AssertionError(
                    f"{name}: {owner.__name__}.{attribute}{inspect.signature(right)}: {error}"
                ) from None
            count += 1
    assert count > 30
