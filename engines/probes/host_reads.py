"""Find the places of a training step that read a value back from the device, for which the host waits."""

import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
PACKAGES = ("hardware", "engines", "rlworker")
_ENGINE = "engines/megatron/engine.py"
READS_OF_A_STEP = {
    f"{_ENGINE} MegatronEngine._check_schedule": "the ranks' schedules are compared",
    f"{_ENGINE} MegatronEngine._are_gradients_finite": "whether there is a step",
    f"{_ENGINE} MegatronEngine._collect_outputs": "logprobs, which the controller gets",
    f"{_ENGINE} MegatronEngine._sum_over_replicas": "tokens of the step",
    "engines/batch/shard.py Shard.find_scored": "targets that count, from a column that is on the host",
    f"{_ENGINE} _reduce": "metrics of every micro-batch, after the last",
    "megatron/core/distributed/finalize_model_grads.py finalize_model_grads": "whether any token counts",
    "megatron/core/optimizer/clip_grads.py get_grad_norm_fp32": "the norm that gradients are clipped by",
}
"""Place that reads a device's values, once a step or once after it -> the value. Micro-batches read none."""
READS_OF_EXPERTS = {
    "engines/megatron/extensions/experts.py ExpertRouting.start_step": "tokens of all replicas, before the first",
    "hardware/megatron/experts.py Routers.measure": "tokens of each expert, after the last micro-batch",
}
"""The further reads of a step with experts, all on one rank."""
_T = torch.Tensor
_READING_METHODS = (_T.item, _T.tolist, _T.cpu, _T.numpy, _T.nonzero, _T.unique, _T.equal, _T.masked_select)
_READING_METHODS += (_T.__bool__, _T.__float__, _T.__int__, _T.__index__, _T.__contains__)
_READING_FUNCTIONS = (torch.nonzero, torch.unique, torch.equal, torch.masked_select)
_READS_OPERATOR = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class HostReads:
    """A context that records every read from the device.

    Attributes:
        places: ``FILE FUNCTION`` of each read in order: the innermost function of this project or of Megatron. Reads by
            an emulator, which checks calls, are left out.
    """

    def __init__(self):
        self.places: list[str] = []
        self._operators = _Operators(self.places)
        self._functions = _Functions(self._operators)

    def __enter__(self) -> "HostReads":
        self._operators.__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._functions.__exit__(*error)
        self._operators.__exit__(*error)

    def count(self) -> dict[str, int]:
        """Return place -> number of reads."""
        return {place: self.places.count(place) for place in self.places}


def _find_place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        name = getattr(frame.f_code, "co_qualname", name).split(".<locals>")[0]
        if "/megatron/core/" in file:
            return f"megatron/core/{file.rpartition('/megatron/core/')[2]} {name}"
        if any(Path(file).is_relative_to(ROOT / package) for package in PACKAGES):
            return f"{Path(file).relative_to(ROOT)} {name}"
        frame = frame.f_back
    return "elsewhere"


class _Operators(TorchDispatchMode):
    """Notes the operators that read, which torch's own code may call too."""

    def __init__(self, places: list[str]):
        super().__init__()
        self.places = places
        self.noted = False

    def note(self, place: str) -> None:
        if "/emulator/" not in place:
            self.places.append(place)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in _READS_OPERATOR and not self.noted:
            self.note(_find_place())
        return operator(*args, **kwargs or {})


class _Functions(TorchFunctionMode):
    """Notes reads of a tensor's values from Python: on a CPU most of them never reach an operator."""

    def __init__(self, operators: _Operators):
        super().__init__()
        self.operators = operators
        self.reading = {*_READING_METHODS, *_READING_FUNCTIONS}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in self.reading or self.operators.noted:
            return function(*args, **kwargs or {})
        self.operators.note(_find_place())
        self.operators.noted = True
        try:
            return function(*args, **kwargs or {})
        finally:
            self.operators.noted = False
