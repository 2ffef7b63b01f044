"""Compiles recorded launches for a device that is not there, and reads what they would use of it.

Triton's wheel carries the assembler and ``cuobjdump``, so registers, stack and shared memory of
the final machine code are known without a GPU. Stack in these kernels is register spills.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.backend import interpreted
from kernels.launches import OPTIONS, Launch, recording

HOPPER = ("NVIDIA H200", 90)
ALIGNED = 16  # pointers and strides that divide by this let the compiler widen loads
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel uses: registers a thread, stack bytes a thread, shared bytes."""

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def usage(function: Callable[[], Any], device: tuple[str, int] = HOPPER) -> list[Usage]:
    """Compiles every kernel that ``function`` would start on ``device`` (name, capability).

    ``function`` calls operations on CPU tensors, which are not computed. Raises ``RuntimeError``
    in an interpreting process, where kernels cannot be compiled.
    """
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET=1: allowed is a process without it")
    with recording(device[0]) as launches:
        function()
    return [_compile(launch, device[1]) for launch in launches]


def _compile(launch: Launch, capability: int) -> Usage:
    options = {name: launch.constants[name] for name in OPTIONS if name in launch.constants}
    source = _source(launch)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    return _resources(launch.kernel.__name__, compiled.asm["cubin"], compiled.metadata.shared)


def _source(launch: Launch) -> Any:
    names = launch.kernel.arg_names
    constants = {k: v for k, v in launch.constants.items() if k not in OPTIONS}
    values = {**dict(zip(names, launch.args, strict=False)), **constants}
    fixed = {
        name: value
        for name, value in values.items()
        if name in constants or value is None or (isinstance(value, int) and value == 1)
    }
    signature = {name: "constexpr" if name in fixed else _type(values[name]) for name in names}
    attributes = {
        (i,): [["tt.divisibility", ALIGNED]]
        for i, name in enumerate(names)
        if name not in fixed and _aligned(values[name])
    }
    places = {(names.index(name),): value for name, value in fixed.items()}
    return ASTSource(launch.kernel, signature, places, attributes)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 1 << 31 else "i64"


def _aligned(value: Any) -> bool:
    whole = isinstance(value, int) and value % ALIGNED == 0
    return whole or isinstance(value, torch.Tensor)


def _resources(name: str, cubin: bytes, shared: int) -> Usage:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers for {name}: {text!r}")
    return Usage(name, int(found[1]), int(found[2]), shared)
