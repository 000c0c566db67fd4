"""How scoring fails: always as RewardError, in the thread that asked."""


class RewardError(RuntimeError):
    """A reward function raised, took too long, lacked an argument or returned what is not a list of rewards."""


class MissingColumnError(RewardError):
    """A reward function requires an argument that no dataset column provides."""


class TooLateError(RewardError):
    """A reward function did not return within its time limit."""
