"""A process without the interpreter: compiles kernels for devices that are not here, and prints what compilers report.

For each kernel and target: registers of a thread, what spills to memory, wide loads, and how many of the warps that a processor
has room for the registers allow.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moduli import kernels
from moduli.kernels._emit_triton import emit_reduction
from moduli.kernels._triton import TritonKernel, build

TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]
_POINTERS = {"rows": "*i64", "chunks": "*i64", "partial": "*fp64"}


def adamw(p, g, m, v, norm, lr, beta1, beta2, eps, step, decay):
    g = g * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g * (1 - beta2))
    update = m / (1 - beta1**step) / (v.sqrt() * (1 - beta2**step) ** -0.5 + eps)
    p.sub_(lr * (update + decay * p))


def make_kernel(function, dtypes, scalars, tensors=()):
    """(source, block, warps) of a function with these roles and scalars, of which some are tensors on the device."""
    fused = kernels.fuse(function)
    marks = ("role",) * len(dtypes) + ("scalar",) * scalars
    graph = fused.trace(marks, dtypes).graph
    outputs = [(node, graph.nodes[node].dtype if role is None else dtypes[role], role) for node, role in graph.outputs]
    made = TritonKernel(graph, outputs, "kernel")
    return made.source(tuple(i in tensors for i in range(graph.scalars))).text, made.block, made.warps


def compile_for(source, block, warps, target):
    """What the compiler made of a kernel for a device."""
    function = build(source)
    signature = {}
    for name in function.arg_names:
        kind = _POINTERS.get(name, "i64" if name in ("count", "programs") else "fp64" if name[0] == "n" else "*fp64")
        signature[name] = "constexpr" if name.isupper() else kind
    given = {name: value for name, value in (("ALIGNED", True), ("BLOCK", block)) if name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    text = ASTSource(function, signature=signature, constexprs=given, attrs=aligned)
    made = triton.compile(text, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
    if target.backend == "hip":
        report = made.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", report)[1])
        spilled = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", report)[1])
        wide = len(re.findall("global_load_dwordx[24]", report))
        room = min(8, 512 // max(8, -(-registers // 8) * 8)) / 8
        return {
            "registers": registers,
            "spilled": spilled,
            "wide": wide,
            "occupancy": room,
            "size": len(made.asm["hsaco"]),
        }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", report)[1])
    # 64 warps have room in a processor of these, with 65536 registers that are given to warps by 256.
    room = min(64, 65536 // (-(-registers * 32 // 256) * 256) // warps * warps) / 64
    return {
        "registers": registers,
        "spilled": int(re.search(r"STACK:(\d+)", report)[1]),
        "wide": len(re.findall(r"ld\.global\.v\d", made.asm["ptx"])),
        "occupancy": room,
        "size": len(made.asm["cubin"]),
    }


def main(which: str) -> None:
    found = {}
    if which == "chains":
        todo = {
            "clip, Adam, decay, lr, float32": make_kernel(adamw, (torch.float32,) * 4, 7, (0,)),
            "clip, Adam, decay, lr, float64": make_kernel(adamw, (torch.float64,) * 4, 7, (0,)),
            "clip, Adam, decay, lr, bfloat16": make_kernel(adamw, (torch.bfloat16,) * 4, 7, (0,)),
            "norm": (emit_reduction("squares", [torch.float32], root=True), 512, 4),
            "dot": (emit_reduction("dot", [torch.float32, torch.bfloat16]), 512, 4),
            "amax": (emit_reduction("amax", [torch.float32]), 512, 4),
        }
    else:
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        from kernels.operations import BINARY, TERNARY, UNARY

        table = [(f"{name}", lambda x, f=f: f(x), 1) for name, f in UNARY.items()]
        table += [(name, lambda x, y, f=f: f(x, y), 2) for name, f in BINARY.items()]
        table += [(name, lambda x, y, z, f=f: f(x, y, z), 3) for name, f in TERNARY.items()]
        todo = {}
        for name, function, roles in table:
            own = {
                1: lambda x, f=function: f(x),
                2: lambda x, y, f=function: f(x, y),
                3: lambda x, y, z, f=function: f(x, y, z),
            }
            made = own[roles]
            made.__signature__ = __import__("inspect").signature(
                [lambda x: 0, lambda x, y: 0, lambda x, y, z: 0][roles - 1]
            )
            todo[name] = make_kernel(made, (torch.float32,) * roles, 0)
    targets = TARGETS if which == "chains" else TARGETS[1:]
    for name, (source, block, warps) in todo.items():
        for target in targets:
            found[f"{name} for {target.backend} {target.arch}"] = compile_for(source, block, warps, target)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
