"""The command line: one file a command, each a parse, one library call and an echo."""
