#!/usr/bin/env python3
"""Checks in a binary's machine code that every kernel waits before it touches what another kernel may write.

  check_sass.py BINARY...        cuobjdump from PATH, or from $CUOBJDUMP

A kernel of the launch layer must, on every path from its entry, execute griddepcontrol.wait (ACQBULK) before it exits,
before it writes global memory, and before it reads any except through the read-only path (LDG.CONSTANT) or by asynchronous
copies with a hint of 256 bytes (LDGSTS.LTC256B), which are what a weight view compiles to. Kernels that are launched otherwise are refused, but for the broken ones of the tests
(KernelWithoutWait), which must be found at fault: they show that the check works.
"""

import os
import re
import subprocess
import sys

WRAPPER = "launch_internal::Kernel<"
BROKEN = "KernelWithoutWait<"

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*([^;]*);")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
ENDS = {"EXIT", "RET", "KILL"}
UNKNOWN_FLOW = {"BRX", "BRXU", "JMX", "JMXU", "JMP", "CALL"}
WRITES = {"ST", "STG", "RED", "REDG", "ATOM", "ATOMG", "REDAS", "STAS", "UBLKCP", "UBLKRED", "UTMASTG", "UTMAREDG"}
READS = {"LD", "LDG", "LDGSTS", "UTMALDG"}


def demangle(names):
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return dict(zip(names, text.splitlines()))


def disassemble(path):
    """Returns {kernel: [(address, predicated, opcode, operands)]}."""
    tool = os.environ.get("CUOBJDUMP", "cuobjdump")
    text = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    kernels = {}
    code = None
    for line in text.splitlines():
        function = FUNCTION.match(line)
        if function:
            code = kernels.setdefault(function.group(1), [])
            continue
        instruction = INSTRUCTION.match(line)
        if instruction and code is not None:
            predicated = bool(re.match(r"^\s*/\*[0-9a-f]+\*/\s+@", line))
            code.append((int(instruction.group(1), 16), predicated, instruction.group(2), instruction.group(3)))
    return kernels


def faults(code):
    """What may happen before the wait and must not."""
    index_of = {address: i for i, (address, _, _, _) in enumerate(code)}
    found = set()
    seen = set()
    to_visit = [0]
    waits = any(opcode == "ACQBULK" for _, _, opcode, _ in code)
    if not waits:
        found.add("it never waits")
    while to_visit:
        i = to_visit.pop()
        if i in seen or i >= len(code):
            continue
        seen.add(i)
        address, predicated, opcode, operands = code[i]
        parts = opcode.split(".")
        name = parts[0]
        where = "%s %s at %#x" % (opcode, operands.strip(), address)
        if name == "ACQBULK" and not predicated:
            continue
        if name in ENDS:
            found.add("it may end: " + where)
        if name in WRITES:
            found.add("it may write: " + where)
        of_weight = (name == "LDG" and "CONSTANT" in parts) or (name == "LDGSTS" and "LTC256B" in parts)
        if name in READS and not of_weight:
            found.add("it may read: " + where)
        if name in UNKNOWN_FLOW:
            found.add("it goes where this check cannot follow: " + where)
        if name in ("BRA", "BSYNC"):
            if name == "BRA":
                targets = [int(target, 16) for target in re.findall(r"0x([0-9a-f]+)", operands)][-1:]
            else:  # reconverges at the target of its BSSY
                barrier = operands.split()[-1]
                before = [c for c in code[:i] if c[2].startswith("BSSY") and barrier in c[3].replace(",", " ").split()]
                targets = [int(re.findall(r"0x([0-9a-f]+)", before[-1][3])[-1], 16)] if before else []
            if not targets or targets[0] not in index_of:
                found.add("it goes where this check cannot follow: " + where)
            to_visit.extend(index_of[target] for target in targets if target in index_of)
        if predicated or name not in ENDS | {"BRA"}:
            to_visit.append(i + 1)
    return sorted(found)


def main(paths):
    if not paths:
        sys.exit(__doc__)
    waiting, failed, broken = 0, 0, 0
    for path in paths:
        kernels = disassemble(path)
        names = demangle(list(kernels))
        for mangled, code in kernels.items():
            name = names[mangled]
            found = faults(code)
            if BROKEN in name:
                broken += 1
                found = [] if found else ["it does not wait, and nothing was found"]
            elif WRAPPER not in name:
                found.append("it is not a kernel of the launch layer")
            else:
                waiting += not found
            if found:
                failed += 1
                print("FAIL %s" % name)
                for fault in found:
                    print("     before the wait, " + fault)
    print("%d kernels wait first, %d kernels fail; %d that the tests broke were found out" % (waiting, failed, broken))
    if waiting == 0 or failed:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
