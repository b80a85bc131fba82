"""ARM instruction sets: detection, machine code, results in an emulator.

The dot products of this machine's own instruction sets are tested in the same way.
"""

import importlib.util

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from llvmlite import binding

from arm import ArmFunction, HostFunction, machine
from llamacli.errors import InvalidRequestError
from llamacli.kernels import ir, isa, jit, register_tiles
from llamacli.kernels.kv_types import cells
from llamacli.kernels.layout import ACTIVATION, AHEAD, INTEGER_FORMS, START
from llamacli.kernels.packing_formats import ROWS, IntegerPacking
from llamacli.kernels.registry import packings_for
from llamacli.kv import KV_TYPES, PAGE
from llamacli.quantization import TensorType
from suite import examples, slow_but

emulated = pytest.mark.skipif(
    importlib.util.find_spec("unicorn") is None, reason="the emulator unicorn is not installed"
)

PACKINGS = packings_for("neon")
"""Packings as ARM and all x86 CPUs without dot products of bfloat16 have them."""

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)


@pytest.mark.parametrize(
    ("cpu", "has"),
    [
        ("cortex-a53", ()),
        ("neoverse-n1", ("dotprod",)),
        ("apple-m1", ("dotprod",)),
        ("neoverse-v1", ("dotprod", "i8mm")),
    ],
)
def test_cpu_features_come_from_llvm(cpu, has):
    assert isa.arm_features(machine(cpu)) == set(has)


@pytest.mark.parametrize(
    ("has", "runs"),
    [((), ("generic",)), (("dotprod",), ("generic", "neon")), (("dotprod", "i8mm"), ("generic", *isa.ARM))],
)
def test_best_instruction_set_is_the_default_and_others_can_be_chosen(monkeypatch, has, runs):
    monkeypatch.setattr(isa, "features", lambda: frozenset({"neon", "fp-armv8", *has}))
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    assert isa.available() == runs
    assert isa.isa.__wrapped__() == runs[-1]
    for name in runs:
        monkeypatch.setenv(isa.VARIABLE, name)
        assert isa.isa.__wrapped__() == name


def test_arm_features_are_empty_on_x86(monkeypatch):
    here = isa.features()
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert isa.features.__wrapped__() == here


@pytest.mark.parametrize("name", isa.ARM)
def test_arm_instruction_set_is_refused_on_x86(monkeypatch, name):
    monkeypatch.setattr(isa, "features", lambda: isa._NEEDS["avx2"])
    monkeypatch.setenv(isa.VARIABLE, name)
    with pytest.raises(InvalidRequestError, match=f"LLAMACLI_ISA = '{name}', but this CPU runs only generic, avx2"):
        isa.isa.__wrapped__()


SUM = """
define void @sum(ptr %x) {
  %a = load <16 x float>, ptr %x
  %b = fadd <16 x float> %a, %a
  store <16 x float> %b, ptr %x
  ret void
}
"""


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "registers", "others"),
    [
        ("avx2", "ymm", ("zmm", "ymm16")), ("avxvnni", "ymm", ("zmm", "ymm16")), ("avx512", "zmm", ("v0",)),
        ("avx512bf16", "zmm", ("v0",)), ("amx", "zmm", ("v0",)), ("neon", "v0", ("ymm",)), ("i8mm", "v0", ("ymm",)),
    ],
)  # fmt: skip
def test_code_is_for_an_instruction_set_and_not_for_this_cpu(monkeypatch, name, registers, others):
    monkeypatch.setattr(isa, "isa", lambda: name)
    assembly = isa.target_machine().emit_assembly(binding.parse_assembly(SUM))
    assert registers in assembly
    assert not [other for other in others if other in assembly]


def test_fingerprint_names_the_instruction_set_and_not_the_cpu(monkeypatch):
    def of(name, cpu="znver3", flags="+avx2", triple="x86_64-unknown-linux-gnu"):
        for module in (isa, jit):
            monkeypatch.setattr(module, "isa", lambda: name)
        monkeypatch.setattr(isa, "host", lambda: (triple, cpu, flags))
        return jit.fingerprint.__wrapped__()

    names = [name for name in isa.ISAS if name != "generic"]
    assert len({of(name) for name in names}) == len(names)
    for name in names:
        assert of(name) == of(name, "skylake", "+avx2,+sgx") == of(name, triple="x86_64-conda-linux-gnu")
    assert of("generic") != of("generic", "skylake"), "it is compiled for the CPU at hand"
    before = of("avx2")
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert of("avx2") != before


