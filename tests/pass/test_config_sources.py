"""Where a setting comes from, and what a wrong one says."""

from __future__ import annotations

import argparse

import pytest

from fusion_pass import ConfigError, FusionConfig, add_arguments


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def test_keyword_is_overridden_by_environment_and_that_by_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    keywords = {"expect": 1, "report": "keyword.json", "kernels": ("triton",)}
    monkeypatch.setenv("FUSION_PASS_EXPECT", "2")
    monkeypatch.setenv("FUSION_PASS_REPORT", "environment.json")
    config = FusionConfig.from_args(
        parse("--fusion-pass", "--fusion-pass-expect", "qk_norm_rope=3,attention=4"), **keywords
    )
    assert config.enabled
    assert config.expect == {"qk_norm_rope": 3, "attention": 4}
    assert config.report == "environment.json"
    assert config.kernels == ("triton",)


def test_a_constructed_configuration_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS_STRICT", "1")
    assert not FusionConfig().strict
    assert FusionConfig.load().strict


def test_a_script_opts_in_by_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not FusionConfig.from_args(parse()).enabled
    assert FusionConfig.from_args(parse("--fusion-pass")).enabled
    monkeypatch.setenv("FUSION_PASS_ENABLED", "1")
    assert FusionConfig.from_args(parse()).enabled


def test_every_setting_has_a_flag_and_switches_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS_VERIFY", "on")
    args = parse("--fusion-pass", "--no-fusion-pass-verify", "--fusion-pass-skip-fusions", "rope, norm_rope")
    config = FusionConfig.from_args(args)
    assert not config.verify
    assert config.skip_fusions == ("rope", "norm_rope")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"log_level": "loud"}, "log_level is 'loud'; it takes one of debug, info, warning, error."),
        ({"on_error": "ignore"}, "on_error is 'ignore'; it takes one of warn, raise."),
        ({"fusions": "rope"}, "fusions is 'rope'; it takes a sequence of names"),
        ({"expect": -1}, "expect is -1; it takes a count"),
        ({"expect": True}, "expect is True; it takes a count"),
        ({"expect": {"rope": "two"}}, "it takes a count"),
    ],
)
def test_a_wrong_value_is_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        FusionConfig(**settings)


def test_a_misspelt_setting_raises_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'verfy' is no setting"):
        FusionConfig.load(verfy=True)
    monkeypatch.setenv("FUSION_PASS_VERFY", "1")
    with pytest.raises(ConfigError, match="FUSION_PASS_VERFY, which is no setting"):
        FusionConfig.load()


def test_an_unreadable_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS_STRICT", "maybe")
    with pytest.raises(ConfigError, match=r"FUSION_PASS_STRICT cannot be read: 'maybe' is no"):
        FusionConfig.load()


def test_fusions_are_selected_by_name() -> None:
    assert FusionConfig().wants("rope")
    assert not FusionConfig(fusions=("attention",)).wants("rope")
    assert not FusionConfig(skip_fusions=("rope",)).wants("rope")
    assert not FusionConfig(fusions=("rope",), skip_fusions=("rope",)).wants("rope")
