"""``python -m cuda_ops doctor``: what an installation is made of, what is wrong, what mends it.

:mod:`~cuda_ops.doctor.facts` is what there is, :mod:`~cuda_ops.doctor.findings` what follows from
it, :mod:`~cuda_ops.doctor.report` how both are shown. What may crash or hang, such as a driver, a
plugin or a library that is opened, is looked at in another process.
"""
