"""PTX to C++: one entry becomes the function `step` of ptx.h. What this file does not know is an error, never a guess.

A thread is a state machine. Its registers are members of a struct; where it waits for other threads, `step` returns,
and the next call goes on there.
"""

import functools
import re
import zlib
from dataclasses import dataclass, field

TYPES = {
    "INT": "[us](?:16|32|64)",
    "INT8": "[us](?:8|16|32|64)",
    "BITS": "[b](?:16|32|64)",
    "FLOAT": "f32|f64",
    "HALF": "f16|bf16",
    "ANY": "[bus](?:16|32|64)|f16|bf16|f32|f64",
}
# Instruction -> its value in C++. {...} are alternatives, <...> is a type; a, b, c, d are the operands, of the last
# type unless another one follows the name; D is the type of the result, the first. For pairs of halves (x2) the rules
# of one half count.
VALUES = """
add.<INT|FLOAT>                           a + b
sub.<INT|FLOAT>                           a - b
mul.<FLOAT>                               a * b
mul.lo.<INT>                              a * b
mul.wide.<[us]16|[us]32>                  WIDE(a) * WIDE(b)
mul.hi.<[us]32>                           D(WIDE(a) * WIDE(b) >> 32)
mad.lo.<INT>                              a * b + c
mad.wide.<[us]16|[us]32>                  WIDE(a) * WIDE(b) + c.WIDE
div.<INT>                                 quotient(a, b)
rem.<INT>                                 a - quotient(a, b) * b
min.<INT|FLOAT>                           minimum(a, b)
max.<INT|FLOAT>                           maximum(a, b)
neg.<s32|s64|FLOAT>                       -a
abs.<FLOAT|HALF>                          std::fabs(a)
copysign.<FLOAT>                          std::copysign(b, a)
fma.rn.<FLOAT>                            std::fma(a, b, c)
fma.rn.<HALF>                             fma_to_odd(a, b, c)
div.{rn,full,approx}.<FLOAT>              a / b
rcp.{rn,approx}.<FLOAT>                   1 / a
rcp.approx.ftz.<f32>                      flushed(1 / flushed(a))
sqrt.{rn,approx}.<FLOAT>                  std::sqrt(a)
sqrt.approx.ftz.<f32>                     std::sqrt(flushed(a))
rsqrt.approx.<FLOAT>                      1 / std::sqrt(f64{a})
rsqrt.approx.ftz.<f32>                    1 / std::sqrt(f64{flushed(a)})
and.<BITS|pred>                           a & b
or.<BITS|pred>                            a | b
xor.<BITS|pred>                           a ^ b
not.<BITS|pred>                           inverted(a)
shl.<BITS>                                shifted_left(a, b.u32)
shr.<BITS|INT>                            shifted_right(a, b.u32)
popc.<b32|b64>                            std::popcount(a)
bfe.<u32|s32>                             bit_field(a, b.u32 & 0xff, c.u32 & 0xff)
bfi.<b32|b64>                             insert_bits(a, b, c.u32 & 0xff, d.u32 & 0xff)
lop3.<b32>                                lop3(a, b, c, d)
prmt.<b32>                                prmt(a, b, c)
selp.<ANY>                                c.bool ? a.RAW : b.RAW
setp.eq.<ANY>                             a == b
setp.ne.<BITS|INT>                        a != b
setp.ne.<HALF|FLOAT>                      a < b || a > b
setp.lt.<INT|HALF|FLOAT>                  a < b
setp.le.<INT|HALF|FLOAT>                  a <= b
setp.gt.<INT|HALF|FLOAT>                  a > b
setp.ge.<INT|HALF|FLOAT>                  a >= b
setp.equ.<HALF|FLOAT>                     !(a < b || a > b)
setp.neu.<HALF|FLOAT>                     !(a == b)
setp.ltu.<HALF|FLOAT>                     !(a >= b)
setp.leu.<HALF|FLOAT>                     !(a > b)
setp.gtu.<HALF|FLOAT>                     !(a <= b)
setp.geu.<HALF|FLOAT>                     !(a < b)
setp.num.<HALF|FLOAT>                     a == a && b == b
setp.nan.<HALF|FLOAT>                     a != a || b != b
cvt.<INT8>.<INT8>                         D(a)
cvt.rn.<FLOAT>.<INT8>                     D(a)
cvt.rzi.<INT>.<FLOAT>                     to_integer<D>(a)
cvt.<FLOAT>.<HALF|f32>                    rounded<D>(a)
cvt.rn.<HALF|f32>.<FLOAT>                 rounded<D>(a)
cvt.rp.<f32>.<f64>                        rounded_up(a)
cvt.sat.<f32>.<f32>                       a > 0 ? std::fmin(a, 1.0f) : 0.0f
cvt.rn.<HALF>x2.<f32>                     pair(rounded<D>(b), rounded<D>(a))
cvta.to.global.<u64>                      a
mapa.shared::cluster.<u32>                a % kWindow + (b + 1) * kWindow
"""
# The same for statements. With !, the thread waits, and goes on after it.
STATEMENTS = """
ret                                             t.state = kEnded; return;
cp.async.commit_group                           ++t.group;
cp.async.wait_group                             finish_copies(t, a.u32);
cp.async.wait_all                               ++t.group; finish_copies(t, 0);
barrier.cluster.arrive{,.relaxed,.release}       arrive_at_cluster(t);
barrier.cluster.wait{,.acquire}                  t.state = kAtCluster; !
bar.sync                                        wait_for_block(t, a.u32, b.u32); !
bar.warp.sync                                   wait_for_warp(t, KEY, a.u32, {}); !
"""
# Value that a lane gets of a warp instruction: its operand `a` was brought, the last operand is the mask.
LANES = """
shfl.sync.idx.b32       shuffled(t, (t.lane & c.u32 >> 8 & 31) | (b.u32 & 31 & ~(c.u32 >> 8)), c.u32, exists)
shfl.sync.bfly.b32      shuffled(t, t.lane ^ (b.u32 & 31), c.u32, exists)
vote.sync.ballot.b32    over_lanes(t, 0u, [](u32 all, bool own, u32 lane) { return all | u32{own} << lane; })
redux.sync.max.u32      over_lanes(t, 0u, [](u32 x, u32 y, u32) { return std::max(x, y); })
redux.sync.max.s32      over_lanes(t, INT32_MIN, [](s32 x, s32 y, u32) { return std::max(x, y); })
"""
SPECIAL = {f"%{name}.{axis}": f"t.{value}[{i}]" for i, axis in enumerate("xyz") for name, value in (
    ("tid", "tid"), ("ctaid", "block->index"), ("ntid", "block->cluster->launch->block"),
    ("nctaid", "block->cluster->launch->grid"))}  # fmt: skip
