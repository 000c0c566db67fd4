"""The command `lowmem-grpo`, also `python -m lowmem_grpo`: the group of all commands. Importing it loads no heavy
library."""

import difflib
import io
import sys

import click

from lowmem_grpo import __version__
from lowmem_grpo.cli.eval import evaluate
from lowmem_grpo.cli.export import export
from lowmem_grpo.cli.generate import generate
from lowmem_grpo.cli.new import new
from lowmem_grpo.cli.pairs import pairs
from lowmem_grpo.cli.plan import doctor, plan
from lowmem_grpo.cli.run import cancel, jobs, logs, report, resume, run, show_error, submit
from lowmem_grpo.cli.serve import serve, watch

OTHER_NAMES = {"train": "run", "start": "run", "evaluate": "eval", "test": "eval", "chat": "generate",
               "sample": "generate", "merge": "export", "check": "doctor", "stop": "cancel", "init": "new"}


class InOrder(click.Group):
    """A group whose help lists the commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the UsageError for an unknown one names the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], [*self.commands, *OTHER_NAMES], n=1)
            name = next((OTHER_NAMES.get(name, name) for name in close), None)
            hint = f"Did you mean {name!r}?" if name else "lowmem-grpo --help lists the commands."
            raise click.UsageError(f"{error.message} {hint}", ctx) from None


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lowmem-grpo")
def main() -> None:
    """Fine-tune language models with GRPO on one GPU, or try it on a CPU with the embedded tiny model."""
    for stream in (sys.stdout, sys.stderr):  # characters that the encoding lacks must not end a command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = show_error


for command in (
    run, new, plan, evaluate, generate, export, pairs, report, watch, serve, submit, jobs, logs, cancel, resume, doctor,
):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="lowmem-grpo")
