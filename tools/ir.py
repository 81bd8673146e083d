"""What Triton's IR says of a kernel: its additions in order, its addresses, its matrix products.

Reads the text of TTIR and TTGIR line by line; knows values, loops and the few operations it is asked about.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

TRANSPARENT = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout"}
FLOAT_MATH = re.compile(
    r"(arith\.(add|sub|mul|div|max|min|neg|ext|trunc|rem)\w*f|arith\.(maxnumf|minnumf|select)|math\.\w+)$"
)
DOTS = {"tt.dot", "ttng.warp_group_dot"}
_RESULT = re.compile(r"^(?P<result>%[\w-]+)(?::\d+)? = (?P<rest>.*)$")
_VALUE = re.compile(r"%[\w-]+(?:#\d+)?")
_ITER = re.compile(r"(%[\w-]+) = (%[\w-]+(?:#\d+)?)")


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    result: str  # "%acc", without the "#2" of uses where it has several; "" without result
    name: str  # "arith.muli"
    operands: tuple[str, ...]
    text: str
    loops: tuple[int, ...]  # the enclosing loops, outermost first
    location: str

    @property
    def type(self) -> str:
        """Of the result, and the operands where those are of the same type."""
        return re.split(r" -> | to ", self.text.rsplit(" : ", 1)[-1])[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    number: int
    parent: int | None
    induction: str
    carried: dict[str, str]  # a value of the body -> its value before the loop, in order
    result: str


class Module:
    """One kernel's IR."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.operations: list[Operation] = []
        self.loops: list[Loop] = []
        self._read()
        self.definition = {o.result: o for o in self.operations if o.result}
        self.loop_of = {loop.result: loop for loop in self.loops if loop.result}

    def _read(self) -> None:
        locations = _Locations(self.text)
        regions: list[int | None] = []  # the loop that each open brace is, if any
        for raw in self.text.splitlines():
            line = re.sub(r"\s*loc\((#loc\d*)\)$", "", raw.strip())
            code = re.sub(r'"[^"]*"', '""', line)
            if code.startswith("}") and regions:
                regions.pop()
            enclosing = tuple(r for r in regions if r is not None)
            number = None
            if found := re.match(r"(?:(%[\w-]+)(?::\d+)? = )?scf\.(for|while)\b", code):
                number = len(self.loops)
                induction = re.search(r"scf\.for (%[\w-]+) =", code)
                inits = re.search(r"iter_args\((.*?)\) ->", code)
                carried = dict(_ITER.findall(inits[1])) if inits else {}
                parent = enclosing[-1] if enclosing else None
                self.loops.append(Loop(number, parent, induction[1] if induction else "", carried, found[1] or ""))
            elif (operation := _operation(code, line, enclosing, locations.of(raw))) is not None:
                self.operations.append(operation)
            if code.endswith("{"):
                regions.append(number)

    @cached_property
    def main_loops(self) -> list[Loop]:
        """The innermost loops that hold a matrix product."""
        busy = {o.loops[-1] for o in self.operations if o.name in DOTS and o.loops}
        return [loop for loop in self.loops if loop.number in busy]

    def within(self, loop: Loop) -> Iterator[Operation]:
        """Operations of a loop, those of its inner loops included."""
        return (o for o in self.operations if loop.number in o.loops)


def _operation(code: str, text: str, loops: tuple[int, ...], location: str) -> Operation | None:
    found = _RESULT.match(code)
    rest = found["rest"] if found else code
    name = re.match(r'"?([a-z]\w*\.[\w.]+)', rest)
    if name is None:
        return None
    return Operation(found["result"] if found else "", name[1], tuple(_VALUE.findall(rest)), text, loops, location)


class _Locations:
    """Source lines by location name."""

    def __init__(self, text: str) -> None:
        self._known = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def of(self, line: str) -> str:
        found = re.search(r"loc\((#loc\d*)\)$", line)
        return self._resolve(found[1]) if found else "?"

    def _resolve(self, name: str, depth: int = 0) -> str:
        known = self._known.get(name, "")
        if found := re.match(r'"([^"]*)":(\d+):\d+', known):
            return f"{found[1].rsplit('/', 1)[-1]}:{found[2]}"
        inner = re.search(r"#loc\d*", known)
        return self._resolve(inner[0], depth + 1) if inner and depth < 50 else "?"