# --- operations ------------------------------------------------------------------------------------------------------


def dot(bits, n_pairs=1):
    def emit(b, total, *operands):
        pairs = [[ir.load(b, ir.offset(b, x, 64 * i), ir.I8X64) for x in operands] for i in range(n_pairs)]
        ir.store(b, total, ir.dots_u8s8(b, ir.load(b, total, ir.I32X16), pairs, bits))

    return emit


def look_up(kind):
    return lambda b, out, codes: ir.store(b, out, ir.look_up(b, TABLE, ir.load(b, codes, kind)))


def unary(f):
    return lambda b, out, x: ir.store(b, out, f(b, ir.load(b, x, ir.F32X16)))


def widen_f16(b, out, x):
    ir.store(b, out, ir.load_f16(b, x))


def narrow_f16(b, out, x):
    ir.store_f16(b, out, ir.load(b, x, ir.F32X16))


@pytest.mark.parametrize(
    ("name", "n_args", "emit", "expected"),
    [
        ("generic", 3, dot(8), {"sdot": 0, "usdot": 0}),
        ("neon", 3, dot(7), {"sdot": 4, "eor": 0}),
        ("neon", 3, dot(8), {"sdot": 4, "eor": 4}),
        ("i8mm", 3, dot(8), {"usdot": 4, "eor": 0}),
        ("generic", 2, look_up(ir.I8X64), {"tbl": 0}),
        ("neon", 2, look_up(ir.I8X64), {"tbl": 4}),
        ("i8mm", 2, look_up(ir.I8X16), {"tbl": 1}),
        ("neon", 2, unary(ir.exp), {"fmla": 36, "bl": 0}),
        ("neon", 2, unary(ir.round_i32), {"frintx": 4, "fcvtzs": 4, "bl": 0}),
        ("neon", 2, widen_f16, {"fcvtl": 2, "fcvtl2": 2, "bl": 0}),
        ("neon", 2, narrow_f16, {"fcvtn": 2, "fcvtn2": 2, "bl": 0}),
    ],
)
def test_operations_compile_to_few_instructions(name, n_args, emit, expected):
    code = ArmFunction(name, n_args, emit)
    assert {instruction: code.count(instruction) for instruction in expected} == expected


DOTS = [
    *(pytest.param((ArmFunction, name), id=f"emulated-{name}", marks=emulated) for name in isa.ARM),
    *(pytest.param((HostFunction, name), id=name) for name in isa.available()),
]


@pytest.fixture(scope="module", params=DOTS)
def dot_products(request):
    """Sums of dot products by width of codes, and the bias."""
    kind, name = request.param
    return {bits: kind(name, 3, dot(bits, 3)) for bits in (6, 7, 8)}, 128 if name in ("neon", "avx2") else 0


def check_dot(dot_products, total, unsigned, signed):
    codes, bias = dot_products
    for bits, code in codes.items():
        factors = (unsigned & (2**bits - 1)).astype(np.uint8)
        products = (factors.astype(np.int64) - (bias if bits == 8 else 0)) * signed
        result = total.copy()
        code(result, factors, signed)
        np.testing.assert_array_equal(result, total + products.reshape(3, 16, 4).sum(axis=(0, 2)))


@pytest.mark.parametrize("u", slow_but([128, 255], [0, 1, 127, 128, 255]))
@pytest.mark.parametrize("s", slow_but([-127, 127], [-127, -1, 0, 127]))
def test_dot_product_of_extremes(dot_products, u, s):
    check_dot(dot_products, np.arange(16, dtype=np.int32), np.full(192, u, np.uint8), np.full(192, s, np.int8))


@examples(40)
@given(
    total=arrays(np.int32, 16, elements=st.integers(-(2**30), 2**30)),
    unsigned=arrays(np.uint8, 192),
    signed=arrays(np.int8, 192, elements=st.integers(-127, 127)),
)
def test_dot_product(dot_products, total, unsigned, signed):
    check_dot(dot_products, total, unsigned, signed)


