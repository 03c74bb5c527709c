"""torch's own test databases, without what importing them does to the process.

`torch.testing._internal` lowers hypothesis to ten examples a test and forbids to set backend flags,
for every test of the session: both are put back here. It also looks for a `unittest.TestCase` by
`inspect.stack()`, twice for the inputs of each operator, which took half of the time of the tests of
operators; here there is none to find.
"""

import hypothesis
import torch

_settings = hypothesis.settings.default
_flags_were_frozen = torch.backends.flags_frozen()

from torch.testing._internal import common_utils  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402
from torch.testing._internal.common_nn import get_new_module_tests, module_tests  # noqa: E402
from torch.testing._internal.opinfo import core  # noqa: E402

hypothesis.settings.register_profile("before torch's databases", parent=_settings)
hypothesis.settings.load_profile("before torch's databases")
if not _flags_were_frozen:
    # torch has no public way back, and `torch.backends` is not the module that holds the flag.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

EXPANDED_WEIGHT_OPS = [op for op in op_db if op.supports_expanded_weight]
MODULE_INFOS = list(module_db)
LEGACY_MODULE_TESTS = [*module_tests, *get_new_module_tests()]
