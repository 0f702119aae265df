"""The finder of upstream's paths: what can be done with a module of ours can be done with a listed one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from preloaded import FORKED

import vllm
from vllm.upstream import table as table_module
from vllm.upstream.finder import Finder, ListedModule

ROOT = Path(__file__).parents[2]

TABLE = """
version = "1"
[rooms]
"vllm.there" = "vllm.here"
"vllm.there.deep.moved" = "vllm.here.leaf"
"vllm.there.renamed" = "vllm.here.leaf"
"vllm.split" = ["vllm.here", "vllm.here.rooms"]
"vllm.gone" = "vllm.nowhere"
[reasons]
no = "it is not served; leave it out"
[names."vllm.listed.names"]
Thing = "vllm.here.leaf"
Other = "vllm.here.leaf:Thing"
function = { is = "vllm.here.leaf", takes = "a" }
Refused = { refused = "no" }
refuse = { refused = "use something else" }
CALLABLE = { refused = "no", function = true }
Lacking = { absent = "no" }
[names."vllm.there.program"]
Further = "vllm.here.leaf:Thing"
[names."vllm.there.rooms"]
Further = "vllm.here.leaf:Thing"
"""
FILES = {
    "__init__": "VALUE = 'package'\n__all__ = ['VALUE']",
    "leaf": """
        VALUE = 1
        class Thing:
            pass
        def function(a):
            return VALUE + a
    """,
    "rooms/__init__": "ROOM = True",
    "rooms/inner": "VALUE = 'inner'",
    "program": """
        import sys
        if __name__ == "__main__":
            print(__name__, __spec__.name, sys.argv[1:])
    """,
    "rooms/__main__": "print('main of rooms')",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A package `vllm.here` and a table of other paths to it."""
    for name, text in FILES.items():
        path = tmp_path / "here" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (tmp_path / "names.toml").write_text(TABLE)
    monkeypatch.setattr(vllm, "__path__", [*vllm.__path__, str(tmp_path)])
    monkeypatch.setattr(table_module, "PATH", tmp_path / "names.toml")
    table_module.table.cache_clear()
    before = set(sys.modules)
    yield tmp_path
    table_module.table.cache_clear()
    for name in set(sys.modules) - before:
        if name.split(".")[:2] in (["vllm", part] for part in ("here", "there", "listed", "split", "gone")):
            del sys.modules[name]
            vllm.__dict__.pop(name.split(".")[1], None)


def test_a_module_by_another_path_is_the_module(here):
    import vllm.there.leaf as other

    assert other is importlib.import_module("vllm.here.leaf") is sys.modules["vllm.there.leaf"]
    assert other.__spec__.name == "vllm.here.leaf"
    assert importlib.import_module("vllm.there.renamed") is other
    assert importlib.import_module("vllm.there.deep.moved") is other
    from vllm.there import leaf
    from vllm.there.leaf import Thing

    assert leaf is other and Thing is other.Thing


def test_a_package_by_another_path_has_the_same_names_and_modules(here):
    import vllm.here
    import vllm.there

    assert vllm.there is not vllm.here and vllm.there.__path__ == []
    assert vllm.there.VALUE == "package" and "VALUE" in dir(vllm.there) and vllm.there.__all__ == ["VALUE"]
    vllm.there.VALUE = "set"
    assert vllm.here.VALUE == "set"
    import vllm.there.rooms.inner

    assert vllm.there.rooms.inner is vllm.here.rooms.inner
    assert isinstance(vllm.there.rooms, ListedModule) and not isinstance(vllm.here.rooms, ListedModule)
    assert vllm.there.rooms.ROOM and vllm.there.rooms.Further is vllm.here.leaf.Thing
    names: dict = {}
    exec("from vllm.there import *\nfrom vllm.there.rooms import *", names)
    assert names["VALUE"] == "set" and names["ROOM"] and names["Further"] is vllm.here.leaf.Thing


def test_a_package_that_is_split_is_whole(here):
    from vllm.split import VALUE, inner, leaf

    assert VALUE == "package"
    assert (leaf.__name__, inner.__name__) == ("vllm.here.leaf", "vllm.here.rooms.inner")


def test_names_are_aliases(here):
    from vllm.listed.names import Other, Thing, function

    leaf = importlib.import_module("vllm.here.leaf")
    assert Thing is Other is leaf.Thing and function is leaf.function
    assert pickle.loads(pickle.dumps(Thing())).__class__ is leaf.Thing
    assert pickle.loads(b"cvllm.listed.names\nOther\n.") is leaf.Thing
    assert str(inspect.signature(function)) == "(a)" and "return VALUE + a" in inspect.getsource(function)
    names = importlib.import_module("vllm.listed.names")
    assert not hasattr(names, "Lacking") and not hasattr(names, "Nothing") and hasattr(names, "Refused")
    assert sorted(names.__all__) == ["CALLABLE", "Other", "Refused", "Thing", "function", "refuse"]
    with pytest.raises(ImportError, match="cannot import name 'Lacking'"):
        from vllm.listed.names import Lacking  # noqa: F401


