"""The benchmark kit measures how long an operator takes, against its peers and the device.

``python -m cuda_ops.benchmarking [op...]`` measures every operator that is
installed; from a checkout ``python -m benchmarks`` is the same. An operator
says what to measure through ``cuda_ops_benchmarks``; nothing here knows any
operator, and no operator has a timing loop.

=============  ==================================================================
``clock``      one measurement: a train of calls, caches cold
``rotation``   the arguments of a train, with other values each time
``verify``     whether what was timed is right
``compare``    rounds of operator and peers, until the interval is narrow
``choice``     which of a peer's candidates a case is compared with
``reference_peers``  the reference as a peer, where no plugin names one
``sustained``  calls back to back, under the power limit
``memory``     how much memory of the device a call takes
``ceilings``   what the device can do: measured, and physically
``raised``     ceilings that a measurement went above
``kit``        all of the above for one operator
``results``    what was found, as values and as JSON
``capacity``   which cases fit the device
``table``      the results in a terminal; ``plots`` draws them
``regression`` whether a run is slower than an earlier one
``command``    the command line
=============  ==================================================================
"""
