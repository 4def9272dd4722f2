"""Every public name in the reference says what it is: parameters that exist, errors that it raises."""

import builtins
import inspect
import re

import griffe
import pytest

import kvtier
from kvtier import errors
from tests.docs.transcript import ROOT

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"members: \[([^\]]*)\]")
FIRST_LINE = re.compile(r".*[.:!?)`\"']$", re.DOTALL)
# Raised by everything that was closed, or that checks a type: said once.
UNIVERSAL = {"ClosedError", "TypeError", "NotImplementedError", "StopAsyncIteration", "AssertionError"}
LOADER = griffe.GriffeLoader(search_paths=[str(ROOT)])
LOADER.load("kvtier")


def is_public(name):
    return not name.startswith(("_", "test_"))  # names of the kit's tests are sentences


def members_of(thing, chosen=None):
    """Yield an object of the reference and everything public that its page shows below it."""
    yield thing
    if thing.is_module or thing.is_class:
        for name, member in thing.members.items():
            if not is_public(name) or (chosen and name not in chosen):
                continue
            if not member.is_alias and member.is_module:  # shown where it is named itself
                continue
            if member.is_alias:
                if member.wildcard_imported or not thing.is_module or name not in (thing.exports or ()):
                    continue
                yield from members_of(member.final_target)
            else:
                yield from members_of(member)


def public():
    found = {}
    for page in REFERENCE:
        for path, options in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            chosen = MEMBERS.search(options)
            names = chosen[1].replace(" ", "").split(",") if chosen else None
            for thing in members_of(LOADER.modules_collection[path], names):
                found[thing.path] = thing
    return found


PUBLIC = public()


def is_inherited(thing):
    """Tell whether a method overrides one that is documented: mkdocstrings shows that one's words."""
    parent = thing.parent
    return parent.is_class and any(thing.name in base.members for base in parent.mro())


def sections(thing, kind):
    if not thing.docstring:
        return []
    return [part for part in thing.docstring.parse("google") if part.kind is kind]


def raised_in(function):
    """Return the names of errors that the body itself raises."""
    source = "\n".join(LOADER.lines_collection[function.filepath][function.lineno - 1 : function.endlineno])
    return set(re.findall(r"^ +raise (\w+)\(", source, re.MULTILINE))


def ancestors(name):
    error = getattr(errors, name, None) or getattr(builtins, name, None)
    return {base.__name__ for base in inspect.getmro(error)} if error else {name}


def test_the_reference_is_found():
    assert len(PUBLIC) > 400
    assert {"kvtier.store.kv.KVStore.get", "kvtier.errors.ConfigError", "kvtier.backends.base.Backend"} <= set(PUBLIC)


def test_every_name_of_the_package_is_in_the_reference():
    names = {name: getattr(kvtier, name) for name in kvtier.__all__ if name != "__version__"}
    assert [name for name, thing in names.items() if f"{thing.__module__}.{thing.__qualname__}" not in PUBLIC] == []


def test_every_public_name_has_a_docstring():
    def needs_one(thing):
        return (thing.is_function or thing.is_class or thing.is_module) and not (
            thing.is_function and is_inherited(thing)
        )

    assert [path for path, thing in PUBLIC.items() if needs_one(thing) and not thing.has_docstring] == []


def test_what_is_said_of_parameters_is_about_parameters():
    wrong = []
    for path, thing in PUBLIC.items():
        if thing.is_function or thing.is_class:
            function = thing.members.get("__init__") if thing.is_class else thing
            known = {parameter.name.lstrip("*") for parameter in function.parameters} if function else set()
            known |= set(thing.members) if thing.is_class else set()
            for section in sections(thing, griffe.DocstringSectionKind.parameters):
                wrong += [f"{path}: {item.name}" for item in section.value if item.name.lstrip("*") not in known]
    assert wrong == []


def test_errors_that_are_raised_are_told():
    untold = []
    for path, thing in PUBLIC.items():
        if thing.is_function and thing.docstring:
            said = thing.docstring.value + (thing.parent.docstring.value if thing.parent.docstring else "")
            said += "".join(
                base.members[thing.name].docstring.value
                for base in (thing.parent.mro() if thing.parent.is_class else ())
                if thing.name in base.members and base.members[thing.name].has_docstring
            )
            if "raises as" in said.lower():  # and names another call, which is checked
                continue
            untold += [
                f"{path}: {name}"
                for name in raised_in(thing) - UNIVERSAL
                if is_public(name)
                and not any(ancestor in said for ancestor in ancestors(name) - {"Exception", "object"})
            ]
    assert untold == []


@pytest.mark.parametrize("wrong", ["def f(a: int) -> int:\n    '''Say.\n\n    Args:\n        b: no.\n    '''\n"])
def test_a_wrong_docstring_is_noticed(wrong):
    with griffe.temporary_visited_module(wrong) as module:
        (section,) = sections(module["f"], griffe.DocstringSectionKind.parameters)
        assert [item.name for item in section.value] == ["b"] != [item.name for item in module["f"].parameters]
