"""Public names of `mlstate.integrations.torch`; importing it needs no torch."""

from mlstate.integrations import torch as integration

PUBLIC = [
    "PlannedModel",
    "TorchGroup",
    "all_reduce_with",
    "measure_peak",
    "measure_plan",
    "records",
    "reduce_scatter_with",
]


def test_integration_exports_only_user_functions():
    assert integration.__all__ == PUBLIC
    assert dir(integration) == PUBLIC
    assert all(hasattr(integration, name) for name in PUBLIC)
    assert callable(integration.restore_state)  # files of torch.save refer to that function
