"""Finding processor classes, and asking them about a request's parameters."""

from __future__ import annotations

import argparse
import sys

import pytest
from installed_package import TARGET_TOKEN, install

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor, load_logits_processors, validate_params

MODULE = f"""{TARGET_TOKEN}

class Outer:
    Inner = TargetToken

not_a_class = TargetToken(None, None, False)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder on sys.path with modules good and bad; none stays imported."""
    (tmp_path / "good_processors.py").write_text(MODULE)
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "absent_addon.py").write_text("import absent")
    (tmp_path / "needs_another.py").write_text("import a_package_that_is_not_here")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_nothing_to_load():
    assert load_logits_processors() == load_logits_processors([]) == []


def test_names_and_classes_each_once(modules):
    first, second = load_logits_processors(["good_processors:TargetTokenOfRequest", "good_processors:Outer.Inner"])
    assert (first.__name__, second.__name__) == ("TargetTokenOfRequest", "TargetToken")
    again = load_logits_processors([second, "good_processors:TargetToken", first, second])
    assert again == [second, first]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("good_processors.TargetToken", "'good_processors.TargetToken': must have the form 'module.path:ClassName'"),
        ("", "'': must have the form"),
        ("good_processors:", "must have the form"),
        (":TargetToken", "must have the form"),
        ("nowhere.at_all:Thing", "'nowhere.at_all:Thing': there is no module 'nowhere'"),
        (
            "good_processors.sub:Thing",
            "importing 'good_processors.sub' raised|there is no module 'good_processors.sub'",
        ),
        ("raises_on_import:Thing", "importing 'raises_on_import' raised RuntimeError: no licence"),
        ("needs_another:Thing", "importing 'needs_another' raised ModuleNotFoundError: .*a_package_that_is_not_here"),
        ("absent_addon:Thing", "importing 'absent_addon' raised ModuleNotFoundError: .*'absent'"),
        ("good_processors:Missing", "'good_processors' has no attribute 'Missing'"),
        ("good_processors:Outer.Missing", "'Outer' has no attribute 'Missing'"),
        ("good_processors:not_a_class", "is not a class but of type TargetToken"),
        ("good_processors:Outer", "is not a subclass of vllm.v1.sample.logits_processor.LogitsProcessor"),
        (dict, "<class 'dict'>.*is not a subclass"),
        (3, "3: is not a class but of type int"),
    ],
)
def test_what_cannot_be_loaded_is_named(modules, spec, reason):
    with pytest.raises(ValueError, match=reason):
        load_logits_processors([spec])


@pytest.mark.parametrize("specs", ["good_processors:TargetToken", LogitsProcessor, 3])
def test_a_list_is_wanted(specs):
    with pytest.raises(ValueError, match="logits_processors must be a list"):
        load_logits_processors(specs)


class TestEntryPoints:
    def test_installed_processors_come_first(self, modules, tmp_path):
        install(tmp_path, "a_plugin", TARGET_TOKEN, {"b": "a_plugin:TargetTokenOfRequest", "a": "a_plugin:TargetToken"})
        names = [cls.__name__ for cls in load_logits_processors()]
        assert names == ["TargetToken", "TargetTokenOfRequest"]
        classes = load_logits_processors(["a_plugin:TargetTokenOfRequest", "good_processors:TargetToken"])
        assert [cls.__module__ for cls in classes] == ["a_plugin", "a_plugin", "good_processors"]

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("nowhere:Thing", "there is no module 'nowhere'"),
            ("a_plugin:Missing", "'a_plugin' has no attribute 'Missing'"),
            ("a_plugin:torch", "is not a class but of type module"),
            ("a_plugin", "must have the form 'module.path:ClassName'"),
            ("a b", "must have the form 'module.path:ClassName'"),
        ],
    )
    def test_a_broken_one_is_named(self, modules, tmp_path, value, reason):
        install(tmp_path, "a_plugin", TARGET_TOKEN, {"mine": value})
        with pytest.raises(ValueError, match=f"entry point 'mine' = '{value}'.*vllm.logits_processors.*{reason}"):
            load_logits_processors()


class TestEngineArguments:
    def test_loading_comes_before_the_model_is_looked_for(self):
        with pytest.raises(ValueError, match="there is no module 'nowhere'"):
            EngineArgs(model="no-such-folder", logits_processors=["nowhere:Thing"]).create_engine_config()

    def test_the_flag_takes_several_names(self):
        parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
        args = parser.parse_args(["--logits-processors", "a:B", "c.d:E", "--seed", "3"])
        engine_args = EngineArgs.from_cli_args(args)
        assert engine_args.logits_processors == ["a:B", "c.d:E"]
        assert EngineArgs.from_cli_args(parser.parse_args([])).logits_processors is None


class TestValidateParams:
    def check(self, error):
        class Choosy(LogitsProcessor):
            @classmethod
            def validate_params(cls, sampling_params):
                if error is not None:
                    raise error

        validate_params([LogitsProcessor, Choosy], SamplingParams())

    def test_nothing_to_object(self):
        self.check(None)

    def test_a_value_error_becomes_a_validation_error(self):
        with pytest.raises(VLLMValidationError, match="^too large$") as caught:
            self.check(ValueError("too large"))
        assert caught.value.parameter is None

    def test_a_validation_error_keeps_its_parameter(self):
        own = VLLMValidationError("too large", parameter="target_token", value=9)
        with pytest.raises(VLLMValidationError) as caught:
            self.check(own)
        assert caught.value is own

    def test_other_errors_name_the_class(self):
        with pytest.raises(VLLMValidationError, match="Choosy could not check the parameters: KeyError: 'target'"):
            self.check(KeyError("target"))
