"""`lowmem-grpo report`: write the report page of a run again."""

from pathlib import Path

import click

from lowmem_grpo.views.terminal import plain_errors


@click.command(short_help="Write the report page of a run again.")
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
def report(run_dir: Path) -> None:
    """Write RUN_DIR/report.html from the files of a run, which may still be in progress."""
    with plain_errors():
        from lowmem_grpo.views.report import write_report

        click.echo(write_report(run_dir))
