"""Plants small faults in kernels and bindings, and reports which of them the checks find.

python -m cuda_ops.testing mutate silu --limit 20

A fault that no check finds shows what samples, references and checks do not look at.
docs/testing.md says which kinds of faults there are.
"""
