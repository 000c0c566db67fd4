"""`python -m lowmem_grpo` is the command `lowmem-grpo`."""

from lowmem_grpo.cli.main import main

main(prog_name="lowmem-grpo")
