"""The settings of runs, models and sampling, and the options that are refused."""
