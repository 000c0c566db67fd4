"""Answers of earlier epochs: the newest are kept, within two bounds."""

from lowmem_grpo.engines.earlier import EarlierAnswers


def test_the_newest_answers_of_a_prompt_are_kept_in_order() -> None:
    kept = EarlierAnswers(of_a_prompt=6)
    kept.add([1, 2], [[10, 11], [12, 13]])
    kept.add([1, 2], [[14, 15], [16]])
    assert kept.of([1, 2]) == [[12, 13], [14, 15], [16]]
    assert kept.of([1, 3]) == []
    assert kept.tokens == 5


def test_prompts_that_were_sampled_longest_ago_are_dropped() -> None:
    kept = EarlierAnswers(of_all=6)
    for prompt in ([1], [2]):
        kept.add(prompt, [[7, 8, 9]])
    kept.add([1], [[4]])
    assert kept.of([2]) == []
    assert kept.of([1]) == [[7, 8, 9], [4]]
    assert kept.tokens == 4
