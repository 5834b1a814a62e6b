"""PyTorch's compiler is not imported for a model that only mentions it, and is as ever for whoever uses it."""

from __future__ import annotations

import pytest

from tests.conftest import Python, Write


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "library"), [("timm:resnet50", "timm"), ("torchvision:resnet18", "torchvision")])
def test_a_library_of_models_does_not_import_it(target: str, library: str, warm_python: Python) -> None:
    pytest.importorskip(library)
    done = warm_python(
        "-c",
        f"""
import sys, memsize
memsize.report({target!r}, train="adamw")
print(*{{"torch._dynamo", "torch._dynamo.utils", "sympy", "torch._inductor"}} & set(sys.modules))
print(*(finder for finder in sys.meta_path if type(finder).__module__.startswith("memsize")))
""",
    )
    assert done.stdout == "\n\n", done.stderr


@pytest.mark.thorough
def test_transformers_does_not_import_it_and_its_marks_reach_it(warm_python: Python) -> None:
    pytest.importorskip("transformers")
    done = warm_python(
        "-c",
        """
import sys, memsize
sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
memsize.report("hf:llama", arguments=sizes | {"num_key_value_heads": 2, "vocab_size": 100}, train="adamw")
print(*{"torch._dynamo", "torch._dynamo.utils", "torch._inductor", "torchao"} & set(sys.modules))
import torch._dynamo
print(*(finder for finder in sys.meta_path if type(finder).__module__.startswith("memsize")))
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
""",
    )
    assert done.stdout == "\n\n", done.stderr


@pytest.mark.thorough
def test_a_mark_without_the_compiler_is_the_compilers_own(warm_python: Python) -> None:
    done = warm_python(
        "-c",
        """
import sys, torch
from importlib.util import find_spec
from memsize.loading.library_imports import compiler_late
with compiler_late():
    @torch._dynamo.allow_in_graph
    def kept(x): return x
    @torch.compiler.allow_in_graph
    def kept_too(x): return x
    @torch._dynamo.assume_constant_result
    def constant(): return 1
    find_spec("torch._dynamo")
assert "torch._dynamo" not in sys.modules and type(torch).__name__ == "module"
from torch._dynamo import allow_in_graph, assume_constant_result, trace_rules
print(trace_rules.is_callable_allowed(kept), trace_rules.is_callable_allowed(kept_too))
@assume_constant_result
def other(): return 1
print(vars(constant) == vars(other), torch._dynamo.assume_constant_result is assume_constant_result)
""",
    )
    assert done.stdout == "True True\nTrue True\n", done.stderr


@pytest.mark.thorough
def test_a_stand_in_makes_way_for_whoever_wants_more(warm_python: Python) -> None:
    done = warm_python(
        "-c",
        """
import sys
from memsize.loading.library_imports import compiler_late
with compiler_late():
    from torch._dynamo.utils import is_compile_supported
    assert "torch._dynamo" not in sys.modules
    from torch._dynamo.utils import counters
    import torch._dynamo.utils as utils, torch._dynamo.config
    assert counters is utils.counters and utils.__file__.endswith("utils.py")
    assert torch._dynamo.utils is utils is sys.modules["torch._dynamo.utils"]
assert torch._dynamo.utils is utils is sys.modules["torch._dynamo.utils"]
assert is_compile_supported("cpu") == utils.is_compile_supported("cpu")
print("same")
""",
    )
    assert done.stdout == "same\n", done.stderr


@pytest.mark.thorough
def test_the_question_is_answered_once_it_is_asked(warm_python: Python) -> None:
    done = warm_python(
        "-c",
        """
import sys
from memsize.loading.library_imports import compiler_late
with compiler_late():
    from torch._dynamo.utils import is_compile_supported as early
    with compiler_late():
        from torch._dynamo.utils import is_compile_supported as again
assert not {"torch._dynamo", "torch._dynamo.utils"} & set(sys.modules)
answers = [early("meta"), again("meta")]
from torch._dynamo.utils import is_compile_supported
print(answers == [is_compile_supported("meta")] * 2, early is is_compile_supported)
""",
    )
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.thorough
def test_a_function_that_is_not_to_be_compiled_is_marked_when_it_is_called(write: Write, warm_python: Python) -> None:
    write(
        "model.py",
        """
import torch
from torch import nn

@torch.compiler.disable
def twice(x):
    "doubles"
    return x * 2

@torch.compiler.disable(recursive=False)
def thrice(x):
    return x * 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return thrice(twice(self.layer(x)))
""",
    )
    done = warm_python(
        "-c",
        """
import sys, torch, memsize
disable = torch.compiler.disable
from memsize.loading import load
model = load("model.py:Net").module
assert torch.compiler.disable is disable and "torch._dynamo" not in sys.modules
report = memsize.report(model, (4,))
assert "torch._dynamo" in sys.modules
x = torch.ones(2, 4)
compiled = torch.compile(model, backend="eager")
print(report.trace.scenario, torch.equal(compiled(x), model(x)))
""",
    )
    assert done.stdout == "as-given True\n", done.stderr