def test_patches_reach_what_the_name_is_an_alias_of(here):
    leaf = importlib.import_module("vllm.here.leaf")
    for path in ("vllm.listed.names.function", "vllm.there.leaf.function", "vllm.there.renamed.function"):
        with mock.patch(path) as patched:
            assert leaf.function is patched
        assert leaf.function(1) == 2
    with mock.patch("vllm.there.VALUE", 5):
        assert importlib.import_module("vllm.here").VALUE == 5
    assert importlib.import_module("vllm.there").VALUE == "package"
    with mock.patch("vllm.listed.names.Refused") as patched:
        assert importlib.import_module("vllm.listed.names").Refused is patched
    with pytest.raises(NotImplementedError):
        importlib.import_module("vllm.listed.names").Refused()


def test_refused_names_say_what_to_do(here):
    from vllm.listed.names import CALLABLE, Refused, refuse

    with pytest.raises(NotImplementedError, match="^Refused: it is not served; leave it out$"):
        Refused(1, a=2)
    for function, text in ((refuse, "^refuse: use something else$"), (CALLABLE, "^CALLABLE: it is not served")):
        with pytest.raises(NotImplementedError, match=text):
            function(1)

    class Derived(Refused):
        def __init__(self) -> None:
            """Asks for nothing of its base."""

    assert isinstance(Derived(), Refused) and not isinstance(3, Refused)
    assert pickle.loads(pickle.dumps(Refused)) is Refused and pickle.loads(pickle.dumps(refuse)) is refuse
    assert Refused.__module__ == "vllm.listed.names"


@pytest.mark.parametrize("name", ["vllm.there.leaf", "vllm.there", "vllm.listed", "vllm.listed.names"])
def test_specs_are_found_before_and_after_the_import(here, name):
    assert importlib.util.find_spec(name) is not None
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert importlib.util.find_spec(name) is module.__spec__
    if module.__spec__.origin is not None:
        assert Path(module.__file__).is_relative_to(here)
        assert inspect.getsource(module)


@pytest.mark.parametrize("name", ["vllm.nothing", "vllm.there.nothing", "vllm.listed.names.nothing", "vllm.gone"])
def test_what_is_neither_is_not_found(here, name):
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'") as caught:
        importlib.import_module(name)
    assert caught.value.name == name
    with pytest.raises(ModuleNotFoundError, match="No module named 'vllm.here.leaf.more'"):
        importlib.import_module("vllm.here.leaf.more")


def test_a_folder_without_modules_is_not_a_package(here):
    (here / "there" / "__pycache__").mkdir(parents=True)
    assert importlib.import_module("vllm.there").VALUE == "package"


def test_modules_of_ours_win(here):
    (here / "there").mkdir()
    (here / "there" / "__init__.py").write_text("VALUE = 'ours'")
    there = importlib.import_module("vllm.there")
    assert there.VALUE == "ours" and type(there) is not ListedModule
    assert importlib.import_module("vllm.there.leaf").__name__ == "vllm.here.leaf"


def test_threads_that_import_at_once_get_one_module(here):
    (here / "here" / "slow.py").write_text("import time\ntime.sleep(0.05)\nclass Thing: ...\n")
    names = ["vllm.here.slow", "vllm.there.slow", "vllm.split.slow"] * 8
    with ThreadPoolExecutor(len(names)) as pool:
        things = list(pool.map(lambda name: importlib.import_module(name).Thing, names))
    assert len(set(things)) == 1


@pytest.mark.parametrize("name", ["vllm.there.rooms.inner", "vllm.there.renamed", "vllm.split.inner", "vllm.gone.more"])
def test_the_finder_imports_nothing(here, name):
    """Python holds the global import lock meanwhile: another thread that imports the same needs it."""
    before = set(sys.modules)
    assert (Finder.find_spec(name, []) is None) == (name == "vllm.gone.more")
    assert set(sys.modules) == before


def test_a_module_that_another_thread_is_importing_has_its_names(here):
    spec = importlib.util.find_spec("vllm.there.leaf")
    module = importlib.util.module_from_spec(spec)  # the import system has put it into sys.modules by this time
    assert module.Thing is importlib.import_module("vllm.here.leaf").Thing


def test_a_program_runs_by_another_path(here):
    start = f"""
import runpy, sys, vllm, vllm.upstream.table as table
from pathlib import Path
vllm.__path__.append({str(here)!r})
table.PATH = Path({str(here / "names.toml")!r})
sys.argv = ["-m", "an argument"]
runpy._run_module_as_main(NAME)
"""
    for name, printed in (
        ("vllm.there.program", "__main__ vllm.there.program ['an argument']\n"),
        ("vllm.there.rooms", "main of rooms\n"),
    ):
        code = start.replace("NAME", repr(name))
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert (result.stdout, result.stderr) == (printed, "")


def test_it_is_installed_once():
    from vllm.upstream.finder import install

    install()
    assert sys.meta_path.count(Finder) == 1


def test_the_table_is_not_read_for_what_is_ours():
    """Its milliseconds are for callers by upstream's paths."""
    files = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "vllm").rglob("*.py"))
    names = [".".join(file.parts).removesuffix(".__init__") for file in files if file.name != "__main__"]
    ours = [name for name in names if not name.startswith("vllm.upstream")]
    code = f"import importlib, sys\nfor name in {ours}: importlib.import_module(name)\n"
    code += "sys.exit(sys.modules['vllm.upstream.table'].table.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", FORKED + code], cwd=ROOT).returncode == 0
