"""Opens and closes one recording of a module: options, inputs, scope."""