@emulated
@pytest.mark.parametrize("kind", [ir.I8X16, ir.I8X64], ids=str)
def test_look_up(kind):
    code = ArmFunction("neon", 2, look_up(kind))
    for shift in range(16):
        codes = ((np.arange(kind.count) * 5 + shift) % 16).astype(np.uint8)
        out = np.zeros(kind.count, np.int8)
        code(out, codes)
        np.testing.assert_array_equal(out, np.array(TABLE, np.int8)[codes])


FLOATS = np.concatenate(
    [
        np.array(
            [0.0, -0.0, 1e-45, -1e-40, 0.5, 1.5, 2.5, -0.5, -2.5, 127.5, 65504, 65519.996, 65520, -7e4, 6e-8, 2.9e-8]
        ),
        np.array(
            [-87, -86.99999, -88, -1e4, 88, 87.99999, 100, 1e9, 3e-5, 6.1e-5, 1.0009766, 1.0004883, 2049, 2051, 1, -1]
        ),
        np.random.default_rng(0).normal(0, 30, 480),
    ]
).astype(np.float32)


@emulated
@pytest.mark.parametrize("f", [ir.exp, ir.rint, ir.round_f16, ir.absolute], ids=lambda f: f.__name__)
def test_float_operations_are_bit_equal_to_the_host(f):
    codes = ArmFunction("neon", 2, unary(f)), HostFunction(isa.isa(), 2, unary(f))
    for x in FLOATS.reshape(-1, 16):
        results = np.zeros((2, 16), np.uint32)
        for code, out in zip(codes, results, strict=True):
            code(out, x)
        np.testing.assert_array_equal(results[0], results[1])


@emulated
def test_rounding_to_integers():
    code = ArmFunction("neon", 2, unary(ir.round_i32))
    for x in FLOATS[np.abs(FLOATS) < 2**31].reshape(-1, 1):
        out = np.zeros(16, np.int32)
        code(out, np.repeat(x, 16))
        assert (out == np.rint(x)).all()


@emulated
def test_float16():
    widen, narrow = ArmFunction("neon", 2, widen_f16), ArmFunction("neon", 2, narrow_f16)
    every = np.arange(2**16, dtype=np.uint16)
    some = np.ascontiguousarray(every[np.isfinite(every.view(np.float16))][::31][:2032])
    for bits in some.reshape(-1, 16):
        wide, back = np.zeros(16, np.float32), np.zeros(16, np.uint16)
        widen(wide, bits)
        narrow(back, wide)
        np.testing.assert_array_equal(wide, bits.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(back, bits)


# --- tiles -----------------------------------------------------------------------------------------------------------


FLOATS_OF_ISA = [(name, kind) for name in isa.available() if name != "amx" for kind in ("F32", "F16", "BF16")]


@pytest.mark.parametrize(("name", "kind"), FLOATS_OF_ISA)
def test_tile_of_floats_is_bit_equal_under_each_instruction_set(name, kind):
    """Compare with sums of one product after another.

    AMD's dot product of bfloat16 has not been compared, so only its value is.
    """
    packing, random = packings_for(name)[TensorType[kind]], np.random.default_rng(3)
    n_tokens, n_columns = 3, 24
    w, x = (random.integers(-255, 256, shape).astype(np.float32) / 64 for shape in ((n_columns, ROWS), (3, n_columns)))
    x *= 2.0 ** random.integers(-4, 4, x.shape).astype(np.float32)
    stored = {"F32": w, "F16": w.astype(np.float16), "BF16": (w.view(np.uint32) >> 16).astype(np.uint16)}[kind]
    weights = np.ascontiguousarray(stored.reshape(-1, packing.adjacent, ROWS).transpose(0, 2, 1))
    given = (x.view(np.uint32) >> 16).astype(np.uint16) if packing.activation == "bf16_pairs" else x
    out, zeros = np.zeros((n_tokens, ROWS), np.float32), np.zeros(ROWS, np.float32)
    code = HostFunction(name, *tile(packing, n_tokens))
    code(weights, n_columns // packing.block, given, given.strides[0], out, out.strides[0], zeros, 0)
    expected = np.zeros_like(out)
    for column in np.arange(n_columns).reshape(-1, packing.adjacent)[:, ::-1].ravel():
        expected = (expected + x[:, column, None].astype(np.float64) * w[column]).astype(np.float32)
    if packing.activation == "bf16_pairs" and isa.host()[1].startswith("znver"):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(out, expected)


def tile(packing, n_tokens):
    return 8, lambda b, *args: register_tiles.emit_tile(b, packing, n_tokens, *args, ir.I64(AHEAD))


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("neon", TensorType.Q8_0, {"sdot": 32, "eor": 32, "mul": 0}),
        ("i8mm", TensorType.Q8_0, {"usdot": 32, "eor": 0, "mul": 0}),
        ("neon", TensorType.Q4_0, {"sdot": 32, "eor": 0, "mul": 0}),
        ("neon", TensorType.Q4_K, {"sdot": 64, "eor": 0, "mul": 0}),  # of two groups, in a loop
        ("neon", TensorType.IQ4_NL, {"sdot": 32, "tbl": 32, "eor": 32}),
        ("i8mm", TensorType.MXFP4, {"usdot": 32, "eor": 0}),
    ],
)
def test_tile_multiplies_by_dot_products_only(name, kind, expected):
    code = ArmFunction(name, *tile(PACKINGS[kind], 1))
    assert {instruction: code.count(instruction) for instruction in expected} == expected
    assert code.count("bl") == 0


