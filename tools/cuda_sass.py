"""What ptxas and cuobjdump say about kernels, as data: registers and spills, instructions, loops, occupancy.

The main loop of a kernel is the natural loop (a backward branch to a block that dominates it) that itself, not in loops inside it, holds
the most tensor-core instructions, or multiply-adds where the kernel has none. Its fast path is the way around it that meets the most of
them, then the most asynchronous copies, then the fewest instructions: what a tile costs that needs no mask and no scalar access. A loop
inside is passed once, and branches that exclude each other are not known to.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

# First match wins; everything else is integer, logic or a move, also HFMA2, by which the compiler moves constants.
KINDS = [
    ("tensor", r"([HIDBQ]G?MMA|OMMA|UTC\w*MMA)$"),
    ("barrier", r"(BAR|SYNCS|WARPSYNC|DEPBAR|LDGDEPBAR|ARRIVES|MEMBAR|FENCE|ERRBAR|CCTL\w*|NANOSLEEP|UCGABAR\w*)$"),
    ("mufu", r"MUFU$"),
    ("local", r"(LDL|STL)$"),
    ("global", r"(LDG|STG|LDGSTS|LD|ST|ATOM|ATOMG|RED|REDG|UBLKCP|UTMA\w+)$"),
    ("ldmatrix", r"(LDSM|STSM)$"),
    ("shared", r"(LDS|STS|ATOMS|LDTM|STTM)$"),
    ("constant", r"(LDC|LDCU|ULDC)$"),
    ("shuffle", r"(SHFL|VOTE|VOTEU|MATCH|U?REDUX|CREDUX)$"),
    ("convert", r"(F2F|F2FP|F2I|I2F|I2FP|F2IP|FRND)$"),
    ("fma", r"(FFMA2?|FMUL2?|FADD2?|FFMA32I|FMUL32I|FADD32I|DFMA|DMUL|DADD|HMUL2|HADD2)$"),
    ("compare", r"(FSETP?|FSEL|FMNMX3?|FCHK|DSETP?|DMNMX|HSETP?2|HMNMX2|FSWZADD)$"),
    ("branch", r"(BRA|BRX|JMP|JMX|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BMOV|KILL|BPT|RTT|YIELD|ENDCOLLECTIVE)$"),
    ("idle", r"NOP$"),
]
_KIND = [(name, re.compile(pattern)) for name, pattern in KINDS]
KIND_NAMES = (*(name for name, _ in KINDS), "integer")
MULTIPLY_ADDS = ("FFMA", "FFMA2", "FFMA32I", "DFMA")


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction."""

    address: int
    opcode: str  # with its modifiers, LDG.E.128
    predicate: str  # "@!P0", empty where unconditional
    target: int | None  # of a branch within the kernel

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def kind(self) -> str:
        """One of KIND_NAMES; what no pattern names is integer, logic, or a move."""
        return next((kind for kind, pattern in _KIND if pattern.match(self.name)), "integer")

    @property
    def ends_thread(self) -> bool:
        """Nothing follows it."""
        return self.name in ("EXIT", "RET", "KILL", "BRX", "JMX", "BPT") and not self.predicate

    @property
    def bytes_per_thread(self) -> int:
        """Width of a memory access."""
        for part in self.opcode.split(".")[1:]:
            if part in ("U8", "S8"):
                return 1
            if part in ("U16", "S16"):
                return 2
            if part in ("64", "128", "256"):
                return int(part) // 8
        return 4


@dataclass
class Resources:
    """What ptxas reports for one kernel."""

    symbol: str
    arch: int
    registers: int = 0
    static_shared: int = 0
    stack_frame: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    local: int = 0
    barriers: int = 0


_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)\w*'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")


def parse_ptxas(text: str) -> dict[str, Resources]:
    """`--ptxas-options=-v` of one target -> symbol -> what it uses. A function that is no kernel counts for the kernel before it."""
    found: dict[str, Resources] = {}
    current: Resources | None = None
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            current = found.setdefault(match[1], Resources(match[1], int(match[2])))
        elif (match := _FUNCTION.search(line)) and match[1] in found:
            current = found[match[1]]
        elif current is None:
            continue
        elif match := _FRAME.search(line):
            current.stack_frame = max(current.stack_frame, int(match[1]))
            current.spill_stores += int(match[2])
            current.spill_loads += int(match[3])
        elif match := _USED.search(line):
            current.registers = int(match[1])
            for name, pattern in (
                ("static_shared", r"(\d+) bytes smem"),
                ("local", r"(\d+) bytes lmem"),
                ("barriers", r"used (\d+) barriers"),
            ):
                if more := re.search(pattern, match[2]):
                    setattr(current, name, int(more[1]))
    return found