SPECIAL |= {"%laneid": "t.lane", "%cluster_ctarank": "t.block->rank"}
SPACES = {
    "global": "kGlobal",
    "shared": "kShared",
    "shared::cluster": "kCluster",
    "param": "kParameter",
    None: "kGeneric",
}
SKIPPED = r"(?P<skip>\.(?:loc|file)[^\n]*|\.pragma[^;]*;)"
STATEMENT = re.compile(rf"\s*(?:{SKIPPED}|(?P<brace>[{{}}])|(?P<label>[$\w]+):|(?P<text>[^;]*);)")
OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+?)\s*(?:,|$)")
SHARED = r"(\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\];"
PARAMETER = r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([busf]\d+)(?:\s+\.ptr[\s.\w]*?\.align\s+\d+)?\s+(\w+)(?:\[(\d+)\])?"


STEP = """#include "ptx.h"
struct Registers : Lane {{ {members} }};
extern "C" const u64 lane_bytes = (sizeof(Registers) + 7) / 8 * 8;
extern "C" void step(Lane& lane) {{
auto& t = static_cast<Registers&>(lane);
switch (t.pc) {{ case 0:;
{body}
}}
t.state = kEnded;
}}
"""


def rules(table: str) -> list[tuple[re.Pattern, str]]:
    """Lines of (pattern of an instruction, text); the groups of a pattern are its types."""

    def of_types(match: re.Match) -> str:
        return "(" + re.sub(r"[A-Z]+8?", lambda name: TYPES[name[0]], match[1]) + ")"

    found = []
    for line in table.strip().splitlines():
        name, text = re.split(r"\s{2,}", line, maxsplit=1)
        name = re.sub(r"\{(.*?)\}", lambda match: f"(?:{match[1].replace(',', '|')})", name.replace(".", r"\."))
        found.append((re.compile(re.sub(r"<(.*?)>", of_types, name)), text))
    return found


VALUES, STATEMENTS, LANES = rules(VALUES), rules(STATEMENTS), rules(LANES)


