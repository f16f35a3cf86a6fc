"""The command line. Thin: every subcommand delegates to the part of the package that does the work."""
