"""What agents and those who train them wait for."""