def bits_of(type: str) -> int:
    """Of "f32", "b16", "f16x2" or "pred": 32, 16, 32, 1."""
    width = re.search(r"\d+", type)
    return int(width[0]) * (2 if type.endswith("x2") else 1) if width else 1


def raw(type: str) -> str:
    """The C++ type with the bits of a type of PTX."""
    return "bool" if type in ("pred", "bool") else f"u{bits_of(type)}"


@dataclass
class Entry:
    """A kernel: its parameters as (offset, size), its variables in shared memory in bytes, and its C++."""

    parameters: list[tuple[int, int]]
    shared: int
    code: str


@dataclass
class Translator:
    """Translates the statements of one entry in order."""

    symbols: dict[str, str]  # parameters and shared variables -> address
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])  # registers, innermost last
    members: list[str] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    stops: int = 0
    line: int = 0
    key: int = 0  # of a warp instruction

    def declare(self, type: str, names: str) -> None:
        """Registers: .reg .b32 %r<9> or .reg .pred p, q."""
        for family, count in re.findall(r"([%$\w]+)(?:<(\d+)>)?", names):
            member = f"m{len(self.members)}"
            self.members.append(f"{raw(type)} {member}[{count or 1}];")
            numbers = range(int(count)) if count else [""]
            self.scopes[-1] |= {f"{family}{i}": f"t.{member}[{i or 0}]" for i in numbers}

    def value(self, operand: str) -> str:
        """The bits of a register, a number, a special register or an address."""
        for names in (*reversed(self.scopes), SPECIAL, self.symbols):
            if operand in names:
                return names[operand]
        if match := re.fullmatch("0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", operand):
            return f"0x{match[1]}u" if match[1] else f"0x{match[2]}ull"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return f"{int(operand.rstrip('U'), 0) % 2**64}ull"
        if operand.startswith("!"):
            return f"!{self.value(operand[1:])}"
        raise ValueError(f"operand {operand!r}")

    def typed(self, operand: str, type: str, half: int | None = None) -> str:
        """With the value that the bits have in this type; of a pair of halves, one of them."""
        bits = self.value(operand) if half is None else f"u16({self.value(operand)} >> {16 * half})"
        if type in ("f16", "bf16"):
            return f"f64(as<{type}>({bits}))"
        return f"as<{raw(type) if type[0] in 'bp' else type}>({bits})"

    def filled(self, text: str, operands: list[str], type: str, half: int | None = None, **words: str) -> str:
        """A rule with its operands; those that an instruction does not have are 0."""
        words |= {"WIDE": f"{type[0]}{2 * bits_of(type)}", "RAW": raw(type), "KEY": f"{self.key}ll"}

        def replaced(match: re.Match) -> str:
            name, other = match.groups()
            if name in words:
                return words[name]
            place = "abcd".index(name)
            return self.typed(operands[place], words.get(other, other or type), half) if place < len(operands) else "0"

        return re.sub(r"(?<![\w.:])([abcdD]|WIDE|RAW|KEY)\b(?:\.(WIDE|RAW|u32|bool))?", replaced, text)

    def wait(self) -> str:
        self.stops += 1
        return f"t.pc = {self.stops}; return; case {self.stops}:;"

    def lanes(self, mask: str, words: list[str], row: str = "false") -> str:
        """Waits until the other lanes of the warp bring their words."""
        return f"wait_for_warp(t, {self.key}ll, {mask}, {{{', '.join(words)}}}, {row}); {self.wait()}"

    def instruction(self, opcode: str, operands: list[str]) -> str:
        """C++ statements; raises ValueError for what is unknown."""
        # lanes execute an .aligned instruction together at one place, another one also at different places
        self.key = self.line if ".aligned" in opcode else -zlib.crc32(opcode.encode())
        halves = opcode.endswith("x2") and not opcode.startswith("cvt")
        for pattern, text in VALUES:
            if match := pattern.fullmatch(opcode.removesuffix("x2") if halves else opcode):
                to, *sources = operands
                *result, type = match.groups()
                if len(sources) != len(set(re.findall(r"(?<![\w.:])[abcd]\b", text))):
                    raise ValueError("number of operands")
                fill = functools.partial(self.filled, text, sources, type, D=(result or [type])[0])
                if "f" in type and not opcode.startswith(("setp", "selp", "cvt")):
                    fill = functools.partial(self.filled, f"rounded<D>({text})", *fill.args[1:], **fill.keywords)
                if halves and opcode.startswith("setp"):
                    return " ".join(f"set({self.value(p)}, {fill(i)});" for i, p in enumerate(to.split("|")))
                return f"set({self.value(to)}, {f'pair({fill(0)}, {fill(1)})' if halves else fill()});"
        for pattern, text in STATEMENTS:
            if pattern.fullmatch(opcode):
                return f"t.line = {self.line}; {self.filled(text, operands, 'u32').replace('!', self.wait())}"
        for pattern, text in LANES:
            if pattern.fullmatch(opcode):
                (to, *exists), *sources = operands[0].split("|"), *operands[1:]
                exists = f"set({self.value(exists[0])}, exists);" if exists else ""
                read = f"bool exists = true; set({self.value(to)}, {self.filled(text, sources, 'u32')}); {exists}"
                wait = self.lanes(self.typed(sources[-1], "u32"), [self.typed(sources[0], "u32")])
                return f"t.line = {self.line}; {wait} {{ {read} }}"
        for pattern, method in METHODS:
            if match := re.fullmatch(pattern, opcode):
                return f"t.line = {self.line}; {{ {method(self, operands, *match.groups())} }}"
        raise ValueError("instruction")

    def statement(self, text: str) -> str:
        """Of C++; "" for a declaration."""
        if match := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL):
            self.declare(*match.groups())
            return ""
        guard, opcode, rest = re.fullmatch(r"(?:@(!?[%$\w]+)\s+)?([a-z][\w.:]+)\s*(.*)", text, re.DOTALL).groups()
        code = self.instruction(opcode, OPERAND.findall(rest))
        return f"if ({self.value(guard)}) {{ {code} }}" if guard else code


