"""The `vllm` command. A subcommand is a module with NAME, HELP, add_arguments(parser) and run(args); see frame.py.
It raises CliError for arguments, data, models and servers that cannot be used."""
