"""Inside a kernel: T64 tiles -> MMA operands -> the sum of one segment -> rows of y.

Promise: a weight is RN(dequantize(q)) in the compute dtype, or the exact integer code - zero where the form has
one float32 scale a block; in both twins, inline assembly (ARCH = 80, 90, ...) and plain Triton (ARCH = 0, which
the interpreter runs). A segment is summed block by block: each block of 128 columns is a fresh sum in ascending
order, added to the accumulator by one fma with the block's scale. Nothing here depends on how many rows of x
there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from csrc_triton.launch import constexpr_function, jit, tl


class Weight(NamedTuple):
    """What a kernel is given of a weight: the parts that t64.py describes, or a dense row-major matrix."""

    codes: Any  # the matrix itself where it is dense
    high: Any
    scale: Any
    extra: Any
    num_rows: Any  # N
    num_tiles: Any  # T
    num_blocks: Any  # B
    stride: Any  # elements between two rows of a dense matrix


# ---- codes -> exact numbers --------------------------------------------------------------------------
# A few bits under the exponent of 128 (bfloat16, 7 bits of mantissa) or 1024 (float16, 10 bits) are the number
# 128 or 1024 plus those bits; one subtraction gives the signed integer, exactly.


@constexpr_function
def _minus(dtype, arch):
    """PTX of d = a - b on pairs; bfloat16 has none before sm_90 (n holds -1)."""
    if dtype.name == "fp16":
        return "sub.rn.f16x2 {d}, {a}, {b};"
    return "sub.rn.bf16x2 {d}, {a}, {b};" if arch >= 90 else "fma.rn.bf16x2 {d}, {b}, n, {a};"


@constexpr_function
def _magic(dtype, value):
    """The 32-bit literal of two equal numbers: value under the exponent."""
    return f"0x{((0x6400 if dtype.name == 'fp16' else 0x4300) + value) * 0x10001:08x}"


@constexpr_function
def _nibble_asm(dtype, arch, offset, high):
    """Two int16 of nibbles ($4) -> four pairs of code - offset ($0 to $3).

    high: None, or the lowest of the 8 bits of $5 that are the codes' bits 4 and 5.
    """
    lines = [
        "{ .reg .b32 t, m, h, c, n; mov.b32 m, 0x000f000f; mov.b32 h, 0x00300030; mov.b32 n, 0xbf80bf80;",
        f"mov.b32 c, {_magic(dtype, offset)};",
    ]
    for j in range(4):
        if j:
            lines.append(f"shr.u32 t, $4, {4 * j};")
        lines.append(f"lop3.b32 ${j}, {'t' if j else '$4'}, m, {_magic(dtype, 0)}, 0xea;")  # (a & b) | c
        if high is not None:
            shift = high + 2 * j - 4
            lines.append(f"{'shr.u32' if shift > 0 else 'shl.b32'} t, $5, {abs(shift)};")
            lines.append(f"lop3.b32 ${j}, t, h, ${j}, 0xea;")
        lines.append(_minus(dtype, arch).format(d=f"${j}", a=f"${j}", b="c"))
    return " ".join(lines) + " }"


@constexpr_function
def _byte_asm(dtype, arch):
    """Two int16 of signed bytes ($2) -> a pair from the low bytes ($0), a pair from the high ones ($1)."""
    minus = _minus(dtype, arch)
    if dtype.name == "fp16":  # code ^ 128 is code + 128
        return (
            "{ .reg .b32 t, m, c, n; xor.b32 t, $2, 0x80808080; mov.b32 m, 0x00ff00ff; mov.b32 c, 0x64806480; "
            "lop3.b32 $0, t, m, 0x64006400, 0xea; shr.u32 t, t, 8; lop3.b32 $1, t, m, 0x64006400, 0xea; "
            f"{minus.format(d='$0', a='$0', b='c')} {minus.format(d='$1', a='$1', b='c')} }}"
        )
    # 128 plus the low 7 bits, less 128 plus the sign's 128
    lines = ["{ .reg .b32 t, a, b, m, s, n; mov.b32 m, 0x007f007f; mov.b32 s, 0x00800080; mov.b32 n, 0xbf80bf80;"]
    for i, source in enumerate(("$2", "t")):
        if i:
            lines.append("shr.u32 t, $2, 8;")
        lines.append(f"lop3.b32 a, {source}, m, 0x43004300, 0xea; lop3.b32 b, {source}, s, 0x43004300, 0xea;")
        lines.append(minus.format(d=f"${i}", a="a", b="b"))
    return " ".join(lines) + " }"


@constexpr_function
def _times(dtype, count):
    return (dtype,) * count


@jit
def byte_planes(codes, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """int16 of two int8 -> the low ones and the high ones, exact in DTYPE (bf16 or fp16)."""
    if ARCH > 0:
        ASM: tl.constexpr = _byte_asm(DTYPE, ARCH)
        return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [codes], _times(DTYPE, 2), True, 2)
    else:
        u = codes.to(tl.int32)
        return (((u & 255) ^ 128) - 128).to(tl.float32).to(DTYPE), (u >> 8).to(tl.float32).to(DTYPE)


@constexpr_function
def _fp8_asm(dtype, arch):
    """Two int16 of e4m3 bytes ($2) -> a pair from the low bytes ($0), a pair from the high ones ($1).

    Exponent and mantissa move to where dtype has the lowest bits of its own; a power of two makes up for the bias.
    """
    if dtype.name == "fp16":
        shift, mask, power, times = 7, "0x3f803f80", "0x5c005c00", "mul.rn.f16x2 {d}, {d}, c;"  # 2 ** 8
    else:
        shift, mask, power, times = 4, "0x07f007f0", "0x7b807b80", "mul.rn.bf16x2 {d}, {d}, c;"  # 2 ** 120
    if dtype.name == "bf16" and arch < 90:
        times = "fma.rn.bf16x2 {d}, {d}, c, z;"
    return (
        f"{{ .reg .b32 t, m, s, c, z; mov.b32 m, {mask}; mov.b32 s, 0x80008000; mov.b32 c, {power}; "
        f"mov.b32 z, 0x80008000; shl.b32 $0, $2, {shift}; and.b32 $0, $0, m; shl.b32 t, $2, 8; "
        f"lop3.b32 $0, t, s, $0, 0xea; {times.format(d='$0')} "
        f"shr.u32 $1, $2, {8 - shift}; and.b32 $1, $1, m; lop3.b32 $1, $2, s, $1, 0xea; {times.format(d='$1')} }}"
    )


@jit
def fp8_planes(codes, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """int16 of two float8 e4m3 -> the low ones and the high ones, exact in DTYPE (bf16 or fp16). NaN becomes 480."""
    if ARCH > 0:
        ASM: tl.constexpr = _fp8_asm(DTYPE, ARCH)
        return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [codes], _times(DTYPE, 2), True, 2)
    else:
        low = codes.to(tl.int8).to(tl.float8e4nv, bitcast=True)
        high = (codes >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE)


@jit
def _nibble_planes(codes, high, HIGH: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """HIGH: see `_nibble_asm`."""
    if ARCH > 0 and HIGH is None:
        ASM4: tl.constexpr = _nibble_asm(DTYPE, ARCH, FORM.offset, None)
        return tl.inline_asm_elementwise(ASM4, "=&r,=&r,=&r,=&r,r", [codes], _times(DTYPE, 4), True, 2)
    elif ARCH > 0:
        ASM6: tl.constexpr = _nibble_asm(DTYPE, ARCH, FORM.offset, HIGH)
        return tl.inline_asm_elementwise(ASM6, "=&r,=&r,=&r,=&r,r,r", [codes, high], _times(DTYPE, 4), True, 2)
    else:
        u = codes.to(tl.int32)
        p0, p1, p2, p3 = u & 15, (u >> 4) & 15, (u >> 8) & 15, (u >> 12) & 15
        if HIGH is not None:
            h = high.to(tl.int32) >> HIGH
            p0, p1, p2, p3 = p0 | ((h & 3) << 4), p1 | ((h & 12) << 2), p2 | (h & 48), p3 | ((h & 192) >> 2)
        return (
            (p0 - FORM.offset).to(tl.float32).to(DTYPE),
            (p1 - FORM.offset).to(tl.float32).to(DTYPE),
            (p2 - FORM.offset).to(tl.float32).to(DTYPE),
            (p3 - FORM.offset).to(tl.float32).to(DTYPE),
        )


@jit
def int_planes(codes, FORM: tl.constexpr, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """The parts of a block's codes, int16 (4 bits: one; 6 bits: two and the high bits; 8 bits: two) -> planes.

    Plane j holds code - offset of columns [32 j, 32 j + 32), with 6 bits [16 j, 16 j + 16), exact in DTYPE
    (bf16 or fp16).
    """
    if FORM.bits == 4:
        return _nibble_planes(codes[0], codes[0], None, FORM, DTYPE, ARCH)
    elif FORM.bits == 6:
        a = _nibble_planes(codes[0], codes[2], 0, FORM, DTYPE, ARCH)
        b = _nibble_planes(codes[1], codes[2], 8, FORM, DTYPE, ARCH)
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]
    else:
        a = byte_planes(codes[0], DTYPE, ARCH)
        b = byte_planes(codes[1], DTYPE, ARCH)
        return a[0], a[1], b[0], b[1]


# ---- scales ------------------------------------------------------------------------------------------


@jit
def _half(word, J: tl.constexpr):
    """float16 J (0 low, 1 high) of int32 words."""
    return (word >> (16 * J)).to(tl.int16).to(tl.float16, bitcast=True)


@jit
def _halves(words):
    """The float16 of two int32, as float32."""
    w0, w1 = words
    return (
        _half(w0, 0).to(tl.float32),
        _half(w0, 1).to(tl.float32),
        _half(w1, 0).to(tl.float32),
        _half(w1, 1).to(tl.float32),
    )


@jit
def _times_half(plane, d, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """RN(plane * d): plane [n, c] integers of at most 6 bits in DTYPE, d [n] float16."""
    if DTYPE == tl.float16:
        return plane * d[:, None]
    elif DTYPE == tl.bfloat16 and ARCH > 0:
        # d = hi + lo exactly and plane * lo is exact, so the fma rounds once
        wide = d.to(tl.float32)
        hi = wide.to(tl.bfloat16)
        lo = (wide - hi.to(tl.float32)).to(tl.bfloat16)
        return tl.fma(plane, tl.broadcast_to(hi[:, None], plane.shape), plane * lo[:, None])
    else:
        return (plane.to(tl.float32) * d.to(tl.float32)[:, None]).to(DTYPE)


@jit
def _all_times_half(p, s, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    if len(p) == 4:
        return (
            _times_half(p[0], s[0], DTYPE, ARCH),
            _times_half(p[1], s[1], DTYPE, ARCH),
            _times_half(p[2], s[2], DTYPE, ARCH),
            _times_half(p[3], s[3], DTYPE, ARCH),
        )
    else:
        return (
            _times_half(p[0], s[0], DTYPE, ARCH),
            _times_half(p[1], s[0], DTYPE, ARCH),
            _times_half(p[2], s[1], DTYPE, ARCH),
            _times_half(p[3], s[1], DTYPE, ARCH),
            _times_half(p[4], s[2], DTYPE, ARCH),
            _times_half(p[5], s[2], DTYPE, ARCH),
            _times_half(p[6], s[3], DTYPE, ARCH),
            _times_half(p[7], s[3], DTYPE, ARCH),
        )


@constexpr_function
def _byte_select(j):
    """Byte j of the first operand under the exponent of 2 ** 23."""
    return f"prmt.b32 $0, $1, 0x4b000000, 0x744{j};"


@jit
def _byte(word, J: tl.constexpr, ARCH: tl.constexpr):
    """Byte J of int32 words, 0 to 255, plus 2 ** 23, as float32."""
    if ARCH > 0:
        ASM: tl.constexpr = _byte_select(J)
        return tl.inline_asm_elementwise(ASM, "=r,r", [word], tl.float32, True, 1)
    else:
        return (((word >> (8 * J)) & 255) | 0x4B000000).to(tl.float32, bitcast=True)


@jit
def _times_bytes(d, word, SIGNED: tl.constexpr, ARCH: tl.constexpr):
    """d [n] times each byte of word [n]; exact, d being a float16."""
    LESS: tl.constexpr = 8388736.0 if SIGNED else 8388608.0
    if SIGNED:
        word = word ^ -2139062144  # 0x80808080: the bytes plus 128
    return (
        d * (_byte(word, 0, ARCH) - LESS),
        d * (_byte(word, 1, ARCH) - LESS),
        d * (_byte(word, 2, ARCH) - LESS),
        d * (_byte(word, 3, ARCH) - LESS),
    )


@jit
def _scaled(plane, scale, bias, EXACT: tl.constexpr, DTYPE: tl.constexpr):
    """RN(RN32(RN32(plane * scale) + bias)); EXACT: plane * scale is a float32, so one fma does both steps."""
    w = plane.to(tl.float32)
    s = tl.broadcast_to(scale[:, None], w.shape)
    if bias is None:
        w = w * s
    elif EXACT:
        w = tl.fma(w, s, tl.broadcast_to(bias[:, None], w.shape))
    else:
        w = w * s + tl.broadcast_to(bias[:, None], w.shape)
    return w.to(DTYPE)


@jit
def _four_scaled(p, s, b, AT: tl.constexpr, EACH: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr):
    """Planes AT to AT + 3, of which EACH share a scale."""
    if b is None:
        return (
            _scaled(p[AT], s[AT // EACH], None, EXACT, DTYPE),
            _scaled(p[AT + 1], s[(AT + 1) // EACH], None, EXACT, DTYPE),
            _scaled(p[AT + 2], s[(AT + 2) // EACH], None, EXACT, DTYPE),
            _scaled(p[AT + 3], s[(AT + 3) // EACH], None, EXACT, DTYPE),
        )
    else:
        return (
            _scaled(p[AT], s[AT // EACH], b[AT // EACH], EXACT, DTYPE),
            _scaled(p[AT + 1], s[(AT + 1) // EACH], b[(AT + 1) // EACH], EXACT, DTYPE),
            _scaled(p[AT + 2], s[(AT + 2) // EACH], b[(AT + 2) // EACH], EXACT, DTYPE),
            _scaled(p[AT + 3], s[(AT + 3) // EACH], b[(AT + 3) // EACH], EXACT, DTYPE),
        )


@jit
def _all_scaled(planes, scales, biases, EXACT: tl.constexpr, DTYPE: tl.constexpr):
    EACH: tl.constexpr = len(planes) // len(scales)
    a = _four_scaled(planes, scales, biases, 0, EACH, EXACT, DTYPE)
    if len(planes) == 4:
        return a
    else:
        b = _four_scaled(planes, scales, biases, 4, EACH, EXACT, DTYPE)
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@jit
def _load_groups(ptrs, GROUPS: tl.constexpr):
    """GROUPS vectors, 64 elements apart."""
    if GROUPS == 1:
        return (tl.load(ptrs),)
    elif GROUPS == 2:
        return tl.load(ptrs), tl.load(ptrs + 64)
    else:
        return tl.load(ptrs), tl.load(ptrs + 64), tl.load(ptrs + 128), tl.load(ptrs + 192)


# ---- a block -----------------------------------------------------------------------------------------


class Cursor(NamedTuple):
    """A weight at one row tile: pointers to its first block, and what a program's rows read of a block."""

    codes: Any
    high: Any
    scale: Any
    extra: Any
    code_at: Any  # [COLS, 32], or [COLS, 128] of a dense weight
    high_at: Any  # [COLS, 16]
    scale_at: Any  # [COLS]
    extra_at: Any  # [COLS]
    alive: Any  # [COLS], whether a dense weight has the row


