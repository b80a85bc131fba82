"""The catalog names every kernel that there is."""

import ast
from pathlib import Path

import llamacli.kernels.catalog as catalog_module
from llamacli.engine.catalog import catalog

SOURCES = sorted(Path(catalog_module.__file__).parent.glob("*.py"))


def made() -> set[str]:
    """Public functions that make kernels, by their annotations."""
    found = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            match node:
                case ast.FunctionDef(name=name, returns=ast.Name(id="Kernel")) if not name.startswith("_"):
                    found.add(name)
    return found - {"kernel"}


def test_every_maker_of_kernels_is_in_it() -> None:
    of_ops = {"lanewise", "linear_state"}  # made for ops, which give examples of themselves
    assert {make.__name__ for make, _ in catalog_module._FAMILIES} | of_ops == made()


def test_every_module_with_kernels_is_in_it() -> None:
    decorated = set()
    for source in SOURCES:
        if any(
            line.startswith(("@kernel", "@compiled", "@array_function")) for line in source.read_text().splitlines()
        ):
            decorated.add(source.stem)
    assert decorated <= {module.__name__.rsplit(".", 1)[1] for module in catalog_module._MODULES}


def test_names_are_unique() -> None:
    kernels = catalog()
    assert len({kernel.name for kernel in kernels}) == len(kernels) > 40
    names = {kernel.name for kernel in kernels}
    assert {"rms_norm", "_run_job", "linear_Q4_K", "pack_floats_2", "attention_f16"} <= names
    assert any(name.startswith("lanewise_gated_vv_") for name in names)
