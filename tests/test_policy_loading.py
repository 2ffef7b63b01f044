"""Further contract of policy files (to be merged into tests/test_policies.py)."""

import importlib
import re

import pytest

from sim import policies


@pytest.mark.parametrize("name", policies.names())
def test_layouts_are_known_and_the_source_is_named(name):
    policy = policies.load(name)
    for engine in policy.engines:
        assert policy.layout(engine).mode in ("none", "align", "all", "exact", "tree")
    text = (importlib.import_module(type(policy).__module__).__doc__ or "") + type(policy).__doc__
    assert re.search(r"[Ss]ource|[Ss]pec|vLLM|SGLang|ceiling", text)


def test_files_that_are_no_policies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such policy file"):
        policies.load(str(tmp_path / "absent.py"))
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(ValueError, match="no class Policy"):
        policies.load(str(empty))


def test_a_parameter_of_a_policy_without_any_is_refused():
    with pytest.raises(ValueError, match="no parameter 'every'; it has none"):
        policies.load("none", every=2)