@jit
def cursor_at(w, tile, FORM: tl.constexpr, COLS: tl.constexpr):
    """tile: int64. Rows past the last tile read it once more; nobody stores what comes of it."""
    row = tl.arange(0, COLS)
    rt, ri = tl.minimum(row // 64, w.num_tiles - 1 - tile.to(tl.int32)), row % 64
    if FORM.bits == 0:
        codes = w.codes + tile * 64 * w.stride
        code_at = (row * w.stride)[:, None] + tl.arange(0, 128)[None, :]
        alive = row < w.num_rows - tile.to(tl.int32) * 64
        scale, scale_at = codes, row
        if FORM.scales == "block":
            scale_tile = 64 * (w.num_blocks if FORM.groups else 1)
            scale, scale_at = w.scale + tile * scale_tile, rt * scale_tile + ri
        return Cursor(codes, codes, scale, scale, code_at, code_at, scale_at, scale_at, alive)
    else:
        WIDTH: tl.constexpr = 16 if FORM.bits == 6 else 32
        TILE: tl.constexpr = 64 * (64 if FORM.bits == 8 else 32)
        code_tile = w.num_blocks * TILE
        code_at = (rt * code_tile + ri * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
        codes = w.codes + tile * code_tile
        high, high_at = codes, code_at
        if FORM.bits == 6:
            high = w.high + tile * (code_tile // 2)
            high_at = (rt * (code_tile // 2) + ri * 16)[:, None] + tl.arange(0, 16)[None, :]
        if FORM.scales == "block" or FORM.scales == "zero":
            scale_tile = 64 * (w.num_blocks if FORM.groups else 1)
            extra_tile = scale_tile
        elif FORM.scales == "float":
            scale_tile = w.num_blocks * (64 * FORM.groups)
            extra_tile = scale_tile
        elif FORM.scales == "half":
            scale_tile = w.num_blocks * 128
            extra_tile = scale_tile
        else:
            scale_tile = w.num_blocks * 128
            extra_tile = (w.num_blocks + 1) // 2 * 64
        scale = w.scale + tile * scale_tile
        extra = scale
        if FORM.extra:
            extra = w.extra + tile * extra_tile
        return Cursor(
            codes,
            high,
            scale,
            extra,
            code_at,
            high_at,
            rt * scale_tile + ri,
            rt * extra_tile + ri,
            row < 64,
        )


@jit
def _load_codes(at, kb, FORM: tl.constexpr):
    """The parts of block kb that `int_planes` takes."""
    if FORM.bits == 4:
        return (tl.load(at.codes + kb * (64 * 32) + at.code_at, eviction_policy="evict_first"),)
    else:
        HALF: tl.constexpr = 64 * (16 if FORM.bits == 6 else 32)
        a = tl.load(at.codes + kb * (2 * HALF) + at.code_at, eviction_policy="evict_first")
        b = tl.load(at.codes + kb * (2 * HALF) + HALF + at.code_at, eviction_policy="evict_first")
        if FORM.bits == 6:
            return a, b, tl.load(at.high + kb * (64 * 16) + at.high_at, eviction_policy="evict_first")
        else:
            return a, b


@jit
def load_planes(
    at, kb, k_left, word, FORM: tl.constexpr, DTYPE: tl.constexpr, EVEN_K: tl.constexpr, ARCH: tl.constexpr
):
    """Block kb's weights by planes in DTYPE (a dense one is one plane).

    Of forms "block" and "zero" the integers, without their scale; word [COLS] is the latter's scale and zero point.
    """
    if FORM.bits == 0:
        mask = at.alive[:, None]
        if not EVEN_K:
            mask = mask & (tl.arange(0, 128) < k_left)[None, :]
        return (tl.load(at.codes + kb * 128 + at.code_at, mask=mask, other=0.0),)
    else:
        INTS: tl.constexpr = tl.bfloat16 if DTYPE == tl.float32 else DTYPE
        planes = int_planes(_load_codes(at, kb, FORM), FORM, INTS, ARCH)
        if FORM.scales == "block" or FORM.scales == "zero":
            return _integers(planes, word, FORM, DTYPE)
        elif FORM.scales == "float":
            scales = _load_groups(at.scale + kb * (64 * FORM.groups) + at.scale_at, FORM.groups)
            biases = None
            if FORM.extra:
                biases = _load_groups(at.extra + kb * (64 * FORM.groups) + at.extra_at, FORM.groups)
            return _all_scaled(planes, scales, biases, False, DTYPE)
        elif FORM.scales == "half":
            words = _load_groups(at.scale + kb * 128 + at.scale_at, 2)
            if FORM.extra:
                biases = _halves(_load_groups(at.extra + kb * 128 + at.extra_at, 2))
                return _all_scaled(planes, _halves(words), biases, True, DTYPE)
            elif FORM.bits == 8 or DTYPE == tl.float32:  # of 8 bits, code * scale's low part would not be exact
                return _all_scaled(planes, _halves(words), None, True, DTYPE)
            else:
                s = (_half(words[0], 0), _half(words[0], 1), _half(words[1], 0), _half(words[1], 1))
                return _all_times_half(planes, s, DTYPE, ARCH)
        else:
            words = _load_groups(at.scale + kb * 128 + at.scale_at, 2)
            supers = tl.load(at.extra + kb // 2 * 64 + at.extra_at)
            d = _half(supers, 0).to(tl.float32)
            if FORM.scales == "k":  # d * scale * code - dmin * min
                biases = _times_bytes(-_half(supers, 1).to(tl.float32), words[1], False, ARCH)
                return _all_scaled(planes, _times_bytes(d, words[0], False, ARCH), biases, True, DTYPE)
            else:
                a, b = _times_bytes(d, words[0], True, ARCH), _times_bytes(d, words[1], True, ARCH)
                return _all_scaled(planes, (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]), None, True, DTYPE)


@jit
def _integers(planes, word, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Minus an integer zero point, the high half of word, where the form has one; exact."""
    if FORM.scales == "zero":
        zero = (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True).to(planes[0].dtype)[:, None]
        planes = planes[0] - zero, planes[1] - zero, planes[2] - zero, planes[3] - zero
    if DTYPE == tl.float32:
        planes = planes[0].to(DTYPE), planes[1].to(DTYPE), planes[2].to(DTYPE), planes[3].to(DTYPE)
    return planes


@jit
def _joined(p):
    """Planes -> [n, 128], columns in order."""
    n: tl.constexpr = p[0].shape[0]
    if len(p) == 1:
        return p[0]
    elif len(p) == 4:
        pairs = tl.join(tl.join(p[0], p[2]), tl.join(p[1], p[3]))  # [n, 32, j >> 1, j & 1]
        return pairs.permute(0, 2, 3, 1).reshape(n, 128)
    else:
        even = tl.join(tl.join(p[0], p[4]), tl.join(p[2], p[6]))
        odd = tl.join(tl.join(p[1], p[5]), tl.join(p[3], p[7]))
        return tl.join(even, odd).permute(0, 2, 3, 4, 1).reshape(n, 128)


@jit
def _load_x(x_ptr, x_stride, alive, k_left, START: tl.constexpr, WIDTH: tl.constexpr, EVEN_K: tl.constexpr):
    """Columns [START, START + WIDTH) of a block of activations, transposed: [WIDTH, ROWS]."""
    k = START + tl.arange(0, WIDTH)
    at = (tl.arange(0, alive.shape[0]) * x_stride)[None, :] + k[:, None]
    if EVEN_K:
        return tl.load(x_ptr + at, mask=alive[None, :], other=0.0)
    else:
        return tl.load(x_ptr + at, mask=alive[None, :] & (k < k_left)[:, None], other=0.0)


@jit
def _block_product(planes, x_ptr, x_stride, alive, k_left, EVEN_K: tl.constexpr, JOIN: tl.constexpr):
    """The sum over the block's 128 columns, ascending, from zero: [COLS, ROWS] float32."""
    if JOIN or len(planes) == 1:
        x = _load_x(x_ptr, x_stride, alive, k_left, 0, 128, EVEN_K)
        return tl.dot(_joined(planes), x, input_precision="ieee")
    else:
        WIDTH: tl.constexpr = planes[0].shape[1]
        p = tl.dot(planes[0], _load_x(x_ptr, x_stride, alive, k_left, 0, WIDTH, EVEN_K), input_precision="ieee")
        for j in tl.static_range(1, 128 // WIDTH):
            x = _load_x(x_ptr, x_stride, alive, k_left, j * WIDTH, WIDTH, EVEN_K)
            p = tl.dot(planes[j], x, p, input_precision="ieee")
        return p


@jit
def load_word(at, kb, FORM: tl.constexpr):
    """Block kb's scales [COLS] of forms "block" and "zero", as stored; of others whatever."""
    if FORM.scales == "block" or FORM.scales == "zero":
        return tl.load(at.scale + (kb * 64 if FORM.groups else 0) + at.scale_at)
    else:
        return at.scale_at


@jit
def scale_of(word, FORM: tl.constexpr, COLS: tl.constexpr):
    """The factor of a block's sum [COLS], float32."""
    if FORM.scales == "block":
        return word
    elif FORM.scales == "zero":
        return _half(word, 0).to(tl.float32)
    else:
        return tl.full((COLS,), 1.0, tl.float32)


# ---- a segment ---------------------------------------------------------------------------------------


@jit
def segment_sum(
    x_ptr,  # the program's first row
    x_stride,
    alive,  # [ROWS], which rows there are
    k,  # K
    at,  # Cursor
    first,  # blocks [first, last)
    last,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN_K: tl.constexpr,
    JOIN: tl.constexpr,
    ARCH: tl.constexpr,
):
    """W . x^T over a segment: [COLS, ROWS] float32."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((COLS, ROWS), tl.float32)
    word = load_word(at, first, FORM)
    scale = scale_of(word, FORM, COLS)
    for kb in range(first, last):
        # a block's scale is first needed after its sum: fetched one block ahead, it never keeps that waiting
        following = scale
        if FORM.groups and (FORM.scales == "block" or FORM.scales == "zero"):
            following = scale_of(load_word(at, tl.minimum(kb + 1, last - 1), FORM), FORM, COLS)
            if FORM.scales == "zero":
                word = load_word(at, kb, FORM)
        planes = load_planes(at, kb, k - kb * 128, word, FORM, DTYPE, EVEN_K, ARCH)
        p = _block_product(planes, x_ptr + kb * 128, x_stride, alive, k - kb * 128, EVEN_K, JOIN)
        acc = tl.fma(p, tl.broadcast_to(scale[:, None], (COLS, ROWS)), acc)
        scale = following
    return acc


@jit
def segment_range(s, num_blocks, num_segments):
    """Blocks [first, last) of segment s."""
    return s * num_blocks // num_segments, (s + 1) * num_blocks // num_segments


# ---- the end of a tile ---------------------------------------------------------------------------------


@jit
def finish(total, bias_ptr, residual_ptr, n, at, mask):
    """total + bias[n] + residual[at], each sum rounded to float32; either pointer may be None."""
    if bias_ptr is not None:
        total = total + tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total = total + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total


@jit
def store_tile(
    total,  # [COLS, ROWS] float32
    y_ptr,  # [M, N]
    bias_ptr,  # [N] or None
    residual_ptr,  # [M, N] or None
    residual_stride,
    tile,
    first_row,
    alive,
    N,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Finish a tile and store it, transposed back to rows."""
    n, m = tl.arange(0, COLS), tl.arange(0, ROWS)
    left = N - tile.to(tl.int32) * 64
    mask = (n < left)[:, None] & alive[None, :]
    columns = tl.broadcast_to(n[:, None], (COLS, ROWS))
    if bias_ptr is not None:
        bias_ptr += tile * 64
    if residual_ptr is not None:
        residual_ptr += first_row * residual_stride + tile * 64
    y = finish(total, bias_ptr, residual_ptr, columns, (m * residual_stride)[None, :] + n[:, None], mask)
    out = y_ptr + first_row * N + tile * 64 + ((m * N)[None, :] + n[:, None])
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)
