"""From a library to an operator: its manifest, its place in the dispatcher, its public function."""