def test_tile_of_four_tokens_multiplies_by_lanes():
    code = ArmFunction("neon", *tile(PACKINGS[TensorType.Q8_0], 4))
    products = [line for line in code.assembly.splitlines() if "\tsdot" in line]
    assert len(products) == 128
    assert all(".4b[" in line for line in products)


def random_weights(random, packing, n_blocks):
    """Random packed blocks with scales of a usual size."""
    if not isinstance(packing, IntegerPacking):
        values = random.normal(size=(n_blocks, packing.block * ROWS)).astype(np.float32)
        if packing.activation == "f16":
            values = values.astype(np.float16)
        return values if packing.activation != "bf16" else (values.view(np.uint32) >> 16).astype(np.uint16)
    weights = random.integers(0, 256, (n_blocks, packing.n_bytes), dtype=np.uint8)
    at = 0
    for kind, count in packing.fields.values():
        n_bytes = ROWS * np.dtype(kind.item).itemsize * count
        if kind.item is np.float16:
            scales = random.normal(0, 0.01, (n_blocks, ROWS * count)).astype(np.float16)
            weights[:, at : at + n_bytes] = scales.view(np.uint8)
        elif kind.item is np.float32:
            weights[:, at : at + n_bytes] = (
                random.normal(0, 0.01, (n_blocks, ROWS * count)).astype(np.float32).view(np.uint8)
            )
        elif packing.table and len(packing.fields) == 1:
            weights[:, at : at + n_bytes] = random.integers(110, 130, (n_blocks, n_bytes))
        at += n_bytes
    return weights


