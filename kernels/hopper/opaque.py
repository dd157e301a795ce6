"""Values that the compiler shall not see through.

ptxas computes an address once, where it can, and keeps it in a register, or spills it, for as long as anything uses it:
sixteen slices of an operand of wgmma are sixteen addresses. In a loop that is short of registers it is better to
compute them again (docs/hopper.md, hazards).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def hidden(value):
    """`value`, an int32, as something that may be any number and differ from call to call."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [gl.to_tensor(value)], dtype=gl.int32, is_pure=False, pack=1
    )
