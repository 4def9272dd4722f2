"""Docstrings give facts: shapes and dtypes of tensors, units of numbers, errors that are raised here."""

import ast
import re
import textwrap

import griffe
import pytest

from kvtier import errors
from tests.docs.test_docstrings import LOADER, PUBLIC, ancestors, is_inherited, is_public, sections

TENSORS = re.compile(r"\b(Tensor|KV|OutKV|PutKV|Chunk)\b")
SHAPE = re.compile(r"\[[^\]]*,[^\]]*\]|shape|\baxes\b|layout|see `KV`", re.IGNORECASE)
DTYPE = re.compile(
    r"dtype|float|int64|int32|integers|bool|elements|layout|see `KV`", re.IGNORECASE
)  # a layout has both
# Such a docstring points at another one, which is checked itself.
POINTS = re.compile(r"\b(?:[Aa]s|[Ss]ee) `[\w.]+`")

NUMBER = re.compile(r"\b(int|float|Size|Seconds)\b")
TIME = re.compile(
    r"(^|_)(ttl|timeout|deadline|delay|interval|age|expires|expiry|latency|now|time|period|duration)($|_)"
)
SIZE = re.compile(r"(^|_)(size|sizes|capacity|memory|bandwidth|need|free|used|budget|speed)($|_)")
PARALLEL = {"tp_size", "pp_size"}  # numbers of ranks, called so everywhere

KVTIER_ERRORS = {name for name, thing in vars(errors).items() if isinstance(thing, type)}


def text_of(thing):
    """Return a docstring with its class's, which says what holds for all its methods."""
    docs = [thing.docstring, thing.parent.docstring if thing.parent is not None and thing.parent.is_class else None]
    return "\n".join(doc.value for doc in docs if doc)


def without_shape_or_dtype(thing):
    """Tell what is missing of a function that takes or returns tensors, or of a class that holds some."""
    notes = [parameter.annotation for parameter in thing.parameters] + [thing.returns] if thing.is_function else []
    text = text_of(thing)
    if thing.is_class:
        held = [member for name, member in thing.members.items() if member.is_attribute and is_public(name)]
        notes = [member.annotation for member in held]
        text = "\n".join([text, *(member.docstring.value for member in held if member.docstring)])
    if not any(TENSORS.search(str(note)) for note in notes if note is not None) or POINTS.search(text):
        return []
    return [fact for fact, said in (("shape", SHAPE), ("dtype", DTYPE)) if not said.search(text)]


def numbers_of(thing):
    """Yield name, annotation and what is said of it for each parameter of a function, or attribute of a class."""
    if thing.is_function:
        yield from ((item.name, item.annotation, text_of(thing)) for item in thing.parameters)
        return
    made = thing.members.get("__init__")
    if made is not None and made.is_function:
        yield from ((item.name, item.annotation, text_of(made)) for item in made.parameters)
    for name, member in thing.members.items():
        if member.is_attribute and is_public(name):
            yield name, member.annotation, text_of(member)


def without_unit(thing):
    """Return the names of numbers that are a time or a size in nobody knows what."""
    wrong = []
    for name, annotation, said in numbers_of(thing):
        if annotation is None or not NUMBER.search(str(annotation)) or name in PARALLEL or POINTS.search(said):
            continue
        if TIME.search(name) and not re.search(r"seconds|_ns\b", f"{name} {said}"):
            wrong.append(name)
        if SIZE.search(name) and not re.search(r"bytes|tokens|chunks", f"{name} {said}", re.IGNORECASE):
            wrong.append(name)
    return sorted(set(wrong))


def raised_by(source):
    """Return the errors of this package that a function's own body raises, those of functions within left out."""
    found = set()

    def look(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Raise) and child.exc is not None:
                error = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
                found.add(error.id if isinstance(error, ast.Name) else getattr(error, "attr", ""))
            look(child)

    look(ast.parse(textwrap.dedent(source)).body[0])
    return found & KVTIER_ERRORS - {"ClosedError"}  # raised by everything that was closed


def without_section(thing, source):
    """Return the errors that a function raises and does not name under "Raises:"."""
    if thing.docstring and re.search(r"raises as `", thing.docstring.value, re.IGNORECASE):
        return []
    told = " ".join(
        f"{item.annotation} {item.description}"
        for section in sections(thing, griffe.DocstringSectionKind.raises)
        for item in section.value
    )
    return [
        name
        for name in sorted(raised_by(source))
        if not any(base in told for base in ancestors(name) - {"Exception", "BaseException", "object"})
    ]


def source_of(thing):
    return "\n".join(LOADER.lines_collection[thing.filepath][thing.lineno - 1 : thing.endlineno])


OWN = {
    path: thing for path, thing in PUBLIC.items() if thing.is_class or (thing.is_function and not is_inherited(thing))
}


def test_tensors_have_a_shape_and_a_dtype():
    assert {path: missing for path, thing in OWN.items() if (missing := without_shape_or_dtype(thing))} == {}


def test_times_and_sizes_have_a_unit():
    assert {path: names for path, thing in OWN.items() if (names := without_unit(thing))} == {}


def test_errors_stand_under_raises():
    functions = {path: thing for path, thing in OWN.items() if thing.is_function}
    assert sum(bool(raised_by(source_of(thing))) for thing in functions.values()) > 20
    assert {path: left for path, thing in functions.items() if (left := without_section(thing, source_of(thing)))} == {}


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("Take it.", (["shape", "dtype"], ["capacity", "now"], ["CapacityError"])),
        ("Take [layers, heads].", (["dtype"], ["capacity", "now"], ["CapacityError"])),
        ("Take what the layout says, in `capacity` bytes.", ([], ["now"], ["CapacityError"])),
        ("Take floats of any shape; raise CapacityError.", ([], ["capacity", "now"], ["CapacityError"])),
        ("Take it.\n\n    Raises:\n        CapacityError: seconds, bytes.", (["shape", "dtype"], [], [])),
        ("As `KVStore.put`.", ([], [], ["CapacityError"])),
    ],
)
def test_what_is_left_out_is_noticed(said, wrong):
    head = "def f(kv: Tensor, capacity: int, now: float) -> None:"
    source = f'{head}\n    """{said}"""\n    raise CapacityError("x", need=1)\n'
    with griffe.temporary_visited_module(source) as module:
        found = module["f"]
        assert (without_shape_or_dtype(found), without_unit(found), without_section(found, source)) == wrong