_HEAD = re.compile(r"^\s*Function : (\S+)")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"(?:^|[\s,(])(0x[0-9a-f]+)$")


def parse_sass(text: str) -> dict[str, list[Instruction]]:
    """`cuobjdump -sass` -> symbol -> its instructions in order."""
    kernels: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if match := _HEAD.match(line):
            current = kernels.setdefault(match[1], [])
        elif match := _LINE.match(line):
            address, predicate, opcode, operands = match.groups()
            target = None
            if opcode.partition(".")[0] in ("BRA", "JMP") and (found := _TARGET.search(operands)):
                target = int(found[1], 16)
                # A predicate may also be written as an operand: BRA P0, 0x40, BRA.DIV UR4, 0x40, BRA !PT, 0x40.
                if "," in operands or ".DIV" in opcode:
                    predicate = predicate or "@" + operands.partition(",")[0].strip()
            current.append(Instruction(int(address, 16), opcode, predicate or "", target))
    return kernels


@dataclass
class Block:
    """Instructions that run together, and the blocks that may follow."""

    code: list[Instruction]
    next: list[int] = field(default_factory=list)


def flow(code: list[Instruction]) -> list[Block]:
    """The basic blocks of a kernel, the entry first."""
    starts = {0, *(i.target for i in code if i.target is not None)}
    starts |= {after.address for before, after in itertools.pairwise(code) if before.target is not None or before.ends_thread}
    blocks: list[Block] = []
    for instruction in code:
        if instruction.address in starts or not blocks:
            blocks.append(Block([]))
        blocks[-1].code.append(instruction)
    at = {block.code[0].address: index for index, block in enumerate(blocks)}
    for index, block in enumerate(blocks):
        last = block.code[-1]
        if last.target is not None:
            if last.target in at:
                block.next.append(at[last.target])
            falls = bool(last.predicate)
        else:
            falls = not last.ends_thread
        if falls and index + 1 < len(blocks):
            block.next.append(index + 1)
    return blocks


def _order(blocks: list[Block]) -> list[int]:
    """Reachable blocks in reverse postorder."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(blocks[0].next))]
    while stack:
        index, following = stack[-1]
        for successor in following:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].next)))
                break
        else:
            order.append(index)
            stack.pop()
    return order[::-1]


def dominators(blocks: list[Block]) -> dict[int, int]:
    """Reachable block -> the nearest block that every path to it passes; the entry -> itself."""
    order = _order(blocks)
    rank = {index: place for place, index in enumerate(order)}
    before: dict[int, list[int]] = defaultdict(list)
    for index in order:
        for successor in blocks[index].next:
            before[successor].append(index)
    nearest = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            known = [p for p in before[index] if p in nearest]
            best = known[0]
            for other in known[1:]:
                while best != other:
                    if rank[best] > rank[other]:
                        best = nearest[best]
                    else:
                        other = nearest[other]
            if nearest.get(index) != best:
                nearest[index] = best
                changed = True
    return nearest


def loops(blocks: list[Block]) -> dict[int, set[int]]:
    """Head of each natural loop -> its blocks; loops that share a head are one."""
    nearest = dominators(blocks)

    def dominates(a: int, b: int) -> bool:
        while b != a and nearest[b] != b:
            b = nearest[b]
        return a == b

    before: dict[int, list[int]] = defaultdict(list)
    for index in nearest:
        for successor in blocks[index].next:
            before[successor].append(index)
    found: dict[int, set[int]] = {}
    for tail in nearest:
        for head in blocks[tail].next:
            if dominates(head, tail):
                body = found.setdefault(head, {head})
                stack = [tail]
                while stack:
                    index = stack.pop()
                    if index not in body:
                        body.add(index)
                        stack += before[index]
    return found


def count_kinds(code: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by kind, those that occur."""
    counts = Counter(instruction.kind for instruction in code)
    return {kind: counts[kind] for kind in KIND_NAMES if counts[kind]}


def narrow_accesses(code: Iterable[Instruction]) -> int:
    """Global accesses of fewer than 16 bytes a thread."""
    return sum(instruction.kind == "global" and instruction.bytes_per_thread < 16 for instruction in code)


