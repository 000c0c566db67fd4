"""Episodes: how what an environment shows first joins the prompt of a row."""

from tables import every_row

from lowmem_grpo.environments.episode import joined
from lowmem_grpo.types import Message

USER: Message = {"role": "user", "content": "Go."}
BEGUN: Message = {"role": "assistant", "content": "I go"}
CALL: Message = {"role": "assistant", "content": None, "tool_calls": [
    {"type": "function", "function": {"name": "f", "arguments": {}}}]}
RESULT: Message = {"role": "tool", "content": "3"}
SHOWN: Message = {"role": "user", "content": " A door."}


@every_row(("prompt", "observation", "wanted"), [
    ([USER], [SHOWN], [USER | {"content": "Go. A door."}]),  # as in TRL
    ([USER, BEGUN], [SHOWN], [USER, BEGUN, SHOWN]), ([USER, CALL, RESULT], [], [USER, CALL, RESULT]),
    ([USER, CALL, RESULT], [SHOWN, SHOWN], [USER, CALL, RESULT, SHOWN, SHOWN]),
])
def test_an_observation_goes_on_with_a_text_of_the_user_and_never_with_words_or_calls_of_the_policy(
    prompt: list[Message], observation: list[Message], wanted: list[Message]
) -> None:
    assert joined(prompt, observation) == wanted