# ---- order of additions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the loops around the matrix products add up, in which order, whatever the tile.

    A line is one operation on numbers of line order; `mma(bf16, 128, zero)` is a chain of products over 128
    columns that starts from zero, however many dots it is written as. Two kernels with equal fingerprints fold
    a block, and a segment, by the same operations; how weights become operands is not part of it.
    """

    block: tuple[str, ...]  # an iteration of the innermost loop
    segments: tuple[str, ...]  # an iteration of the loop around it, empty without one

    @property
    def digest(self) -> str:
        """Of the block: kernels with one segment a program fold segments elsewhere."""
        return hashlib.sha256("\n".join(self.block).encode()).hexdigest()[:12]

    @property
    def chains_blocks(self) -> bool:
        """Whether a matrix product starts from what an earlier iteration left, a sum that ignores block borders."""
        return any(line.startswith("mma(") and line.endswith("carried)") for line in self.block)


def fingerprint(ttir: str) -> Fingerprint:
    module = Module(ttir)
    inner = module.main_loops
    outer = {loop.parent for loop in inner if loop.parent is not None}
    blocks = {_Sums(module, loop).lines() for loop in inner}
    segments = {_Sums(module, module.loops[number]).lines() for number in outer}
    return Fingerprint(_only(blocks), _only(segments))


def _only(alternatives: set[tuple[str, ...]]) -> tuple[str, ...]:
    """The lines of loops that all do the same; else all of them, in order of their text."""
    return tuple(line for lines in sorted(alternatives) for line in lines)


class _Sums:
    """The arithmetic of one iteration of a loop, as numbered lines, one for each value."""

    def __init__(self, module: Module, loop: Loop) -> None:
        self._module = module
        self._loop = loop
        self._lines: list[str] = []
        self._known: dict[str, str] = {}

    def lines(self) -> tuple[str, ...]:
        """Of every value handed to the next iteration that a matrix product enters."""
        yields = [
            o for o in self._module.operations if o.name == "scf.yield" and o.loops and o.loops[-1] == self._loop.number
        ]
        found: list[tuple[str, ...]] = []
        for value in yields[-1].operands if yields else ():
            self._lines, self._known = [], {}
            if not self._is_float(value):
                continue
            self._name(value)
            lines = tuple(self._lines)
            if any(line.startswith(("mma(", "inner")) for line in lines):
                found.append(lines)
        return tuple(line for lines in sorted(set(found)) for line in lines)

    def _is_float(self, value: str) -> bool:
        base = value.split("#")[0]
        if base in self._module.loop_of:
            return True
        operation = self._module.definition.get(base)
        return operation is not None and bool(re.search(r"[x<]?(f32|f16|bf16|f64)\b", operation.type))

    def _name(self, value: str) -> str:
        if value not in self._known:
            self._known[value] = self._describe(value)
        return self._known[value]

    def _line(self, line: str) -> str:
        self._lines.append(line)
        return f"v{len(self._lines) - 1}"

    def _describe(self, value: str) -> str:
        if value in self._loop.carried:
            return "carried"
        base = value.split("#")[0]
        inner = self._module.loop_of.get(base)
        if inner is not None:
            return self._line("inner") if self._loop.number == inner.parent else "value"
        operation = self._module.definition.get(base)
        if operation is None:
            return "value"
        if operation.name == "arith.constant":
            return _constant(operation)
        if operation.name in TRANSPARENT:
            return self._name(operation.operands[0])
        if operation.name == "tt.dot":
            return self._dot(operation)
        if FLOAT_MATH.match(operation.name):
            names = ", ".join(self._name(o) for o in operation.operands)
            kind = f" -> {_element(operation.type)}" if re.search(r"ext|trunc", operation.name) else ""
            return self._line(f"{operation.name.split('.')[1]}({names}){kind}")
        return "value"

    def _dot(self, operation: Operation) -> str:
        """A chain of dots is one product over all its columns."""
        columns, current = 0, operation
        while True:
            shape = dot_shape(current)
            columns += shape.k
            start = self._module.definition.get(current.operands[2])
            if start is None or start.name != "tt.dot":
                break
            current = start
        begin = "zero" if _is_zero(start) else self._name(current.operands[2])
        precision = re.search(r"inputPrecision = (\w+)", operation.text)
        kind = shape.element if shape.element != "f32" else f"f32 {precision[1] if precision else 'ieee'}"
        return self._line(f"mma({kind}, {columns}, {begin})")


def _is_zero(operation: Operation | None) -> bool:
    return operation is not None and operation.name == "arith.constant" and bool(re.search(r"dense<0", operation.text))


def _constant(operation: Operation) -> str:
    found = re.search(r"arith\.constant (?:dense<)?([-\w.+]+)", operation.text)
    return found[1] if found else "constant"


def _element(kind: str) -> str:
    found = re.search(r"(?:^|x)(bf16|f\d+|i\d+)\b", kind)
    return found[1] if found else kind


# ---- matrix products ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DotShape:
    m: int
    n: int
    k: int
    element: str  # of the operands
    first_in_registers: bool
    layout: str  # "#mma" of the result

    @property
    def k_steps(self) -> int:
        """Instructions along the columns: an MMA takes 256 bits of them."""
        return max(1, self.k * {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}.get(self.element, 8) // 256)


def dot_shape(operation: Operation) -> DotShape:
    operands, result = operation.text.rsplit(" -> ", 1)
    a, b = (_dimensions(part) for part in operands.rsplit(" : ", 1)[1].split(" * ")[:2])
    layout = re.search(r"(#mma\w*)>", result)
    return DotShape(
        m=a[0],
        n=b[1],
        k=a[1],
        element=re.search(r"x(bf16|f16|f32|f64|i8|f8\w+)\b", operands)[1],
        first_in_registers="memdesc" not in operands.rsplit(" : ", 1)[1].split(" * ")[0],
        layout=layout[1] if layout else "",
    )


def _dimensions(kind: str) -> tuple[int, int]:
    found = re.search(r"<(?:\d+x)*?(\d+)x(\d+)x(?:bf16|f|i)", kind)
    if found is None:
        raise ValueError(f"no matrix type: {kind[:80]}")
    return int(found[1]), int(found[2])


def instructions_per_warp(shape: DotShape, ttgir: str) -> int:
    """MMA instructions that each warp issues for a dot, by the layout of its result."""
    found = re.search(
        rf"^{re.escape(shape.layout)} = #ttg\.nvidia_mma<\{{versionMajor = (\d).*?warpsPerCTA = \[(\d+), (\d+)\].*?"
        r"instrShape = \[(\d+), (\d+)",
        ttgir,
        re.MULTILINE,
    )
    if found is None:
        raise ValueError(f"no MMA layout {shape.layout!r}")
    _, warps_m, warps_n, rows, cols = map(int, found.groups())
    tiles = max(1, math.ceil(shape.m / (rows * warps_m))) * max(1, math.ceil(shape.n / (cols * warps_n)))
    return tiles * shape.k_steps


def warp_widths(ttgir: str) -> set[int]:
    """kWidth of the 16-bit operands of matrix products: 2 where columns stay in their order."""
    return {int(k) for k in re.findall(r"x(?:bf16|f16), #ttg\.dot_op<\{[^}]*kWidth = (\d+)", ttgir)}


def pending_waits(module: Module) -> list[str]:
    """Waits that let products run on while a loop rewrites the registers they read."""
    loops = {
        o.loops[-1]
        for o in module.operations
        if o.name == "ttng.warp_group_dot" and o.loops and dot_shape(o).first_in_registers
    }
    waits = [o for o in module.operations if o.name == "ttng.warp_group_dot_wait" and loops & set(o.loops)]
    found = {(o.location, f[0]) for o in waits if (f := re.search(r"pendings = [1-9]\d*", o.text))}
    return [f"{location}: {pendings}" for location, pendings in sorted(found)]


def narrow_weights(module: Module) -> list[str]:
    """Loads of integer tiles in the main loops that are no asynchronous copies of 16 bytes a thread."""
    return narrow_tiles(module, r"\d+x\d+", r"i\d+", 16)


def narrow_tiles(module: Module, shape: str, element: str, least: int) -> list[str]:
    """Loads of such tiles in the main loops that are no asynchronous copies of `least` bytes a thread."""
    found = []
    for loop in module.main_loops:
        for o in module.within(loop):
            tile = re.search(rf"tensor<(?:{shape})x!tt\.ptr<({element})>", o.text)
            if tile is None or o.name not in ("tt.load", "ttg.async_copy_global_to_local"):
                continue
            run = re.search(r"contiguity = (\d+)", o.text)
            width = (int(run[1]) if run else 1) * int(tile[1].lstrip("bfi")) // 8
            if o.name == "tt.load":
                found.append(f"{o.location}: loaded without an asynchronous copy")
            elif width < least:
                found.append(f"{o.location}: copied by {width} bytes")
    return found


def pending_copies(module: Module) -> int:
    """Groups of asynchronous copies that a wait of the main loops lets run on, the fewest."""
    texts = (o.text for loop in module.main_loops for o in module.within(loop) if o.name == "ttg.async_wait")
    return min((int(re.search(r"num = (\d+)", text)[1]) for text in texts), default=0)


# ---- addresses ---------------------------------------------------------------------------------------


BOUNDED = {"arith.minsi", "arith.minui", "arith.remsi", "arith.remui", "arith.andi"}  # by a constant operand
OFFSET_STEPS = TRANSPARENT | {"arith.addi", "arith.subi", "arith.extsi", "arith.extui"}


def narrow_products(ttir: str) -> list[str]:
    """Where an element's offset is a 32-bit product of two values known only at run time.

    A product with a constant or a tile-sized range is the tile's business, one of two arguments the launcher's; a
    program's number, a loop's counter or a loaded value times a size can pass 2^31 on large weights or arenas and
    belongs in 64 bits. Widening the product afterwards does not help. What is divided or multiplied once more in 32
    bits is an index, not an offset.
    """
    module = Module(ttir)
    return sorted(
        _product(o)
        for o in _offset_products(module)
        if all(_at_run_time(module, value) for value in o.operands) and _varies(module, o.result)
    )


def loaded_products(ttir: str) -> list[str]:
    """Where an element's offset is a 32-bit product, of a constant too, of a value that was loaded and is not bounded
    by a constant: a page's id passes 2^31 bytes, its slot does not."""
    module = Module(ttir)
    return sorted(_product(o) for o in _offset_products(module) if any(_loaded(module, v) for v in o.operands))