def _weight(block: Block, products: tuple[str, ...] | None) -> int:
    return sum(i.kind == "tensor" if products is None else i.name in products for i in block.code)


@dataclass
class MainLoop:
    """The main loop of a kernel."""

    body: list[Instruction]
    path: list[Instruction]  # the fast path
    products: int  # tensor-core instructions or multiply-adds on the fast path
    tensor: bool


def main_loop(code: list[Instruction]) -> MainLoop | None:
    """None for a kernel without loops, or whose loops multiply nothing."""
    blocks = flow(code)
    found = loops(blocks)
    products = None if any(i.kind == "tensor" for i in code) else MULTIPLY_ADDS
    weights = [_weight(block, products) for block in blocks]
    innermost: dict[int, int] = {}
    for head, body in sorted(found.items(), key=lambda item: -len(item[1])):
        innermost |= dict.fromkeys(body, head)
    own: Counter[int] = Counter()
    for index, head in innermost.items():
        own[head] += weights[index]
    if not own or max(own.values()) == 0:
        return None
    # Of equals the longest: the same loop without its masks, say, is the shorter one.
    head = max(own, key=lambda head: (own[head], sum(len(blocks[index].code) for index in found[head])))
    body = found[head]
    path = _fast_path(blocks, weights, head, body)
    return MainLoop(
        [i for index in sorted(body) for i in blocks[index].code],
        [i for index in path for i in blocks[index].code],
        sum(weights[index] for index in path),
        products is None,
    )


def _fast_path(blocks: list[Block], weights: list[int], head: int, body: set[int]) -> list[int]:
    """Blocks from the head around to it: see the head of this file."""
    copies = {index: sum(i.name == "LDGSTS" for i in blocks[index].code) for index in body}
    place = {index: at for at, index in enumerate(_order(blocks))}
    best = {head: (-weights[head], -copies[head], len(blocks[head].code), [head])}
    around: list[tuple[int, int, int, list[int]]] = []
    for index in sorted(body, key=place.__getitem__):
        if index not in best:
            continue
        products, copied, size, path = best[index]
        for successor in blocks[index].next:
            if successor == head:
                around.append(best[index])
            elif successor in body and place[successor] > place[index]:
                longer = (
                    products - weights[successor],
                    copied - copies[successor],
                    size + len(blocks[successor].code),
                    [*path, successor],
                )
                if successor not in best or longer < best[successor]:
                    best[successor] = longer
    return min(around)[3]


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor has."""

    warps: int
    blocks: int
    shared: int  # bytes
    shared_per_block: int


# CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability": 8.0, 9.0, 10.0, 12.0. For all four: 65,536 registers,
# given to warps 256 at a time, warps standing on 4 partitions; shared memory given 128 bytes at a time, 1 KB of each block's kept by the
# system (the same guide; units as in cuda_occupancy.h of the toolkit).
LIMITS = {
    80: Limits(warps=64, blocks=32, shared=164 * 1024, shared_per_block=163 * 1024),
    90: Limits(warps=64, blocks=32, shared=228 * 1024, shared_per_block=227 * 1024),
    100: Limits(warps=64, blocks=32, shared=228 * 1024, shared_per_block=227 * 1024),
    120: Limits(warps=48, blocks=24, shared=100 * 1024, shared_per_block=99 * 1024),
}
REGISTERS, REGISTER_UNIT, PARTITIONS, SHARED_UNIT, SHARED_RESERVED = 65536, 256, 4, 128, 1024


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that stand on one multiprocessor, and what admits no more."""

    blocks: int
    warps: int
    limit: str  # registers, shared memory, warps, blocks; several where they agree


def occupancy(arch: int, threads: int, registers: int, shared: int) -> Occupancy:
    """For blocks of `threads` with `registers` a thread and `shared` bytes a block, static and dynamic."""
    limits = LIMITS[arch]
    warps = -(-threads // 32)
    registers_per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    warps_by_registers = REGISTERS // PARTITIONS // registers_per_warp * PARTITIONS
    shared_per_block = -(-(shared + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    bounds = {
        "registers": warps_by_registers // warps,
        "shared memory": limits.shared // shared_per_block if shared <= limits.shared_per_block else 0,
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
    }
    blocks = min(bounds.values())
    return Occupancy(blocks, blocks * warps, ", ".join(name for name, bound in bounds.items() if bound == blocks))
