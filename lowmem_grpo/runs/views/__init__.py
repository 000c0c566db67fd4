"""What people see of a run: terminal, report page, pictures, tables, sinks."""