def random_activations(random, packing, n_tokens, n_blocks):
    if packing.activation not in INTEGER_FORMS:
        return random.normal(size=(n_tokens, n_blocks * packing.block)).astype(np.float32)
    x = np.zeros((n_tokens, n_blocks * packing.block // 32), ACTIVATION)
    x["q"] = random.choice([-127, -126, -64, -1, 0, 1, 90, 127], size=(*x.shape, 32))
    x["scale"] = random.normal(size=x.shape)
    x["sum"] = x["q"].sum(axis=-1, dtype=np.int32)
    x["start"] = START - 128 * x["q"].sum(axis=-1, dtype=np.int32)
    x["start_half"] = START - 128 * x["q"][..., :16].sum(axis=-1, dtype=np.int32)
    return x


ALIKE = ("IQ2_XXS", "IQ2_S", "IQ3_XXS", "TQ1_0", "Q2_0")
"""Types whose blocks are loaded like those of IQ2_XS, IQ3_S, TQ2_0 and Q1_0."""

TILES = [
    *(("neon", kind, 1) for kind in PACKINGS if kind.name not in ALIKE),
    *(("neon", kind, 4) for kind in (TensorType.F16, TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_K)),
    *(("i8mm", kind, 1) for kind in (TensorType.Q8_0, TensorType.Q4_K, TensorType.IQ4_NL)),
]


@emulated
@pytest.mark.parametrize(
    ("name", "kind", "n_tokens"),
    [pytest.param(*args, marks=() if TensorType.Q8_0 in args else pytest.mark.slow) for args in TILES],
    ids=str,
)
def test_tile_is_bit_equal_to_the_host(name, kind, n_tokens):
    check_tile(name, PACKINGS[kind], n_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["IQ1_M", "NVFP4", "TQ2_0"])
def test_tile_is_bit_equal_under_each_instruction_set_of_the_host(kind):
    packing, random = PACKINGS[TensorType[kind]], np.random.default_rng(1)
    weights, x = random_weights(random, packing, 3), random_activations(random, packing, 1, 3)
    bias, residual = random.normal(size=(2, ROWS)).astype(np.float32)
    results = np.zeros((len(isa.available()), ROWS), np.float32)
    for name, out in zip(isa.available(), results, strict=True):
        HostFunction(name, *tile(packing, 1))(weights, 3, x, 0, out, 0, bias, residual)
    assert results[0].any()
    np.testing.assert_array_equal(results.view(np.uint32), np.tile(results[0].view(np.uint32), (len(results), 1)))


@emulated
@pytest.mark.parametrize("bias_bits", [None, 6])
def test_codes_of_8_bits_with_every_bias(bias_bits):
    check_tile("neon", attrs.evolve(PACKINGS[TensorType.Q8_0], bias_bits=bias_bits), 1)


def check_tile(name, packing, n_tokens):
    n_blocks, random = 3, np.random.default_rng(n_tokens)
    weights, x = random_weights(random, packing, n_blocks), random_activations(random, packing, n_tokens, n_blocks)
    bias, residual = random.normal(size=(2, n_tokens, ROWS)).astype(np.float32)
    results = np.zeros((2, n_tokens, ROWS), np.float32)
    here, there = HostFunction(isa.isa(), *tile(packing, n_tokens)), ArmFunction(name, *tile(packing, n_tokens))
    for code, out in zip((here, there), results, strict=True):
        code(weights, n_blocks, x, x.strides[0], out, out.strides[0], bias, residual)
    assert np.isfinite(results).all()
    assert results.any()
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))


# --- cells of the cache ----------------------------------------------------------------------------------------------

HEAD_DIM = 32


def keys_of(kind):
    """Loading of the keys of a unit, then of absolute scores."""

    def emit(b, out, part, scores):
        for d, key in enumerate(cells.load_keys(b, cells.NUMBERS[kind], part, ir.I64(0))):
            ir.store(b, ir.offset(b, out, 64 * d), key)
        absolute = cells.absolute_scores(b, cells.NUMBERS[kind], ir.load(b, scores, ir.F32X16))
        ir.store(b, ir.offset(b, out, 64 * cells.dims_at_once(cells.NUMBERS[kind])), absolute)

    return 3, emit


def values_of(kind):
    """Loading of 16 dimensions of each cell's value."""

    def emit(b, out, part):
        load = cells.value_loader(b, cells.NUMBERS[kind], part, ir.I64(0), ir.I64(HEAD_DIM))
        for pair in range(PAGE // 2):
            for cell, value in enumerate(load(ir.I64(pair)), start=2 * pair):
                ir.store(b, ir.offset(b, out, 64 * cell), value)

    return 2, emit


@emulated
@pytest.mark.parametrize("kind", KV_TYPES)
def test_cells_are_read_bit_equal_to_the_host(kind):
    random = np.random.default_rng(0)
    x = random.normal(size=(PAGE, 1, HEAD_DIM)).astype(np.float32)
    scores = random.normal(size=16).astype(np.float32)
    for is_key, code in ((True, keys_of(kind)), (False, values_of(kind))):
        parts = np.zeros((1, KV_TYPES[kind].part_bytes(HEAD_DIM)), np.uint8)
        KV_TYPES[kind].write(parts, slice(0, PAGE), x, is_key=is_key)
        results = np.zeros((2, 17, 16), np.float32)
        for function, out in zip((HostFunction(isa.isa(), *code), ArmFunction("neon", *code)), results, strict=True):
            function(*(out, parts, scores)[: code[0]])
        assert results[0].any()
        np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))
