"""From two files to a library: finds pairs, compiles them, says what a library was made from."""
