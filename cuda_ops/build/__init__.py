"""From two files to a library: which pairs there are, how they are compiled, what a library is made of."""