def vector(operand: str) -> list[str]:
    """The registers of {a, b}, or of a."""
    return re.split(r"\s*,\s*", operand.strip("{} "))


def address(t: Translator, operand: str) -> str:
    base, offset = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand).groups()
    return f"u64({t.value(base)}) + {int(offset or 0)}"


def memory(t: Translator, operands, direction, space, count, type) -> str:
    where, registers = operands if direction == "st" else reversed(operands)
    registers, width = vector(registers), bits_of(type) // 8
    if len(registers) != int(count or 1):
        raise ValueError("vector")
    type = raw(type) if type[0] == "b" else type
    at = f"u8* m = at(t, {SPACES[space]}, {address(t, where)}, {width * len(registers)});"
    load, store = "set({}, load<{}>(m, {}));", "store(m, {2}, as<{1}>({0}));"
    moves = [(load if direction == "ld" else store).format(t.value(r), type, i) for i, r in enumerate(registers)]
    return f"{at} {' '.join(moves)}"


def move(t: Translator, operands, type) -> str:
    to, source = map(vector, operands)
    width = bits_of(type) // max(len(to), len(source))
    of_to, of_source = (f"u{width}" if len(part) > 1 else raw(type) for part in (to, source))
    word = " | ".join(f"u64{{as<{of_source}>({t.value(x)})}} << {i * width}" for i, x in enumerate(source))
    moves = [f"set({t.value(x)}, as<{of_to}>(w >> {i * width}));" for i, x in enumerate(to) if x != "_"]
    return f"const u64 w = {word}; {' '.join(moves)}"


def jump(t: Translator, operands) -> str:
    label = operands[0].replace("$", "")
    return ("count_jump(t); " if label in t.labels else "") + f"goto {label};"


def copy(t: Translator, operands) -> str:
    target, source, size, exist = (*operands, operands[2])[:4]
    return f"cp_async(t, {address(t, target)}, {address(t, source)}, {size}, {t.typed(exist, 'u32')});"


def matrices(t: Translator, operands, direction, transposed) -> str:
    """ldmatrix and stmatrix: lane 8 i + r brings the address of row r of matrix i; a lane has 2 numbers of a row.

    Transposed: of a column.
    """
    where, registers = operands if direction == "st" else reversed(operands)
    registers, rows = vector(registers), "t.warp->words[8 * {1} + t.lane / 4]"
    wait = t.lanes("~0u", [f"u32({address(t, where)})"], f"t.lane < {8 * len(registers) if direction == 'ld' else 0}")
    load = f"set({{0}}, {rows}[t.lane % 4]);"
    store = f"store(at(t, kShared, {rows}[0] + t.lane % 4 * 4, 4), 0, as<u32>({{0}}));"
    if transposed:
        pair = [f"t.warp->words[8 * {{1}} + t.lane % 4 * 2 + {place}]" for place in (0, 1)]
        low, high = (f"({row}[t.lane / 8] >> t.lane / 4 % 2 * 16 & 0xFFFF)" for row in pair)
        load = f"set({{0}}, {low} | {high} << 16);"
        halves = zip(pair, ("as<u32>({0})", "as<u32>({0}) >> 16"), strict=True)
        store = " ".join(f"store(at(t, kShared, {row}[0] + t.lane / 4 * 2, 2), 0, u16({x}));" for row, x in halves)
    moves = [(load if direction == "ld" else store).format(t.value(r), i) for i, r in enumerate(registers)]
    return f"{wait} {' '.join(moves)}"


