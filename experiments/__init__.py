"""Which question is asked: experiment files, runner, sweeps, tables, plots and the command line."""
