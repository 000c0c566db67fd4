"""The live page: what it reads of the folders of runs, and what it shows. It reads files that runs write only."""