def multiply(t: Translator, operands, total, type) -> str:
    d, a, b, c = map(vector, operands[:4])
    words = [t.typed(word, "u32") for word in (*a, *b, operands[4])]
    sums = [f"mma_sp<{type}, {total}>(t, {i}, as<{total}>({t.value(c[i])}), {t.value(operands[5])})" for i in range(4)]
    results = " ".join(f"set({t.value(d[i])}, sum[{i}]);" for i in range(4))
    return f"{t.lanes('~0u', words)} {{ const {total} sum[] = {{{', '.join(sums)}}}; {results} }}"


SPACE = r"\.(\w+(?:::cluster)?)(?:::cta)?"  # shared::cta is shared
MMA = r"mma\.sp::ordered_metadata\.sync\.aligned\.m16n8k"
METHODS = [
    (rf"(ld|st)(?:{SPACE})?(?:\.L1::no_allocate)?(?:\.L2::128B)?(?:\.v([24]))?\.([busf]\d+)", memory),
    (r"mov\.([busf]\d+|pred)", move),
    (r"bra(?:\.uni)?", jump),
    (r"cp\.async\.c[ag]\.shared\.global(?:\.L2::128B)?", copy),
    (r"(ld|st)matrix\.sync\.aligned\.(?:m8n8\.x[124]|x[124]\.m8n8)(\.trans)?\.shared\.b16", matrices),
    (rf"{MMA}32\.row\.col\.(f32)\.(f16|bf16)\.\2\.f32", multiply),
    (rf"{MMA}64\.row\.col\.(s32)\.(s8)\.s8\.s32\.satfinite", multiply),
]


def aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def translate(ptx: str, name: str) -> Entry:
    """The entry `name` of a module; ValueError quotes the first line that is not understood."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    head = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)([^{{]*)\{{", ptx, re.DOTALL)
    symbols, parameters, size, shared = {}, [], 0, 0
    for declaration in filter(None, re.split(r",\s*(?=\.param)", head[1].strip())):
        align, type, parameter, count = re.fullmatch(PARAMETER, declaration.strip()).groups()
        width = bits_of(type) // 8
        parameters.append((aligned(size, int(align or width)), width * int(count or 1)))
        symbols[parameter], size = f"{parameters[-1][0]}u", sum(parameters[-1])
    body, outside = ptx[head.end() :].partition(".entry")[0], ptx[: ptx.index(".entry")]
    body = body[: body.rindex("\n}")]
    for _, align, variable, count in sorted(re.findall(SHARED, outside + body)):  # the dynamic one last
        if re.search(rf"\b{variable}\b(?!\[)", body):
            shared = aligned(shared, int(align))
            symbols[variable] = f"(t.base + {shared}u)"
            shared += int(count or 0)
    body, t, code, position = re.sub(SHARED, "", body), Translator(symbols), [], 0
    first = ptx.count("\n", 0, head.end()) + 1
    while match := STATEMENT.match(body, position):
        t.line = first + body.count("\n", 0, match.start(match.lastgroup))
        position = match.end()
        if match["brace"]:
            t.scopes = [*t.scopes, {}] if match["brace"] == "{" else t.scopes[:-1]
        elif match["label"]:
            t.labels.add(match["label"].replace("$", ""))
            code.append(f"{match['label'].replace('$', '')}:;")
        elif match["text"]:
            try:
                code.append(t.statement(match["text"].strip()))
            except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
                quoted = f"line {t.line} of the PTX, {match['text'].strip()!r}"
                raise ValueError(f"{quoted}: not understood: {error}") from error
    if body[position:].strip():
        raise ValueError(f"after line {t.line} of the PTX: {body[position:][:80]!r} is not understood")
    return Entry(parameters, shared, STEP.format(members=" ".join(t.members), body="\n".join(code)))