def _product(operation: Operation) -> str:
    return f"{operation.location}: {operation.result} = {' * '.join(operation.operands)} in 32 bits"


def _offset_products(module: Module) -> Iterator[Operation]:
    """The 32-bit products that elements' offsets are sums of."""
    todo = [o.operands[1] for o in module.operations if o.name == "tt.addptr"]
    reached: set[str] = set()
    while todo:
        value = todo.pop()
        if value in reached:
            continue
        reached.add(value)
        todo.extend(loop.carried[value] for loop in module.loops if value in loop.carried)
        operation = module.definition.get(value.split("#")[0])
        if operation is None:
            continue
        if operation.name == "arith.muli" and _element(operation.type) == "i32":
            yield operation
        elif operation.name in OFFSET_STEPS or operation.name == "arith.muli":
            todo.extend(operation.operands)


def _at_run_time(module: Module, value: str, inside: frozenset[str] = frozenset()) -> bool:
    """Whether a value depends on more than constants and ranges, and is not bounded by one.

    inside: what depends on it.
    """
    operation = module.definition.get(value.split("#")[0])
    if operation is None or value in inside:
        return True  # an argument, a loop's counter or what it carries
    if operation.name in ("arith.constant", "tt.make_range"):
        return False
    every = operation.name in BOUNDED
    known = [_at_run_time(module, o, inside | {value}) for o in operation.operands]
    return not known or (all(known) if every else any(known))


def _loaded(module: Module, value: str) -> bool:
    """Whether a value comes from memory and is not bounded by a constant."""
    operation = module.definition.get(value.split("#")[0])
    if operation is None or operation.name == "tt.load":
        return operation is not None
    values = operation.operands[operation.name == "arith.select" :]
    known = [_loaded(module, o) for o in values]
    return all(known) if operation.name in BOUNDED else any(known)


def _varies(module: Module, value: str, inside: frozenset[str] = frozenset()) -> bool:
    """Whether a value differs among programs or iterations; inside: what depends on it."""
    operation = module.definition.get(value.split("#")[0])
    if value in inside:
        return False
    if operation is None:
        return any(value == loop.induction or value in loop.carried for loop in module.loops)
    if operation.name in ("tt.get_program_id", "tt.load"):
        return True
    return value.split("#")[0] in module.loop_of or any(
        _varies(module, o, inside | {value}) for o in operation.operands
    )
