"""Machines of the forecast: what a device of each computes, moves and sends in a second, and where it is written.

Shares of the peaks, and seconds that the host takes, are of this project's own measurements on a CPU and on one H100
(docs/cuda.md); other devices are taken to reach the H100's. Figures of NVIDIA are for dense products of 16 bits. Only
the 910B's peak was read where it is written: hold the others against the sheet of your device.
"""

from dataclasses import dataclass, replace

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Machine:
    """A kind of machine, by one of its devices. Rates are FLOP/s and bytes/s, times are seconds.

    Attributes:
        products: peak of matrix products by type. memory: peak of the device's memory. memory_gb: its size, in GiB.
        devices: of a node. link, network: what a device sends within a node, and to another node.
        host: weights on their way from trainers to rollout engines, by way of the host's memory.
        product_share, attention_share, memory_share: parts of the peaks that are reached.
        layer: the host's work for a pass through a layer; a backward pass counts as two.
        call: the least that a collective takes.
        engine_layer, engine_token: the rollout engine's own work in a forward pass, for each layer and each sequence.
        trainer_step, rollout_step, driver_step, sample: each process's further work in a step, the driver's for each
            sample too.
        launches_ahead: the host's work runs beside the device's.
    """

    name: str
    products: dict[str, float]
    memory: float
    memory_gb: float
    devices: int
    link: float
    network: float
    host: float
    product_share: float = 0.78
    attention_share: float = 0.2
    memory_share: float = 0.65
    layer: float = 1.2e-3
    call: float = 2e-5
    engine_layer: float = 1e-4
    engine_token: float = 1e-5
    trainer_step: float = 0.1
    rollout_step: float = 0.1
    driver_step: float = 0.1
    sample: float = 1e-4
    launches_ahead: bool = True


_H100 = Machine(
    "h100",
    # NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s with sparsity, twice those without; 3.35 TB/s; NVLink 900 GB/s, both
    # ways together. DGX H100: one port of 400 Gb/s for each GPU.
    products={"bfloat16": 989 * _TERA, "float32": 67 * _TERA},
    memory=3.35 * _TERA,
    memory_gb=80,
    devices=8,
    link=450 * _GIGA,
    network=50 * _GIGA,
    host=2 * _GIGA,
)
# A die of two, which torch_npu takes for a device. Zuo et al., arXiv:2506.12708, section 3: a package has 752 TFLOP/s,
# 128 GB at 3.2 TB/s, 392 GB/s one way on the supernode's bus and 400 Gb/s beyond it.
_910C = replace(
    _H100,
    name="910c",
    products={"bfloat16": 376 * _TERA, "float32": 94 * _TERA},
    memory=1.6 * _TERA,
    memory_gb=64,
    devices=16,
    link=196 * _GIGA,
    network=25 * _GIGA,
)
MACHINES = {
    machine.name: machine
    for machine in (
        _H100,
        # NVIDIA H200 data sheet, SXM: the H100's products and links, 141 GB at 4.8 TB/s.
        replace(_H100, name="h200", memory=4.8 * _TERA, memory_gb=141),
        # NVIDIA DGX B200 data sheet: 36 PFLOP/s of 16 bits for eight with sparsity, 64 TB/s, 1,440 GB, NVLink 1.8 TB/s
        # for each, ports of 400 Gb/s.
        replace(
            _H100,
            name="b200",
            products={"bfloat16": 2250 * _TERA, "float32": 75 * _TERA},
            memory=8 * _TERA,
            memory_gb=180,
            link=900 * _GIGA,
        ),
        # Ascend910B2C.ini of CANN: 24 cores of 16 x 16 x 16 multiply-adds at 1.8 GHz. Memory and links are taken for
        # those of the 910C's die.
        replace(_910C, name="910b", products={"bfloat16": 354 * _TERA, "float32": 88 * _TERA}, devices=8),
        _910C,
        # A core of an AMD EPYC of two, fitted by scripts/simulate/fit.py; products by a probe of it.
        Machine(
            "cpu",
            products={"float32": 99 * _GIGA, "bfloat16": 99 * _GIGA},
            memory=10.9 * _GIGA,
            memory_gb=24,
            devices=2,
            link=1.1 * _GIGA,
            network=1.1 * _GIGA,
            host=0.57 * _GIGA,
            product_share=1.0,
            attention_share=0.27,
            memory_share=1.0,
            layer=6.1e-4,
            call=9.7e-4,
            engine_layer=8.5e-4,
            engine_token=6.3e-5,
            trainer_step=0.013,
            rollout_step=0.077,
            driver_step=0.038,
            sample=2.6e-5,
            launches_ahead=False,
        ),
    )
}
